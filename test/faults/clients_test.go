package faults

import (
	"fmt"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestConnectionCap fills the cap: those inside are undisturbed, those outside
// are closed and counted, and places that become free are given again.
func TestConnectionCap(t *testing.T) {
	g := newGame(t)
	limit := kit.Scaled(200, 2000)
	p := kit.Start(t, g.config(nil, nil, kit.M{"limits": kit.M{"max_connections": limit, "max_udp_sessions": limit}}), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: g.addr(), UDP: g.addr(), Conns: limit, Flows: limit, Rate: 2 * limit})
	blocked := func(filter string) float64 { return p.Metric("filter_blocked_total", "filter", filter) }
	for range limit {
		if b, err := attempt(g.addr()); err == nil {
			t.Fatalf("backend %d answered beyond the cap", b)
		}
	}
	kit.Settles(t, "filter_blocked_total of max_conn", float64(limit), func() float64 { return blocked("max_conn") })
	if answered(t, g.addr()) {
		t.Error("a UDP client was answered beyond the cap")
	}
	kit.Settles(t, "filter_blocked_total of max_udp", 1.0, func() float64 { return blocked("max_udp") })
	load.Round(t)
	perfect(t, load)
	kit.Settles(t, "active_connections", 0.0, func() float64 { return p.Metric("active_connections") })
	again := kit.StartLoad(t, kit.LoadOptions{TCP: g.addr(), Conns: limit, Rate: limit})
	perfect(t, again)
}

// TestNewRate allows a number of new flows a second, and no more at once.
func TestNewRate(t *testing.T) {
	g := newGame(t)
	p := kit.Start(t, g.config(nil, nil, kit.M{"limits": kit.M{"max_new_sessions_per_sec": 5}}), kit.Options{})
	served, refused := 0, 0
	for served+refused < 50 {
		if _, err := attempt(g.addr()); err == nil {
			served++
		} else {
			refused++
		}
	}
	if served < 5 || refused == 0 {
		t.Errorf("%d connections were served and %d refused", served, refused)
	}
	if n := p.Metric("filter_blocked_total", "filter", "max_new_rate"); n != float64(refused) {
		t.Errorf("filter_blocked_total of max_new_rate is %v, want %d", n, refused)
	}
}

// pace returns a function that waits, so that it returns 5,000 times a second at
// the most and never many at once: what a socket's buffer has no room for is
// lost, whoever has sent it.
func pace(t *testing.T) (wait func()) {
	const perTick = 25
	every := time.NewTicker(5 * time.Millisecond)
	t.Cleanup(every.Stop)
	n := 0
	return func() {
		if n%perTick == 0 {
			<-every.C
		}
		n++
	}
}

// TestNoisySource has clients send what no route can decide, beside others that
// play. The baseline's listener dies of it.
func TestNoisySource(t *testing.T) {
	g := newGame(t)
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, g.config(kit.M{"m": kit.Listener([]string{"udp/" + addr},
		kit.Match(kit.M{"regexp": kit.M{"pattern": "^never", "count": 5}}, kit.M{"handler": "echo"}),
		kit.Match(kit.M{"regexp": kit.M{"pattern": "^WH", "count": 2}}, kit.M{"handler": "pool", "pool": "udp"}))}, nil), kit.Options{})
	players := kit.StartLoad(t, kit.LoadOptions{UDP: addr, Flows: 100, Rate: 500, Body: 20})
	before := p.Usage()
	sent, wait := 0, pace(t)
	for range kit.Scaled(100, 2000) {
		c, err := net.Dial("udp", addr)
		if err != nil {
			t.Fatal(err)
		}
		for range 50 { // from one source, then from another
			for _, d := range []string{"", "n", "ne", "nev"} {
				wait()
				if _, err := c.Write([]byte(d)); err == nil {
					sent++
				}
			}
		}
		c.Close()
	}
	players.Round(t)
	perfect(t, players)
	t.Logf("%d datagrams of noise, before %+v, after %+v", sent, before, p.Usage())
	newcomer := kit.StartLoad(t, kit.LoadOptions{UDP: addr, Flows: 5})
	newcomer.Go(t, 50)
	perfect(t, newcomer)
	// Those of the players stay until they have been idle for long; a newcomer may
	// have got the port of one.
	kit.Eventually(t, "100 to 105 sessions are left", func() bool {
		n := p.Metric("active_udp_sessions", "listener", "m")
		return n >= 100 && n <= 105
	})
	if after := p.Usage(); after.Goroutines > before.Goroutines+10 {
		t.Errorf("%d goroutines before the noise, %d after", before.Goroutines, after.Goroutines)
	}
}

