package udprelay

import (
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// TestOneDirectionKeepsAlive: the client speaks once and the backend goes on
// for longer than the idle timeout, then it is the other way round.
func TestOneDirectionKeepsAlive(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	from := make(chan netip.AddrPort, 1)
	var conn atomic.Pointer[net.UDPConn]
	b := backend(t, "127.0.0.1:0", func(c *net.UDPConn, a netip.AddrPort, p []byte) {
		conn.Store(c)
		select {
		case from <- a:
		default:
		}
	})
	p := newPath(e, b, own)
	p.Idle = 300 * time.Millisecond
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	c := dial(t, ep.Addr())
	send(t, c, []byte("hello"))
	client := <-from
	began := time.Now()
	eventually(t, "a second of answers", func() bool {
		conn.Load().WriteToUDPAddrPort([]byte("x"), client)
		receive(t, c)
		return time.Since(began) > time.Second
	})
	eventually(t, "another of questions", func() bool {
		send(t, c, []byte("y"))
		return time.Since(began) > 2*time.Second
	})
	if _, _, closed := own.count(); closed != 0 || e.Sessions() != 1 {
		t.Fatalf("ended while in use")
	}
	eventually(t, "idle end", func() bool { why, _, ok := own.lastClosed(); return ok && why == relay.IdleTimeout })
	_, info, _ := own.lastClosed()
	if info.Idle < p.Idle {
		t.Errorf("ended after %v, before its idle timeout", info.Idle)
	}
}

func TestLifetime(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), own)
	p.Idle, p.Lifetime = time.Minute, 500*time.Millisecond
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	c := dial(t, ep.Addr())
	roundTrip(t, c, []byte("x"))
	eventually(t, "end by lifetime", func() bool {
		c.Write([]byte("x"))
		why, _, ok := own.lastClosed()
		return ok && why == relay.Limit
	})
}

// TestChurn makes and ends 2,000 sessions in slots that are used again and
// again, while answers to the ended ones still come in.
func TestChurn(t *testing.T) {
	e := startEngine(t, 2)
	own := new(owner)
	p := newPath(e, backend(t, "127.0.0.1:0", func(c *net.UDPConn, from netip.AddrPort, b []byte) {
		for range 3 {
			c.WriteToUDPAddrPort(b, from)
		}
	}), own)
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	const rounds, clients = 20, 100
	for round := range rounds {
		conns := make([]*net.UDPConn, clients)
		for i := range conns {
			c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(ep.Addr()))
			if err != nil {
				t.Fatal(err)
			}
			conns[i] = c
			send(t, c, fmt.Appendf(nil, "%d/%d", round, i))
		}
		for i, c := range conns {
			if got, want := string(receive(t, c)), fmt.Sprintf("%d/%d", round, i); got != want {
				t.Fatalf("got %q, want %q", got, want)
			}
			c.Close()
		}
		e.ClosePaths(func(q *relay.Path) bool { return q == p }, relay.BackendDown)
		eventually(t, "all closed", func() bool { return e.Sessions() == 0 })
	}
	if _, _, closed := own.count(); closed != rounds*clients {
		t.Errorf("told of %d ends, want %d", closed, rounds*clients)
	}
	for _, w := range e.workers {
		if w.slab.next > clients+1 {
			t.Errorf("%d slots used for %d sessions at a time", w.slab.next, clients)
		}
	}
}

func TestStaleEventIsRecognised(t *testing.T) {
	var b slab
	slot := b.take()
	s := b.at(slot)
	s.flags = live
	gen := s.gen
	if b.get(slot, gen) != s {
		t.Fatal("a live session is not found")
	}
	b.put(slot)
	if b.get(slot, gen) != nil {
		t.Error("an ended session is found")
	}
	if again := b.take(); again != slot {
		t.Fatalf("slot %d, want %d again", again, slot)
	}
	b.at(slot).flags = live
	if b.get(slot, gen) != nil {
		t.Error("the next session in the slot is taken for the ended one")
	}
	if b.get(0, 0) != nil || b.get(1000, 0) != nil {
		t.Error("a slot that never was is found")
	}
}

