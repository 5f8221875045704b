package faults

import (
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// three is a pool of three backends behind a TCP port.
func three(t *testing.T, options kit.M) (p *kit.Process, addr string, backends []*kit.TCPBackend) {
	addr = kit.Local(kit.Port(t))
	var targets []string
	for i := range 3 {
		b := kit.NewTCPBackend(t, uint16(i+1), "127.0.0.1:0")
		backends, targets = append(backends, b), append(targets, b.Addr)
	}
	pool := kit.With(kit.M{"targets": targets, "health": tcpCheck, "max_tries": 3, "connect_timeout": "10s"}, options)
	p = kit.Start(t, kit.App(kit.M{"t": kit.ToPool("p", "tcp/"+addr)}, kit.M{"p": pool}), kit.Options{})
	if options["health"] == nil {
		kit.Settles(t, "healthy backends", 3, func() int { return healthy(p, "p") })
	}
	return p, addr, backends
}

// TestBackendKilled kills one of three backends: its connections end, the others'
// live on, and no new one fails, for one that cannot connect is tried elsewhere.
func TestBackendKilled(t *testing.T) {
	p, addr, backends := three(t, nil)
	conns := kit.Scaled(300, 1800)
	load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, Conns: conns, Rate: 1500})
	load.Round(t)
	victims := backends[0].Served()
	if victims != conns/3 {
		t.Errorf("round_robin gave a backend %d of %d connections", victims, conns)
	}
	backends[0].Kill()
	for i := range kit.Scaled(200, 1000) {
		if b, err := attempt(addr); err != nil || b == 1 {
			t.Errorf("new connection %d after the kill: backend %d, %v", i, b, err)
		}
	}
	kit.Settles(t, "connections that have ended", int64(victims), func() int64 { r := load.Report(); return r.Reset })
	kit.Settles(t, "healthy backends", 2, func() int { return healthy(p, "p") })
	load.Go(t, 500)
	if r := load.Stop(); r.Reset != int64(victims) || r.Lost+r.Damaged+r.Duplicated+r.Moved != 0 {
		t.Errorf("the load noticed: %v", &r)
	}

	backends[0].Listen(t, backends[0].Addr)
	kit.Settles(t, "healthy backends", 3, func() int { return healthy(p, "p") })
	served := backends[0].Served()
	kit.Eventually(t, "the backend that is back gets connections", func() bool {
		attempt(addr)
		return backends[0].Served() > served
	})
}

// TestRefusedConnect has a backend that refuses every connection and stays in the
// pool. Connections go to the other one, and the refusals are counted.
func TestRefusedConnect(t *testing.T) {
	p, addr, backends := three(t, kit.M{"health": kit.M{"check": "none", "fall": 1000}})
	backends[0].Kill()
	for i := range 30 {
		if b, err := attempt(addr); err != nil || b == 1 {
			t.Errorf("connection %d beside a backend that refuses: backend %d, %v", i, b, err)
		}
	}
	if n := p.Metric("backend_connect_errors_total", "pool", "p", "backend", backends[0].Addr, "kind", "refused"); n == 0 {
		t.Error("backend_connect_errors_total has no refusal")
	}
}

// TestBackendFlaps takes a backend down and up again many times. No new
// connection fails and none goes to it while it is marked down.
func TestBackendFlaps(t *testing.T) {
	p, addr, backends := three(t, nil)
	for range kit.Scaled(5, 60) {
		backends[1].Kill()
		kit.Settles(t, "healthy backends", 2, func() int { return healthy(p, "p") })
		before := p.Metric("backend_connect_errors_total", "pool", "p")
		for range 30 {
			if b, err := attempt(addr); err != nil || b == 2 {
				t.Fatalf("while backend 2 is down: backend %d, %v", b, err)
			}
		}
		if after := p.Metric("backend_connect_errors_total", "pool", "p"); after != before {
			t.Errorf("%v connects to a backend that is marked down", after-before)
		}
		backends[1].Listen(t, backends[1].Addr)
		kit.Settles(t, "healthy backends", 3, func() int { return healthy(p, "p") })
	}
}

// TestAllDown has no backend left, for a while: new connections are refused at
// once, and served again when one is back.
func TestAllDown(t *testing.T) {
	p, addr, backends := three(t, nil)
	for _, b := range backends {
		b.Kill()
	}
	kit.Settles(t, "healthy backends", 0, func() int { return healthy(p, "p") })
	before := p.Metric("lb_selections_total", "pool", "p", "result", "no_backend")
	tries := kit.Scaled(100, 5000)
	for range tries {
		if b, err := attempt(addr); err == nil {
			t.Fatalf("backend %d answered, and there is none", b)
		}
	}
	if n := p.Metric("lb_selections_total", "pool", "p", "result", "no_backend") - before; n != float64(tries) {
		t.Errorf("lb_selections_total of no_backend has grown by %v, want %d", n, tries)
	}
	for _, b := range backends {
		b.Listen(t, b.Addr)
	}
	kit.Settles(t, "healthy backends", 3, func() int { return healthy(p, "p") })
	if _, err := attempt(addr); err != nil {
		t.Errorf("with all backends back: %v", err)
	}
}

// TestTryAll has no backend that its check likes and one that serves.
func TestTryAll(t *testing.T) {
	p, addr, _ := three(t, kit.M{"on_all_down": "try_all", "health": quick(kit.M{"check": "http", "path": "/"})})
	kit.Settles(t, "healthy backends", 0, func() int { return healthy(p, "p") })
	if _, err := attempt(addr); err != nil {
		t.Errorf("with a check that fails: %v", err)
	}
}