// TestOneSource has one client port send first datagrams that are empty, short
// or cut off, 5,000 a second, at a listener that looks at first bytes. Who plays
// loses nothing, and who comes after it is served.
func TestOneSource(t *testing.T) {
	g := newGame(t)
	addr := kit.Local(kit.Port(t))
	var noise [][]byte
	routes := []kit.M{kit.Match(kit.M{"regexp": kit.M{"pattern": "^WH", "count": 2}}, kit.M{"handler": "pool", "pool": "udp"})}
	for _, name := range []string{"quic", "raknet", "a2s", "wireguard", "openvpn", "teamspeak3"} {
		routes = append(routes, kit.Match(kit.M{"sniffer": kit.M{"name": name}}, kit.M{"handler": "reject"})) // what is whole enough
		for _, c := range firstpackets.All(t, name) {
			if d := c.Data(t)[0]; len(d) > 2 {
				noise = append(noise, d[:1], d[:2], d[:len(d)/2], d[:len(d)-1])
			}
		}
	}
	if len(noise) < 4*len(routes) {
		t.Fatalf("%d first datagrams are too few", len(noise))
	}
	p := kit.Start(t, g.config(kit.M{"m": kit.Listener([]string{"udp/" + addr}, routes...)}, nil), kit.Options{})
	players := kit.StartLoad(t, kit.LoadOptions{UDP: addr, Flows: 100, Rate: 500, Body: 20})
	players.Round(t)
	before := p.Usage()

	c, err := net.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	wait := pace(t)
	for n := range kit.Scaled(10_000, 50_000) {
		wait()
		d := []byte{}
		if n%5 != 0 {
			d = noise[n%len(noise)]
		}
		if _, err := c.Write(d); err != nil {
			t.Fatal(err)
		}
	}
	players.Round(t)
	perfect(t, players)
	newcomer := kit.StartLoad(t, kit.LoadOptions{UDP: addr, Flows: 5})
	newcomer.Go(t, 50)
	perfect(t, newcomer)
	c.SetReadDeadline(time.Now().Add(time.Millisecond))    // one that has passed would end the read before it looks
	if n, err := c.Read(make([]byte, 1<<16)); err == nil { // the backend answers everybody
		t.Errorf("who makes noise is answered %d bytes", n)
	}
	kit.Eventually(t, "goroutines are back", func() bool { return p.Usage().Goroutines <= before.Goroutines+10 })
	after := p.Usage()
	t.Logf("before %+v, after %+v, dropped %v", before, after, p.Metric("datagrams_dropped_total", "listener", "m"))
	if grown := after.RSS - before.RSS; grown > 32<<20 && !kit.Race {
		t.Errorf("one source has cost %d KiB", grown>>10)
	}
}

// TestStuckSession has clients whose backend, or who themselves, do not read.
// They fill their own buffers and nobody else's.
func TestStuckSession(t *testing.T) {
	g := newGame(t)
	stuck := kit.Local(kit.Port(t))
	deaf, err := net.ListenPacket("udp", "127.0.0.1:0") // never read
	if err != nil {
		t.Fatal(err)
	}
	defer deaf.Close()
	ln, err := net.Listen("tcp", "127.0.0.1:0") // never accepts: the kernel does
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	p := kit.Start(t, g.config(
		kit.M{"st": kit.ToPool("deaf-tcp", "tcp/"+stuck), "su": kit.ToPool("deaf-udp", "udp/"+stuck)},
		kit.M{"deaf-tcp": kit.Pool(ln.Addr().String()), "deaf-udp": kit.Pool(deaf.LocalAddr().String())}), kit.Options{})
	load := g.load(t, 50)
	p.Collect()
	before := p.RSS()
	chunk := make([]byte, 1200)
	for range 10 {
		tcp, err := net.Dial("tcp", stuck)
		if err != nil {
			t.Fatal(err)
		}
		defer tcp.Close()
		fill(t, tcp.(*net.TCPConn))
		udp, err := net.Dial("udp", stuck)
		if err != nil {
			t.Fatal(err)
		}
		defer udp.Close()
		for range 500 {
			udp.Write(chunk)
		}
	}
	load.Round(t)
	perfect(t, load)
	if grown := p.RSS() - before; grown > 20*256<<10 && !kit.Race {
		t.Errorf("10 stuck connections and sessions have cost %d KiB", grown>>10)
	}
}