func TestFlows(t *testing.T) {
	e := startEngine(t, 2)
	own := new(owner)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), own)
	ep := listen(t, e, "0.0.0.0:0", forwardTo(p))
	const n = 300
	want := map[netip.AddrPort]*net.UDPConn{}
	for range n {
		c := dial(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.3"), ep.Addr().Port()))
		roundTrip(t, c, []byte("1234"))
		want[c.LocalAddr().(*net.UDPAddr).AddrPort()] = c
	}
	seen := map[relay.ID]relay.Info{}
	e.Flows(func(i *relay.Info) bool { seen[i.ID] = *i; return true })
	if len(seen) != n {
		t.Fatalf("%d flows, want %d", len(seen), n)
	}
	var one relay.ID
	for id, i := range seen {
		if want[i.Client] == nil || i.Path != p || i.PacketsC2S != 1 || i.BytesS2C != 4 || !i.UpstreamLocal.IsValid() || i.Local.Addr().String() != "127.0.0.3" {
			t.Fatalf("%+v", i)
		}
		if back, ok := relay.ParseID(id.String()); !ok || back != id {
			t.Fatalf("id %v reads as %v", id, back)
		}
		one = id
	}
	if i, ok := e.Flow(one); !ok || i.Client != seen[one].Client {
		t.Errorf("flow %v is %+v, %v", one, i, ok)
	}
	if !e.CloseFlow(one, relay.Admin) {
		t.Error("the flow cannot be closed")
	}
	if why, info, _ := own.lastClosed(); why != relay.Admin || info.ID != one {
		t.Errorf("closed %v by %v", info.ID, why)
	}
	if e.CloseFlow(one, relay.Admin) {
		t.Error("it can be closed twice")
	}
	if _, ok := e.Flow(one); ok {
		t.Error("a closed flow is found")
	}
	stopped := 0
	e.Flows(func(*relay.Info) bool { stopped++; return stopped < 5 })
	if stopped != 5 {
		t.Errorf("yielded %d times after it was told to stop at 5", stopped)
	}
}

func TestRehome(t *testing.T) {
	e := startEngine(t, 1)
	tag := func(name string) netip.AddrPort {
		return backend(t, "127.0.0.1:0", func(c *net.UDPConn, from netip.AddrPort, p []byte) {
			c.WriteToUDPAddrPort(append([]byte(name), p...), from)
		})
	}
	oldOwner, newOwner := new(owner), new(owner)
	old, next := newPath(e, tag("old "), oldOwner), newPath(e, tag("new "), newOwner)
	var refuse, hold atomic.Bool
	var rehomed atomic.Int32
	current := new(atomic.Pointer[relay.Path])
	current.Store(old)
	conns := make(chan *Conn, 1)
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		if o.From != nil {
			rehomed.Add(1)
		}
		p := current.Load()
		if refuse.Load() {
			o.Counters, o.Reason = &p.Counters[o.Worker], relay.NoBackend
			return Refuse
		}
		if hold.Load() {
			c, err := o.Hold(p)
			if err != nil {
				t.Error(err)
				return Refuse
			}
			conns <- c
			return Hold
		}
		return forwardTo(p)(o)
	}))
	c := dial(t, ep.Addr())
	ask := func() string {
		t.Helper()
		send(t, c, []byte("x"))
		return string(receive(t, c))
	}
	if got := ask(); got != "old x" {
		t.Fatalf("got %q", got)
	}
	e.Rehome(func(p *relay.Path) bool { return p == next })
	if got := ask(); got != "old x" {
		t.Errorf("another path's rehoming moved the session: %q", got)
	}
	refuse.Store(true)
	e.Rehome(func(p *relay.Path) bool { return p == old })
	eventually(t, "a datagram refused", func() bool {
		c.Write([]byte("lost"))
		return dropped(old, relay.NoBackend) > 0
	})
	if n := e.Sessions(); n != 1 {
		t.Errorf("%d sessions after a refused rehoming, want 1", n)
	}
	refuse.Store(false)
	current.Store(next)
	drain(c)
	eventually(t, "the new backend", func() bool { return ask() == "new x" })
	if why, _, ok := oldOwner.lastClosed(); !ok || why != relay.BackendDown {
		t.Errorf("old session ended by %v", why)
	}
	if a, _, closed := newOwner.count(); a != 1 || closed != 0 {
		t.Errorf("new owner: answered %d, closed %d", a, closed)
	}

	// Now through a Conn.
	hold.Store(true)
	current.Store(old)
	e.Rehome(func(*relay.Path) bool { return true })
	var held *Conn
	eventually(t, "the session held", func() bool {
		c.Write([]byte("h"))
		select {
		case held = <-conns:
			return true
		default:
			return false
		}
	})
	if _, _, closed := newOwner.count(); closed != 1 {
		t.Errorf("new owner told of %d ends, want 1", closed)
	}
	fd, errno := sock.DialUDP(old.Backend, netip.Addr{})
	if errno != 0 {
		t.Fatal(errno)
	}
	if err := held.Forward(old, fd); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the old backend again", func() bool { return string(receive(t, c)) == "old h" })
	if n := e.Sessions(); n != 1 {
		t.Errorf("%d sessions, want 1", n)
	}
}

