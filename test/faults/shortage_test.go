package faults

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestNoDescriptors leaves a process no descriptor to accept with, and gives
// them back: what is there lives on, the rest waits, and no backend is blamed.
func TestNoDescriptors(t *testing.T) {
	g := newGame(t)
	p := kit.Start(t, g.config(nil, kit.M{"tcp": kit.With(kit.Pool(g.tcp.Addr), kit.M{"health": tcpCheck})}), kit.Options{})
	load := g.load(t, 20)
	p.LimitFiles(uint64(p.Files()) - 5) // none to spare, not even those of a check that is on its way
	var conns []net.Conn
	for range 60 { // the kernel accepts, whatever the process does
		c, err := net.Dial("tcp", g.addr())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	// The admin endpoint may be out of descriptors as well, the log is not.
	kit.Eventually(t, "a line about a failed accept", func() bool { return strings.Contains(p.Log(), "accept failed") })
	load.Round(t)
	for _, c := range conns {
		c.Close()
	}
	p.LimitFiles(1 << 20)
	if b, err := attempt(g.addr()); err != nil || b != 1 {
		t.Errorf("with descriptors again: backend %d, %v", b, err)
	}
	kit.Eventually(t, "a new UDP client is answered", func() bool { return answered(t, g.addr()) })
	perfect(t, load)
	if n := healthy(p, "tcp"); n != 1 {
		t.Errorf("the backend is blamed for our own want: %d are healthy", n)
	}
	if n := p.Metric("backend_connect_errors_total"); n != 0 {
		t.Errorf("backend_connect_errors_total is %v", n)
	}
	if n := p.Metric("accept_errors_total", "listener", "tcp"); n == 0 {
		t.Error("accept_errors_total counts nothing")
	}
	if n := strings.Count(p.Log(), "accept failed"); n == 0 || n > 60 {
		t.Errorf("%d lines about failed accepts", n)
	}
}

// TestNoPorts uses up the local ports of a namespace, toward one backend.
func TestNoPorts(t *testing.T) {
	ns := kit.NewNetns(t)
	ns.Ports(t, 40000, 40099)
	var tcp *kit.TCPBackend
	var udp *kit.UDPBackend
	ns.Do(t, func() {
		tcp, udp = kit.NewTCPBackend(t, 1, "127.0.0.1:9001"), kit.NewUDPBackend(t, 1, "127.0.0.1:9001")
	})
	p := kit.Start(t, kit.App(
		kit.M{"tcp": kit.ToPool("tcp", "tcp/127.0.0.1:9000"), "udp": kit.ToPool("udp", "udp/127.0.0.1:9000")},
		kit.M{"tcp": kit.With(kit.Pool(tcp.Addr), kit.M{"health": kit.M{"check": "tcp_connect", "interval": "10s"}}), "udp": kit.With(kit.Pool(udp.Addr), kit.M{"idle_timeout": "2s"})}),
		kit.Options{Netns: ns})
	// The clients bind ports out of the range.
	dial := func(network string, from int) net.Conn {
		var c net.Conn
		ns.Do(t, func() {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2), Port: from}}
			if network == "udp" {
				d.LocalAddr = &net.UDPAddr{IP: net.IPv4(127, 0, 0, 2), Port: from}
			}
			var err error
			if c, err = d.Dial(network, "127.0.0.1:9000"); err != nil {
				t.Fatal(err)
			}
		})
		return c
	}
	for i := range 150 {
		c := dial("udp", 10000+i)
		defer c.Close()
		fmt.Fprint(c, "ping")
	}
	kit.Eventually(t, "datagrams are dropped as upstream_bind", func() bool {
		return p.Metric("datagrams_dropped_total", "reason", "upstream_bind") >= 40
	})
	kit.Eventually(t, "those of 150 sessions that have found a port out of 100 are left", func() bool {
		n := p.Metric("active_udp_sessions")
		return n <= 100 && n >= 90
	})
	kit.Settles(t, "sessions, once they are idle", 0.0, func() float64 { return p.Metric("active_udp_sessions") })
	c := dial("udp", 20000)
	defer c.Close()
	fmt.Fprint(c, "ping")
	if n, err := c.Read(make([]byte, 10)); n != 4 || err != nil {
		t.Errorf("with ports again: %d bytes, %v", n, err)
	}

	var conns []net.Conn
	for i := range 150 {
		conns = append(conns, dial("tcp", 10000+i))
	}
	kit.Eventually(t, "connections take all ports", func() bool { return p.Metric("active_connections") >= 90 })
	for _, c := range conns {
		c.(*net.TCPConn).SetLinger(0) // a port in TIME_WAIT would not be free
		c.Close()
	}
	kit.Settles(t, "connections, once they are closed", 0.0, func() float64 { return p.Metric("active_connections") })
	kit.Eventually(t, "a new connection is served", func() bool {
		c := dial("tcp", 0)
		defer c.Close()
		q := kit.Frame{Flow: 1, Seq: 1}
		c.Write(q.Append(nil))
		_, _, err := kit.ReadFrame(c, nil)
		return err == nil
	})
	kit.Settles(t, "healthy backends", 1, func() int { return healthy(p, "tcp") })
	if n := p.Metric("backend_connect_errors_total"); n != 0 {
		t.Errorf("backend_connect_errors_total is %v for our own want of ports", n)
	}
}