// fill writes until nothing more fits between here and the other end.
func fill(t *testing.T, c *net.TCPConn) {
	t.Helper()
	rc, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	chunk := make([]byte, 64<<10)
	total, idle := 0, 0
	kit.Eventually(t, "a connection is full", func() bool {
		idle++
		rc.Write(func(fd uintptr) bool {
			for {
				n, err := unix.Write(int(fd), chunk)
				if err != nil {
					return true
				}
				total, idle = total+n, 0
			}
		})
		return idle > 10
	})
	if total == 0 {
		t.Fatal("nothing fitted into a connection")
	}
}

// TestIdleHold holds many silent connections and sessions: what each costs, and
// that all of them still work.
func TestIdleHold(t *testing.T) {
	g := newGame(t)
	n := kit.Scaled(2000, 9000)
	p := kit.Start(t, g.config(nil, nil), kit.Options{})
	warm := kit.StartLoad(t, kit.LoadOptions{TCP: g.addr(), Conns: 50})
	warm.Round(t)
	perfect(t, warm)
	kit.Settles(t, "active_connections", 0.0, func() float64 { return p.Metric("active_connections") })
	p.Collect()
	before := p.Usage()
	load := kit.StartLoad(t, kit.LoadOptions{TCP: g.addr(), Conns: n, Rate: 1})
	p.Collect()
	after := p.Usage()
	fds, bytes := float64(after.Files-before.Files)/float64(n), (after.RSS-before.RSS)/n
	t.Logf("%d idle connections: %.3f descriptors and %d bytes each", n, fds, bytes)
	if fds > 2.05 {
		t.Errorf("%.3f descriptors for an idle connection", fds)
	}
	if bytes > 32<<10 {
		t.Errorf("%d bytes of resident memory for an idle connection", bytes)
	}
	if got := p.Metric("active_connections"); got != float64(n) {
		t.Errorf("active_connections is %v, want %d", got, n)
	}
	perfect(t, load)
	udp := kit.StartLoad(t, kit.LoadOptions{UDP: g.addr(), Flows: n, Rate: 1})
	kit.Settles(t, "active_connections", 0.0, func() float64 { return p.Metric("active_connections") })
	if fds := float64(p.Files()-before.Files) / float64(n); fds > 1.05 {
		t.Errorf("%.3f descriptors for an idle session", fds)
	}
	if got := p.Metric("active_udp_sessions"); got != float64(n) {
		t.Errorf("active_udp_sessions is %v, want %d", got, n)
	}
	perfect(t, udp)
	all := kit.StartLoad(t, kit.LoadOptions{TCP: g.addr(), Conns: n / 2, Window: 256})
	all.Round(t)
	perfect(t, all)
}

// TestSessionsOfOneClient has one client port speak to two addresses: two sessions, each answered from where it was asked.
func TestSessionsOfOneClient(t *testing.T) {
	g := newGame(t)
	p := kit.Start(t, g.config(nil, nil), kit.Options{})
	second := kit.Local(kit.Port(t))
	p.MustLoad(g.config(kit.M{"second": kit.ToPool("udp", "udp/"+second)}, nil))
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i, to := range []string{g.addr(), second, g.addr()} {
		ua, err := net.ResolveUDPAddr("udp", to)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf("question %d", i)
		if _, err := c.WriteTo([]byte(want), ua); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 100)
		n, from, err := c.ReadFrom(b)
		if err != nil || string(b[:n]) != want || from.String() != to {
			t.Errorf("%s answered %q, %v; want %q from %s", from, b[:n], err, want, to)
		}
	}
	if n := p.Metric("active_udp_sessions"); n != 2 {
		t.Errorf("one client that speaks to two addresses has %v sessions, want 2", n)
	}
}
