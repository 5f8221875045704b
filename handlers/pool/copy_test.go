package pool

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/mholt/caddy-l4"
	"github.com/mholt/caddy-l4/layer4"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func TestMain(m *testing.M) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, os.Interrupt) // os/signal keeps a goroutine once it was used
	signal.Stop(ch)
	testkit.Main(m)
}

// record is evidence that counts.
type record struct{ good, bad atomic.Int64 }

func (r *record) PassiveOK()            { r.good.Add(1) }
func (r *record) Passive(relay.Failure) { r.bad.Add(1) }

// gone is a client that takes nothing any more, as it has sent a reset that
// nobody has read.
type gone struct{ net.Conn }

func (gone) Write([]byte) (int, error) { return 0, syscall.ECONNRESET }

// TestClientResetIsNoEvidence holds that a client which resets its connection
// before the backend's first byte has reached it cannot take the backend down.
func TestClientResetIsNoEvidence(t *testing.T) {
	for name, tc := range map[string]struct {
		client    func(net.Conn) net.Conn
		reset     bool // by the backend
		good, bad int64
	}{
		"the client is gone":    {client: func(c net.Conn) net.Conn { return gone{c} }, good: 1},
		"the backend resets":    {client: func(c net.Conn) net.Conn { return c }, reset: true, bad: 1},
		"both take what is due": {client: func(c net.Conn) net.Conn { return c }, good: 1},
	} {
		t.Run(name, func(t *testing.T) {
			client, ours := pair(t)
			up, backend := pair(t)
			var r record
			at := &listener.Place{Counters: make([]relay.Counters, 1)}
			done := make(chan struct{})
			go func() {
				defer close(done)
				cx := layer4.WrapConnection(tc.client(ours), nil, zap.NewNop())
				pumpStream(cx, up, at, watch(time.Minute, 0, func(relay.Reason) {}), &r)
				cx.Close()
			}()
			if tc.reset {
				backend.(*net.TCPConn).SetLinger(0)
			} else if _, err := backend.Write([]byte("welcome")); err != nil {
				t.Fatal(err)
			}
			backend.Close()
			client.(*net.TCPConn).CloseWrite()
			<-done
			if r.good.Load() != tc.good || r.bad.Load() != tc.bad {
				t.Errorf("the backend answered %d times and failed %d times, want %d and %d", r.good.Load(), r.bad.Load(), tc.good, tc.bad)
			}
		})
	}
}

// TestCopiedBytesCountOnce sends a message each way through a handler of
// another kind in front of the pool, which leaves the copying to this one.
func TestCopiedBytesCountOnce(t *testing.T) {
	tcp, udp := testkit.NewTCPBackend(t, 1, "127.0.0.1:0"), testkit.NewUDPBackend(t, 1, "127.0.0.1:0")
	for network, backend := range map[string]string{"tcp": tcp.Addr, "udp": udp.Addr} {
		t.Run(network, func(t *testing.T) {
			name := "copied-" + network
			run(t, testkit.App(testkit.M{name: testkit.Listener([]string{network + "/127.0.0.1:0"}, testkit.Route(
				testkit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20},
				testkit.M{"handler": "pool", "pool": "p"}))},
				testkit.M{"p": testkit.Pool(backend)}))
			c, err := net.Dial(network, proxy.Running().Listening(name)[0].Addr.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(testkit.Long))
			bytes := func(dir string) float64 {
				return metric(t, "wayhouse_bytes_total", "listener", name, "dir", dir)
			}
			before := map[string]float64{"c2s": bytes("c2s"), "s2c": bytes("s2c")} // the process outlives the test
			q := testkit.Frame{Flow: 1, Seq: 1, Body: []byte("question")}
			sent := q.Append(nil)
			if _, err := c.Write(sent); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 4096)
			n, err := c.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			for dir, want := range map[string]int{"c2s": len(sent), "s2c": n} {
				testkit.Settles(t, "bytes_total "+dir, before[dir]+float64(want), func() float64 { return bytes(dir) })
			}
		})
	}
}

