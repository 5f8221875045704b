package serve

import (
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestStop ends a process with live flows: not ready and deaf to strangers at
// once, the old flows until the grace has passed, exit code 0.
func TestStop(t *testing.T) {
	const passes = "3s" // the others are longer than the test
	for name, tc := range map[string]struct {
		grace string
		end   func(p *kit.Process, load *kit.Load)
	}{
		"the grace passes":     {passes, func(*kit.Process, *kit.Load) {}},
		"the flows end":        {"10m", func(_ *kit.Process, load *kit.Load) { load.Stop() }},
		"a second signal ends": {"10m", func(p *kit.Process, _ *kit.Load) { p.Signal(syscall.SIGTERM) }},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBackends(t)
			addr := kit.Local(kit.Port(t))
			o := kit.M{"shutdown_grace": tc.grace}
			pools := b.pools()
			pools["udp"].(kit.M)["idle_timeout"] = "2s"
			p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr), "u": kit.ToPool("udp", "udp/"+addr)}, pools, o), kit.Options{})
			n := kit.Scaled(100, 500)
			load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: n, Flows: n, Rate: 1000, Patience: time.Second})
			load.Round(t)
			p.Signal(syscall.SIGTERM)
			kit.Eventually(t, "/readyz says no, or nothing", func() bool { status, _ := p.Get("/readyz"); return status != 200 })
			if status, body := p.Get("/readyz"); status == 503 && !strings.Contains(body, "draining") {
				t.Errorf("/readyz says %s", body)
			}
			if r := load.Report(); !r.Perfect() && r.Sent-r.Answered > 64 {
				t.Errorf("before the grace the load noticed: %v", &r)
			}
			if tc.grace != passes {
				kit.Eventually(t, "it waits for the flows there are", func() bool { return strings.Contains(p.Log(), "waiting for flows to end") })
				noNewFlows(t, p, addr)
			}
			tc.end(p, load)
			if code := p.Exit(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			if r := load.Stop(); r.Duplicated+r.Damaged+r.Moved+r.Resourced != 0 {
				t.Errorf("the load noticed: %v", &r)
			}
		})
	}
}

// noNewFlows makes sure that a stopping process answers nobody whom it does not
// know, and counts whom it turns away.
func noNewFlows(t *testing.T, p *kit.Process, addr string) {
	t.Helper()
	conns := func() float64 { return p.Metric("listener_connections_total", "listener", "t", "result", "draining") }
	datagrams := func() float64 {
		return p.Metric("datagrams_dropped_total", "listener", "u", "reason", "draining")
	}
	wereConns, wereDatagrams := conns(), datagrams()
	stranger := net.IPv4(127, 0, 0, 2)
	c, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: stranger}}).Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	q := kit.Frame{Flow: 1 << 30, Seq: 1}
	c.SetDeadline(time.Now().Add(kit.Long))
	c.Write(q.Append(nil)) // to a connection that may be reset by now
	if _, _, err := kit.ReadFrame(c, nil); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a new connection: %v, want that it is closed", err)
	}
	kit.Settles(t, "connections refused as draining", wereConns+1, conns)

	u, err := (&net.Dialer{LocalAddr: &net.UDPAddr{IP: stranger}}).Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	u.Write([]byte("ping"))
	kit.Settles(t, "datagrams dropped as draining", wereDatagrams+1, datagrams)
	// It is dropped: what has not come by now never will. A deadline that has
	// passed would end the read before it looks.
	u.SetReadDeadline(time.Now().Add(time.Millisecond))
	if n, err := u.Read(make([]byte, 10)); err == nil {
		t.Errorf("a new session was answered %d bytes", n)
	}
}

// TestRestart runs a process again and again on the same ports.
func TestRestart(t *testing.T) {
	b := newBackends(t)
	addr := kit.Local(kit.Port(t))
	for range kit.Scaled(3, 50) {
		p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr), "u": kit.ToPool("udp", "udp/"+addr)}, b.pools(), kit.M{"shutdown_grace": "0s"}), kit.Options{})
		load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: 10, Flows: 10, Rate: 500, Patience: time.Second})
		load.Round(t)
		p.Signal(syscall.SIGTERM)
		if code := p.Exit(); code != 0 {
			t.Fatalf("exit code %d, want 0", code)
		}
		load.Stop()
	}
}