// drain reads what has come so far.
func drain(c *net.UDPConn) {
	buf := make([]byte, 100)
	c.SetReadDeadline(time.Now().Add(time.Millisecond)) // one that has passed would end the read before it looks
	for {
		if _, err := c.Read(buf); err != nil {
			return
		}
	}
}

// TestManyEndpoints opens and closes as many as a port-range listener has.
func TestManyEndpoints(t *testing.T) {
	e := startEngine(t, 2)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
	var eps []*Endpoint
	for _, addr := range freeAddrs(t, 1100) {
		eps = append(eps, listen(t, e, addr, forwardTo(p)))
	}
	for _, ep := range eps[:50] {
		roundTrip(t, dial(t, ep.Addr()), []byte("x"))
	}
	for _, ep := range eps[1:] {
		ep.Close(relay.Drain)
	}
	if n := e.Sessions(); n != 1 {
		t.Errorf("%d sessions, want those of the endpoint that is left", n)
	}
	roundTrip(t, dial(t, eps[0].Addr()), []byte("y"))
	again, err := e.Listen(eps[1].Addr(), sock.Options{}, forwardTo(p))
	if err != nil {
		t.Fatal(err)
	}
	roundTrip(t, dial(t, again.Addr()), []byte("z"))
}

// freeAddrs are addresses with a port each. The kernel may choose one port twice
// for sockets that share theirs, as those of an endpoint do.
func freeAddrs(t *testing.T, n int) (addrs []string) {
	t.Helper()
	for range n {
		c, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		addrs = append(addrs, c.LocalAddr().String())
	}
	return addrs
}

func TestListenAfterClose(t *testing.T) {
	e := startEngine(t, 1)
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(*Opening) Decision { return Divert }))
	e.Close()
	if _, err := e.Listen(netip.MustParseAddrPort("127.0.0.1:0"), sock.Options{}, nil); err == nil {
		t.Error("a closed engine listens")
	}
	if err := ep.WriteTo(nil, new(Way)); err == nil {
		t.Error("a closed endpoint writes")
	}
	ep.Close(relay.Drain)
	e.Close()
	e.Flows(func(*relay.Info) bool { t.Error("a flow"); return true })
	if e.CloseFlow(relay.MakeID(true, 0, 1, 0), relay.Admin) {
		t.Error("a flow closed")
	}
}

// TestListenMeetsClose: whichever comes first, nothing is left open.
func TestListenMeetsClose(t *testing.T) {
	for range 20 {
		e := startEngine(t, 2)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				if _, err := e.Listen(netip.MustParseAddrPort("127.0.0.1:0"), sock.Options{}, acceptFunc(func(*Opening) Decision { return Divert })); err != nil {
					return
				}
			}
		}()
		e.Close()
		<-done
	}
}