// TestCopiedFlowsSayWhyTheyEnd looks for the reason of flows that this handler
// copies.
func TestCopiedFlowsSayWhyTheyEnd(t *testing.T) {
	tcp, udp := testkit.NewTCPBackend(t, 1, "127.0.0.1:0"), testkit.NewUDPBackend(t, 1, "127.0.0.1:0")
	for network, backend := range map[string]string{"tcp": tcp.Addr, "udp": udp.Addr} {
		for reason, options := range map[string]testkit.M{
			"idle_timeout": {"idle_timeout": "20ms"},
			"limit":        {"max_lifetime": "20ms"},
			"error":        {"source_addresses": []string{"192.0.2.1"}}, // none of ours
		} {
			t.Run(network+" "+reason, func(t *testing.T) {
				name := "ended-" + network + "-" + reason
				run(t, testkit.App(testkit.M{name: testkit.Listener([]string{network + "/127.0.0.1:0"}, testkit.Route(
					testkit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20},
					testkit.M{"handler": "pool", "pool": "p"}))},
					testkit.M{"p": testkit.With(testkit.Pool(backend), options)}))
				closed := func() float64 {
					return metric(t, "wayhouse_flows_closed_total", "listener", name, "proto", network, "reason", reason)
				}
				before := closed()
				c, err := net.Dial(network, proxy.Running().Listening(name)[0].Addr.String())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if _, err := c.Write([]byte("x")); err != nil {
					t.Fatal(err)
				}
				testkit.Settles(t, "flows_closed_total", before+1, closed)
			})
		}
	}
}