// TestInjected makes the kernel fail one call in ten, of each kind the data path
// makes, for reasons that are ours. What hits a flow may cost that flow, nothing
// else: no leak, nothing stuck, no backend blamed.
func TestInjected(t *testing.T) {
	_, err := exec.LookPath("strace")
	kit.Require(t, err, "strace (package strace)")
	for _, tc := range []struct{ calls, errno string }{
		{"connect", "EADDRNOTAVAIL"},
		{"socket", "ENOBUFS"},
		{"accept4", "ENOMEM"},
		{"sendmmsg,sendmsg,sendto", "ENOBUFS"},
		{"recvmmsg,recvmsg,recvfrom", "ENOMEM"},
		{"splice,writev", "EAGAIN"},
		{"connect", "EPERM"},
	} {
		t.Run(tc.calls+" "+tc.errno, func(t *testing.T) { injected(t, tc.calls, tc.errno) })
	}
}

func injected(t *testing.T, calls, errno string) {
	g := newGame(t)
	// strace and the race detector together are too slow.
	p := kit.Start(t, g.config(nil, nil), kit.Options{Plain: true})
	before := p.Usage()
	stop := inject(t, p, calls, errno)
	udp := kit.StartLoad(t, kit.LoadOptions{UDP: g.addr(), Flows: 30, Rate: 300, Patience: time.Second})
	served, failed := 0, 0
	for range 100 {
		if _, err := attempt(g.addr()); err == nil {
			served++
		} else {
			failed++
		}
	}
	udp.Go(t, 300)
	stop()
	if served < 50 {
		t.Errorf("%d of 100 connections were served", served)
	}
	r := udp.Stop()
	t.Logf("%d connections served, %d not; sessions: %v", served, failed, &r)
	after := g.load(t, 20)
	after.Round(t)
	perfect(t, after)
	if n := p.Metric("backend_connect_errors_total"); n != 0 {
		t.Errorf("the backend is blamed: backend_connect_errors_total is %v", n)
	}
	if h := healthy(p, "tcp") + healthy(p, "udp"); h != 2 {
		t.Errorf("%d backends are healthy, want 2", h)
	}
	kit.Settles(t, "active_connections", 0.0, func() float64 { return p.Metric("active_connections") })
	var now kit.Usage
	if !kit.Poll(kit.Long, func() bool {
		now = p.Usage()
		return now.Files <= before.Files+int(p.Metric("active_udp_sessions"))+5 && now.Goroutines <= before.Goroutines+5
	}) {
		t.Errorf("the process held %+v and holds %+v with %v sessions", before, now, p.Metric("active_udp_sessions"))
	}
}

// inject attaches strace to the process until stop is called.
func inject(t *testing.T, p *kit.Process, calls, errno string) (stop func()) {
	t.Helper()
	trace := exec.Command("strace", "-f", "-qq", "-o", "/dev/null", "-p", fmt.Sprint(p.PID()),
		"-e", "trace="+calls, "-e", fmt.Sprintf("inject=%s:error=%s:when=5+10", calls, errno))
	if err := trace.Start(); err != nil {
		t.Fatal(err)
	}
	kit.Eventually(t, "strace has the process", p.Traced)
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		trace.Process.Signal(os.Interrupt)
		err := trace.Wait()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Errorf("strace: %v", err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// TestDescriptorsForOperators holds that flows leave some descriptors to the
// admin API, however many clients come.
func TestDescriptorsForOperators(t *testing.T) {
	g := newGame(t)
	p := kit.Start(t, g.config(nil, nil), kit.Options{})
	p.LimitFiles(256)
	var conns []net.Conn
	for range 300 {
		c, err := net.Dial("tcp", g.addr())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	// Whether accepts pause or connects fail first is a matter of one number.
	kit.Eventually(t, "flows have what they may have", func() bool { return p.Files() >= 210 })
	if status, _ := p.Get("/healthz"); status != http.StatusOK {
		t.Errorf("GET /healthz: %d", status)
	}
	if n := p.Files(); n >= 256 {
		t.Errorf("%d descriptors are in use, all there are", n)
	}
	for _, c := range conns {
		c.Close()
	}
	kit.Eventually(t, "a client is served when the others have gone", func() bool {
		b, err := attempt(g.addr())
		return err == nil && b == 1
	})
}