// fullBacklog is a port that accepts nobody and answers no SYN: the queue of its
// listening socket is full.
func fullBacklog(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	port := kit.Port(t)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("tcp", kit.Local(port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return kit.Local(port)
}

// TestBlackHole has a backend that answers no SYN. Connections to it go to
// another one after the connect timeout, and nobody else waits for them.
func TestBlackHole(t *testing.T) {
	g := newGame(t)
	hole, live := fullBacklog(t), kit.NewTCPBackend(t, 7, "127.0.0.1:0")
	addr, only := kit.Local(kit.Port(t)), kit.Local(kit.Port(t))
	p := kit.Start(t, g.config(
		kit.M{"h": kit.ToPool("half", "tcp/"+addr), "o": kit.ToPool("hole", "tcp/"+only)},
		kit.M{
			"half": kit.With(kit.Pool(hole, live.Addr), kit.M{"connect_timeout": "200ms"}),
			"hole": kit.With(kit.Pool(hole), kit.M{"connect_timeout": "200ms"}),
		}), kit.Options{})
	load := g.load(t, 50)
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			if b, err := attempt(addr); err != nil || b != 7 {
				t.Errorf("beside a black hole: backend %d, %v", b, err)
			}
		})
		wg.Go(func() {
			if b, err := attempt(only); err == nil {
				t.Errorf("backend %d answered out of a black hole", b)
			}
		})
	}
	wg.Wait()
	if n := p.Metric("backend_connect_errors_total", "backend", hole, "kind", "timeout"); n == 0 {
		t.Error("backend_connect_errors_total has no timeout")
	}
	load.Round(t)
	perfect(t, load)
}

// TestFrozenBackend stops a backend process, whose kernel goes on accepting.
// Those who wait for it wait alone.
func TestFrozenBackend(t *testing.T) {
	g := newGame(t)
	back := newGame(t)
	frozen := kit.Start(t, kit.App(kit.M{
		"e": kit.Listener([]string{"tcp/" + back.addr(), "udp/" + back.addr()}, kit.Route(kit.M{"handler": "echo"})),
	}, kit.M{}), kit.Options{})
	addr := kit.Local(kit.Port(t))
	kit.Start(t, g.config(
		kit.M{"f": kit.ToPool("frozen", "tcp/"+addr, "udp/"+addr)},
		kit.M{"frozen": kit.Pool(back.addr())}), kit.Options{})
	load := g.load(t, 50)
	frozen.Signal(syscall.SIGSTOP)
	defer frozen.Signal(syscall.SIGCONT)
	var conns []net.Conn
	for range 50 {
		for _, network := range []string{"tcp", "udp"} {
			c, err := net.Dial(network, addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Write([]byte("are you there?")); err != nil {
				t.Fatal(err)
			}
			conns = append(conns, c)
		}
	}
	load.Round(t)
	perfect(t, load)
	frozen.Signal(syscall.SIGCONT)
	for _, c := range conns {
		if n, err := c.Read(make([]byte, 100)); err != nil || n != 14 {
			t.Fatalf("after the thaw: %d bytes, %v", n, err)
		}
	}
}

// TestNoWay takes the way to a UDP backend away under sessions that have had
// answers: sends that fail tell against it, in the engine and behind handlers.
func TestNoWay(t *testing.T) {
	here, there := kit.NewNetns(t), kit.NewNetns(t)
	kit.Veth(t, here, "10.99.0.1/24", there, "10.99.0.2/24")
	var udp *kit.UDPBackend
	there.Do(t, func() { udp = kit.NewUDPBackend(t, 1, "10.99.0.2:9001") })
	pool := kit.With(kit.Pool(udp.Addr), kit.M{"health": kit.M{"check": "none", "fall": 2, "interval": "1h"}})
	listeners := kit.M{
		"direct": kit.ToPool("direct", "udp/127.0.0.1:9000"),
		"copied": kit.Listener([]string{"udp/127.0.0.1:9002"}, kit.Route(kit.M{"handler": "throttle"}, kit.M{"handler": "pool", "pool": "copied"})),
	}
	p := kit.Start(t, kit.App(listeners, kit.M{"direct": pool, "copied": pool}), kit.Options{Netns: here})
	sessions := map[string][]net.Conn{}
	for pool, to := range map[string]string{"direct": "127.0.0.1:9000", "copied": "127.0.0.1:9002"} {
		for range 3 { // each tells at most once a second
			var c net.Conn
			here.Do(t, func() {
				var err error
				if c, err = net.Dial("udp", to); err != nil {
					t.Fatal(err)
				}
			})
			defer c.Close()
			if _, err := c.Write([]byte("ping")); err != nil {
				t.Fatal(err)
			}
			c.SetReadDeadline(time.Now().Add(kit.Long))
			if n, err := c.Read(make([]byte, 10)); n != 4 || err != nil {
				t.Fatalf("%s: %d bytes, %v", pool, n, err)
			}
			sessions[pool] = append(sessions[pool], c)
		}
	}
	here.Run(t, "ip", "route", "add", "unreachable", "10.99.0.2/32")
	for pool, conns := range sessions {
		if n := healthy(p, pool); n != 1 {
			t.Errorf("%d backends of %s are healthy before, want 1", n, pool)
		}
		kit.Eventually(t, "the backend of "+pool+" is down", func() bool {
			for _, c := range conns {
				c.Write([]byte("ping"))
			}
			return healthy(p, pool) == 0
		})
	}
}