// TestConnectionsWithoutBackendSayWhyTheyEnd looks for the reason of connections
// that the engine has found no backend for.
func TestConnectionsWithoutBackendSayWhyTheyEnd(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close() // nobody listens there
	run(t, testkit.App(testkit.M{"given-up": testkit.Listener([]string{"tcp/127.0.0.1:0"}, testkit.Route(
		testkit.M{"handler": "pool", "pool": "p"}))}, testkit.M{"p": testkit.Pool(ln.Addr().String())}))
	closed := func() float64 {
		return metric(t, "wayhouse_flows_closed_total", "listener", "given-up", "proto", "tcp", "reason", "error")
	}
	before := closed()
	c, err := net.Dial("tcp", proxy.Running().Listening("given-up")[0].Addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	testkit.Settles(t, "flows_closed_total", before+1, closed)
	testkit.Settles(t, "connections that are counted as live", int64(0), flow.ListenerOf("given-up").Conns.Load)
}

// TestCopiedSessionHasThePoolsPath looks for the pool's limits and the backend
// at a UDP session that this handler copies, as operators and the engine see it.
func TestCopiedSessionHasThePoolsPath(t *testing.T) {
	udp := testkit.NewUDPBackend(t, 1, "127.0.0.1:0")
	run(t, testkit.App(testkit.M{"seen": testkit.Listener([]string{"udp/127.0.0.1:0"}, testkit.Route(
		testkit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20},
		testkit.M{"handler": "pool", "pool": "p"}))},
		testkit.M{"p": testkit.With(testkit.Pool(udp.Addr), testkit.M{"idle_timeout": "17m"})}))
	c, err := net.Dial("udp", proxy.Running().Listening("seen")[0].Addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	testkit.Settles(t, "the session's path", "p "+udp.Addr+" 17m0s", func() (got string) {
		listener.Running().Flows(func(i *relay.Info) bool {
			got = fmt.Sprint(i.Path.Pool, " ", i.Path.Backend, " ", i.Path.Idle)
			return true
		})
		return got
	})
	closed := func() float64 {
		return metric(t, "wayhouse_flows_closed_total", "listener", "seen", "reason", "backend_down")
	}
	before := closed()
	listener.Running().ClosePaths(func(p *relay.Path) bool { return p.Pool == "p" }, relay.BackendDown)
	testkit.Settles(t, "flows_closed_total", before+1, closed)
	if n := flow.ListenerOf("seen").Sessions.Load(); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
}

func run(t *testing.T, config testkit.M) {
	t.Helper()
	config["admin"] = testkit.M{"disabled": true, "config": testkit.M{"persist": false}}
	b, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(b, true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// TestHalfCloseThroughHandlers has a backend end its side first, behind a
// handler whose connections know no half-close.
func TestHalfCloseThroughHandlers(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	got := make(chan string, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(c, "bye")
		c.(*net.TCPConn).CloseWrite()
		b, err := io.ReadAll(c)
		got <- fmt.Sprint(string(b), " ", err)
	}()
	run(t, testkit.App(testkit.M{"half": testkit.Listener([]string{"tcp/127.0.0.1:0"}, testkit.Route(
		testkit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20},
		testkit.M{"handler": "pool", "pool": "p"}))},
		testkit.M{"p": testkit.Pool(ln.Addr().String())}))
	c, err := net.Dial("tcp", proxy.Running().Listening("half")[0].Addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if b, err := io.ReadAll(c); string(b) != "bye" || err != nil {
		t.Fatalf("the client read %q, %v", b, err)
	}
	if _, err := io.WriteString(c, "one more thing"); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if s := <-got; s != "one more thing <nil>" {
		t.Errorf("the backend read %s", s)
	}
}

// metric is the sum of the counters of a name that have these labels.
func metric(t *testing.T, name string, labels ...string) (sum float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	if err := metrics.Register(reg); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			has := map[string]string{}
			for _, l := range m.GetLabel() {
				has[l.GetName()] = l.GetValue()
			}
			ok := true
			for i := 0; i < len(labels); i += 2 {
				ok = ok && has[labels[i]] == labels[i+1]
			}
			if ok {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// refusing is a socket whose first writes fail, and which hears nothing.
type refusing struct {
	net.Conn
	errno  syscall.Errno
	refuse int
	sent   []string
}

func (c *refusing) Write(p []byte) (int, error) {
	if c.refuse--; c.refuse >= 0 {
		return 0, &net.OpError{Op: "write", Net: "udp", Err: os.NewSyscallError("write", c.errno)}
	}
	c.sent = append(c.sent, string(p))
	return len(p), nil
}

// kinds is evidence by its kind.
type kinds struct{ list []string }

func (k *kinds) PassiveOK()              { k.list = append(k.list, "ok") }
func (k *kinds) Passive(f relay.Failure) { k.list = append(k.list, f.String()) }

// TestFailedSendsAreEvidence holds what writes to a backend that fail say of it,
// once a second, and which of the datagrams are lost.
func TestFailedSendsAreEvidence(t *testing.T) {
	for name, tc := range map[string]struct {
		errno    syscall.Errno
		refuse   int
		evidence string
		sent     string
	}{
		"port unreachable":   {syscall.ECONNREFUSED, 1, "[early_reset]", "[one two three]"},
		"no way":             {syscall.EHOSTUNREACH, 2, "[send_error]", "[three]"},
		"too large":          {syscall.EMSGSIZE, 1, "[]", "[two three]"},
		"no memory of ours":  {syscall.ENOBUFS, 1, "[]", "[two three]"},
		"firewall of ours":   {syscall.EPERM, 1, "[]", "[two three]"},
		"all is as it seems": {0, 0, "[]", "[one two three]"},
	} {
		t.Run(name, func(t *testing.T) {
			client, ours := net.Pipe()
			upstream, other := net.Pipe()
			defer other.Close()
			up := &refusing{Conn: upstream, errno: tc.errno, refuse: tc.refuse}
			var k kinds
			done := make(chan struct{})
			go func() {
				defer close(done)
				at := &listener.Place{Counters: make([]relay.Counters, 1)}
				pumpDatagrams(layer4.WrapConnection(ours, nil, zap.NewNop()), up, at, watch(time.Minute, 0, func(relay.Reason) {}), &k)
			}()
			for _, s := range []string{"one", "two", "three"} {
				if _, err := client.Write([]byte(s)); err != nil {
					t.Fatal(err)
				}
			}
			client.Close()
			<-done
			if got := fmt.Sprint(k.list); got != tc.evidence {
				t.Errorf("the evidence is %s, want %s", got, tc.evidence)
			}
			if got := fmt.Sprint(up.sent); got != tc.sent {
				t.Errorf("sent %s, want %s", got, tc.sent)
			}
		})
	}
}

// pair is the two ends of a TCP connection.
func pair(t *testing.T) (dialed, accepted net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if dialed, err = net.Dial("tcp", ln.Addr().String()); err != nil {
		t.Fatal(err)
	}
	if accepted, err = ln.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialed.Close(); accepted.Close() })
	return dialed, accepted
}
