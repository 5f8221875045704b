package udprelay

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

func TestPortUnreachable(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	l, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	b := l.LocalAddr().(*net.UDPAddr).AddrPort()
	l.Close()
	p := newPath(e, b, own)
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	c := dial(t, ep.Addr())
	for range 50 {
		send(t, c, []byte("x"))
	}
	eventually(t, "a failure", func() bool { _, f, _ := own.count(); return f > 0 })
	own.mu.Lock()
	if own.failed[0] != relay.EarlyReset {
		t.Errorf("failed by %v, want early_reset", own.failed[0])
	}
	own.mu.Unlock()

	// The backend comes up: the session has lived on and nothing is lost.
	up := echoBackend(t, b.String())
	if up != b {
		t.Fatal("the port is gone")
	}
	send(t, c, []byte("back"))
	for string(receive(t, c)) != "back" { // behind what had not been sent yet
	}
	if n := e.Sessions(); n != 1 {
		t.Errorf("%d sessions, want 1", n)
	}
}

func TestPortClosedAfterAnswers(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	l, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	p := newPath(e, l.LocalAddr().(*net.UDPAddr).AddrPort(), own)
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	c := dial(t, ep.Addr())
	send(t, c, []byte("x"))
	buf := make([]byte, 10)
	_, from, err := l.ReadFromUDPAddrPort(buf)
	if err != nil {
		t.Fatal(err)
	}
	l.WriteToUDPAddrPort(buf[:1], from)
	receive(t, c)
	l.Close()
	eventually(t, "a failure", func() bool {
		send(t, c, []byte("x"))
		_, f, _ := own.count()
		return f > 0
	})
	own.mu.Lock()
	defer own.mu.Unlock()
	if own.failed[0] != relay.PortClosed {
		t.Errorf("failed by %v, want port_unreachable", own.failed[0])
	}
	if len(own.failed) > 2 {
		t.Errorf("told of %d failures, want at most one a second", len(own.failed))
	}
}

// TestStuckBackend: a backend that never reads loses its own datagrams and
// disturbs no other session.
func TestStuckBackend(t *testing.T) {
	e := startEngine(t, 1)
	stuck, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer stuck.Close()
	stuck.SetReadBuffer(1)
	bad := newPath(e, stuck.LocalAddr().(*net.UDPAddr).AddrPort(), nil)
	good := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
	toBad, toGood := forwardTo(bad), forwardTo(good)
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		if o.Data[0] == 'b' {
			return toBad(o)
		}
		return toGood(o)
	}))
	a, b := dial(t, ep.Addr()), dial(t, ep.Addr())
	for range 100 {
		for range 20 {
			b.Write(append([]byte("b"), make([]byte, 1000)...))
		}
		roundTrip(t, a, []byte("good"))
	}
	if n := e.Sessions(); n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
}

func TestRefusedIsCountedAndSilent(t *testing.T) {
	e := startEngine(t, 1)
	p := newPath(e, netip.AddrPort{}, nil)
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		switch string(o.Data) {
		case "ping":
			way := o.Way()
			if err := ep0(o).WriteTo([]byte("pong"), &way); err != nil {
				t.Error(err)
			}
			return Divert
		case "panic":
			panic("in the acceptor")
		}
		o.Counters, o.Reason = &p.Counters[o.Worker], relay.NoBackend
		return Refuse
	}))
	c := dial(t, ep.Addr())
	send(t, c, []byte("a"))
	send(t, c, nil)
	send(t, c, []byte("panic"))
	send(t, c, []byte("ping"))
	if got := string(receive(t, c)); got != "pong" {
		t.Errorf("got %q, want the acceptor's own answer", got)
	}
	if n := dropped(p, relay.NoBackend); n != 2 {
		t.Errorf("%d dropped, want 2", n)
	}
	if n := e.Panics(); n != 1 {
		t.Errorf("%d panics, want 1", n)
	}
	if n := e.Sessions(); n != 0 {
		t.Errorf("%d sessions, want none", n)
	}
}

func ep0(o *Opening) *Endpoint { return o.sock.ep }

// TestFlood: one source that sends what it can, none of which makes a session,
// and a backend that answers without end leave the others their turns.
func TestFlood(t *testing.T) {
	e := startEngine(t, 1)
	good := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
	stop := make(chan struct{})
	var floods sync.WaitGroup
	loud := newPath(e, backend(t, "127.0.0.1:0", func(c *net.UDPConn, from netip.AddrPort, p []byte) {
		for { // its one client says one thing
			select {
			case <-stop:
				return
			default:
				c.WriteToUDPAddrPort(p, from)
			}
		}
	}), nil)
	toGood, toLoud := forwardTo(good), forwardTo(loud)
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		switch {
		case len(o.Data) < 3:
			o.Counters, o.Reason = &good.Counters[o.Worker], relay.Filtered
			return Refuse
		case o.Data[0] == 'l':
			return toLoud(o)
		}
		return toGood(o)
	}))
	send(t, dial(t, ep.Addr()), []byte("loud"))
	flooder := dial(t, ep.Addr())
	floods.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
				flooder.Write([]byte("xx")[:n%3])
			}
		}
	})
	var players []*net.UDPConn
	for range 5 {
		players = append(players, dial(t, ep.Addr()))
	}
	most := 0
	for round := range 10 {
		for _, c := range players {
			// The flood may fill the socket before this one gets in: a real
			// client would send again, too.
			got := make([]byte, 100)
			for {
				send(t, c, fmt.Appendf(nil, "good %d", round))
				c.SetReadDeadline(time.Now().Add(patience / 10))
				n, err := c.Read(got)
				if err == nil && string(got[:n]) == fmt.Sprintf("good %d", round) {
					break
				}
			}
		}
		e.workers[0].call(func(w *worker) { most = max(most, len(w.again), len(w.retry)) })
	}
	close(stop)
	floods.Wait()
	if most > 1+6 {
		t.Errorf("%d sockets waited for a turn, though there are 7", most)
	}
	if dropped(good, relay.Filtered) == 0 {
		t.Error("nothing of the flood was refused")
	}
}

// TestOneTurnAtATime: however many events a full socket has, it waits for its
// next turn once.
func TestOneTurnAtATime(t *testing.T) {
	e := startEngine(t, 1)
	p := newPath(e, netip.AddrPort{}, nil)
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		o.Counters, o.Reason = &p.Counters[o.Worker], relay.NoRoute
		return Refuse
	}))
	c := dial(t, ep.Addr())
	var waiting int
	var taken uint64
	e.workers[0].call(func(w *worker) { // which reads nothing meanwhile
		for range 4 * batch {
			c.Write([]byte("x"))
		}
		so := ep.sockets[0]
		ev := unix.EpollEvent{Fd: int32(ep.index), Pad: int32(kindSocket<<24 | so.gen)}
		for range 3 {
			w.handle(ev, false)
		}
		waiting, taken = len(w.again), dropped(p, relay.NoRoute)
	})
	if waiting != 1 || taken != batch {
		t.Errorf("%d turns waited for and %d datagrams taken, want 1 and %d", waiting, taken, batch)
	}
	eventually(t, "the rest taken", func() bool { return dropped(p, relay.NoRoute) == 4*batch })
}
