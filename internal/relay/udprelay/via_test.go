package udprelay

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// vias counts what the engine has of sockets of proxies.
func vias(e *Engine) (n int) {
	for _, w := range e.workers {
		w.call(func(w *worker) { n += len(w.viaIndex) })
	}
	return n
}

// TestHeadersOverReload: sessions go on as they began when an endpoint begins or ceases
// to take headers, or to trust their peer; new ones are what is asked for now.
func TestHeadersOverReload(t *testing.T) {
	e := startEngine(t, 1)
	b := newHeadBackend(t, "127.0.0.1:0")
	p := newPath(e, b.addr, nil)
	p.Proxy = formV2
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	n := 0
	expect := func(c *net.UDPConn, datagram []byte, client, payload string) {
		t.Helper()
		want := c.LocalAddr().(*net.UDPAddr).AddrPort()
		if client != "" {
			want = addr(client)
		}
		send(t, c, datagram)
		n++
		got := b.wait(t, n)
		if h, text, _ := split(got[n-1]); len(got) != n || h.Client != want || text != payload {
			t.Fatalf("%q of %v, want %q of %v", text, h.Client, payload, want)
		}
	}
	before := dial(t, ep.Addr())
	v2, spp := tell(formV2, one, dest, "x"), tell(formSPP, two, dest, "y")
	expect(before, v2, "", string(v2))
	expect(before, spp, "", string(spp))

	byV2, bySPP := dial(t, ep.Addr()), dial(t, ep.Addr())
	for _, h := range []*HeaderIn{trust(t, p, true, local), trust(t, p, true, "192.0.2.0/24"), nil, trust(t, p, false, local)} {
		ep.SetHeaders(h)
		expect(before, v2, "", string(v2)) // untouched
		expect(before, spp, "", string(spp))
		expect(byV2, v2, one, "x")
		expect(byV2, []byte("bare"), one, "bare")
		expect(bySPP, spp, two, "y")
		c := dial(t, ep.Addr())
		switch {
		case h == nil:
			expect(c, spp, "", string(spp))
			expect(bySPP, []byte("bare"), "", "bare") // of nobody that was told of
			expect(bySPP, tell(formSPP, six, dest, "z"), "", string(tell(formSPP, six, dest, "z")))
		case !h.trusts(&key{client: netip.MustParseAddr("127.0.0.1").As16()}):
			lost := dropped(p, relay.ProxyHeader)
			send(t, c, spp)
			send(t, bySPP, tell(formSPP, six, dest, "z"))
			send(t, byV2, tell(formV2, two, dest, "z"))
			eventually(t, "drops", func() bool { return dropped(p, relay.ProxyHeader) == lost+3 })
		default:
			expect(c, spp, two, "y")
		}
	}
}

// TestToldSessionsEnd: with the last session of a proxy's socket the engine forgets it,
// and it may begin otherwise.
func TestToldSessionsEnd(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), own)
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	ep.SetHeaders(trust(t, p, false, local))
	c := dial(t, ep.Addr())
	closed := 0
	for range 2 {
		for _, d := range [][]byte{tell(formV2, one, dest, "a"), tell(formSPP, two, dest, "a"), []byte("a"), tell(formV2, six, dest6, "a")} {
			send(t, c, d)
			if got := receive(t, c); got[len(got)-1] != 'a' {
				t.Fatalf("%q came back", got)
			}
			if n := e.Sessions(); n != 1 {
				t.Fatalf("%d sessions", n)
			}
			closed++
			e.ClosePaths(func(*relay.Path) bool { return true }, relay.Admin)
			eventually(t, "the end", func() bool { _, _, n := own.count(); return n == closed })
			if n := vias(e); n != 0 {
				t.Fatalf("%d vias are left", n)
			}
		}
	}
}

// TestToldRehome: a session that moves keeps its client, whatever the datagram has with it.
func TestToldRehome(t *testing.T) {
	for _, tc := range []struct {
		form   proxyproto.Form
		client string
		next   []byte
	}{
		{formV2, one, []byte("x")}, {formV2, one, tell(formV2, one, dest, "x")}, {formSPP, one, tell(formSPP, one, dest, "x")},
		{formV2, "", []byte("x")}, {formV2, "", tell(formV2, "", "", "x")}, // LOCAL
	} {
		t.Run(fmt.Sprint(tc.form.Version, tc.client, len(tc.next)), func(t *testing.T) {
			e := startEngine(t, 1)
			b := newHeadBackend(t, "127.0.0.1:0")
			old, next := newPath(e, b.addr, nil), newPath(e, b.addr, nil)
			old.Proxy, next.Proxy = formV2, formV2
			var moved atomic.Int32
			ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
				if tc.client != "" && (o.Client != addr(one) || o.Local != addr(dest)) || tc.client == "" && o.Client != o.Peer {
					t.Errorf("opened with %v to %v", o.Client, o.Local)
				}
				if o.From == nil {
					return forwardTo(old)(o)
				}
				if moved.Add(1) == 1 {
					panic("where to?")
				}
				return forwardTo(next)(o)
			}))
			ep.SetHeaders(trust(t, old, true, local))
			c := dial(t, ep.Addr())
			want := c.LocalAddr().(*net.UDPAddr).AddrPort()
			if tc.client != "" {
				want = addr(tc.client)
			}
			send(t, c, tell(tc.form, tc.client, dest, "first"))
			b.wait(t, 1)
			e.Rehome(func(p *relay.Path) bool { return p == old })
			eventually(t, "the new path", func() bool {
				send(t, c, tc.next)
				return next.Counters[0].PacketsC2S.Load() > 0
			})
			n := len(b.wait(t, 2))
			send(t, c, tc.next)
			got := b.wait(t, n+1)
			for _, d := range got[1:] {
				if h, payload, _ := split(d); h.Client != want || payload != "x" {
					t.Errorf("%q of %v, want x of %v", payload, h.Client, want)
				}
			}
			known := 1
			if tc.client == "" {
				known = 0
			}
			if n, v := e.Sessions(), vias(e); n != 1 || v != known || e.Panics() != 1 {
				t.Errorf("%d sessions, %d vias, %d panics, want 1, %d, 1", n, v, e.Panics(), known)
			}
		})
	}
}

// TestToldAndHeld: a session that a goroutine has shows the client, and its answers have
// the header; so have those behind it.
func TestToldAndHeld(t *testing.T) {
	for _, form := range []proxyproto.Form{formV2, formSPP} {
		t.Run(form.Version.String(), func(t *testing.T) {
			e := startEngine(t, 1)
			p := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
			hold, conns := holdAll(p)
			ep := listen(t, e, "0.0.0.0:0", hold)
			ep.SetHeaders(trust(t, p, true, local))
			c := dial(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.4"), ep.Addr().Port()))
			answer := func(text string) {
				t.Helper()
				want := []byte(text)
				if form.Version == proxyproto.SPP {
					want = tell(form, one, dest, text)
				}
				if got := receive(t, c); !bytes.Equal(got, want) {
					t.Errorf("%q came back, want %q", got, want)
				}
			}
			send(t, c, tell(form, one, dest, "a"))
			h := <-conns
			if h.RemoteAddr().String() != one || h.LocalAddr().String() != dest {
				t.Errorf("of %v to %v", h.RemoteAddr(), h.LocalAddr())
			}
			if got := string(receive(t, h)); got != "a" {
				t.Errorf("got %q", got)
			}
			for _, s := range []string{"b", "", "c"} {
				send(t, h, []byte(s))
				answer(s)
			}
			send(t, c, tell(form, one, dest, "d"))
			if n, err := h.Wait(time.Now().Add(patience), 0); n != 1 || err != nil {
				t.Fatal(n, err)
			}
			if err := h.Forward(p, dialBackend(t, p.Backend)); err != nil {
				t.Fatal(err)
			}
			answer("d")
			send(t, c, tell(form, one, dest, "e"))
			answer("e")
		})
	}
}

// TestToldTransparent: an endpoint that takes datagrams for whatever address answers a
// proxy from the one it has sent to, in and outside sessions.
func TestToldTransparent(t *testing.T) {
	for _, bind := range []string{"0.0.0.0:0", "[::]:0"} {
		for _, form := range []proxyproto.Form{formV2, formSPP} {
			t.Run(fmt.Sprint(bind, " ", form.Version), func(t *testing.T) {
				e := startEngine(t, 1)
				p := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
				forward := forwardTo(p)
				ep, err := e.Listen(netip.MustParseAddrPort(bind), sock.Options{Transparent: true}, acceptFunc(func(o *Opening) Decision {
					if o.Client != addr(one) || o.Local != addr(dest) {
						t.Errorf("opened with %v to %v", o.Client, o.Local)
					}
					way := o.Way()
					if err := ep0(o).WriteTo(o.Data, &way); err != nil {
						t.Error(err)
					}
					return forward(o)
				}))
				kit.Require(t, err, "right to CAP_NET_ADMIN")
				ep.SetHeaders(trust(t, p, true, local))
				to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.6"), ep.Addr().Port())
				c := dial(t, to)
				send(t, c, tell(form, one, dest, "a"))
				for range 2 {
					want := "a"
					if form.Version == proxyproto.SPP {
						want = string(tell(form, one, dest, "a"))
					}
					if got := string(receive(t, c)); got != want {
						t.Errorf("%q came back, want %q", got, want)
					}
				}
			})
		}
	}
}

// TestDiverted: of datagrams that a server takes without a session the client is known,
// also when the first ones alone have told, and answers go back as they must.
func TestDiverted(t *testing.T) {
	e := startEngine(t, 1)
	p := newPath(e, netip.AddrPort{}, nil)
	var last atomic.Pointer[Opening]
	var panics atomic.Bool
	ep := listen(t, e, "0.0.0.0:0", acceptFunc(func(o *Opening) Decision {
		if panics.Load() {
			panic("in the acceptor")
		}
		seen := *o
		last.Store(&seen)
		way := o.Way()
		if err := ep0(o).WriteTo(append([]byte("re "), o.Data...), &way); err != nil {
			t.Error(err)
		}
		return Divert
	}))
	ep.SetHeaders(trust(t, p, true, local))
	to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.5"), ep.Addr().Port())
	c, spp := dial(t, to), dial(t, to)
	ask := func(c *net.UDPConn, d []byte, client, want string) {
		t.Helper()
		send(t, c, d)
		if got := string(receive(t, c)); got != want {
			t.Errorf("answered %q, want %q", got, want)
		}
		if o := last.Load(); o.Client != addr(client) || o.Local != addr(dest) || o.Hit != to {
			t.Errorf("%v to %v, by %v", o.Client, o.Local, o.Hit)
		}
	}
	panics.Store(true)
	for i, d := range [][]byte{tell(formV2, one, dest, "a"), tell(formSPP, one, dest, "a")} {
		send(t, spp, d)
		eventually(t, "a panic", func() bool { return e.Panics() == uint64(i+1) })
	}
	if n := vias(e); n != 0 {
		t.Errorf("%d vias are left by panics", n)
	}
	panics.Store(false)
	for range 2 {
		ask(c, tell(formV2, one, dest, "a"), one, "re a")
		ask(c, []byte("b"), one, "re b")
		ask(spp, tell(formSPP, two, dest, "c"), two, string(tell(formSPP, two, dest, "re c")))
	}
	ask(c, tell(formV2, two, dest, "d"), two, "re d") // the port is another client's now
	ask(c, []byte("e"), two, "re e")
	send(t, c, tell(formV2, "", "", "f"))
	send(t, spp, []byte("bare"))
	eventually(t, "drops", func() bool { return dropped(p, relay.ProxyHeader) == 2 })
	if n, v := e.Sessions(), vias(e); n != 0 || v != 1 {
		t.Errorf("%d sessions, %d vias, want none and 1", n, v)
	}
	// Its time goes by.
	w := e.workers[0]
	w.call(func(w *worker) { w.vias[w.kept[0]].last = w.now - ticks(keptFor) - 1 })
	send(t, c, []byte("g"))
	eventually(t, "another drop", func() bool { return dropped(p, relay.ProxyHeader) == 3 })
	if v := vias(e); v != 0 {
		t.Errorf("%d vias, want none", v)
	}
}

// TestKeptOverReload: a client that is kept is known when its datagrams have sessions from
// now on, and after these.
func TestKeptOverReload(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), own)
	var forward atomic.Bool
	var seen atomic.Int32
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		if o.Client != addr(one) || o.Local != addr(dest) {
			t.Errorf("opened with %v to %v", o.Client, o.Local)
		}
		seen.Add(1)
		if forward.Load() {
			return forwardTo(p)(o)
		}
		return Divert
	}))
	ep.SetHeaders(trust(t, p, true, local))
	c := dial(t, ep.Addr())
	send(t, c, tell(formV2, one, dest, "a"))
	eventually(t, "the first", func() bool { return seen.Load() == 1 })
	forward.Store(true)
	roundTrip(t, c, []byte("b"))
	e.ClosePaths(func(*relay.Path) bool { return true }, relay.Admin)
	eventually(t, "the end", func() bool { _, _, n := own.count(); return n == 1 })
	roundTrip(t, c, []byte("c"))
	if n := seen.Load(); n != 3 {
		t.Errorf("%d openings, want 3", n)
	}
}

// TestKeptAreBounded: however many are told of, no more are kept than there may be; those
// in use and the youngest stay.
func TestKeptAreBounded(t *testing.T) {
	for name, perTick := range map[string]int{"until their time is over": 1, "until there is no room": 64} {
		t.Run(name, func(t *testing.T) {
			e := startEngine(t, 1)
			ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(*Opening) Decision { return Divert }))
			if !e.workers[0].call(func(w *worker) { keepMany(t, w, ep, perTick) }) {
				t.Error("not to the end")
			}
		})
	}
}

func keepMany(t *testing.T, w *worker, ep *Endpoint, perTick int) {
	now := w.now
	defer func() { w.now = now }()
	wire := func(i int) *key { return &key{ep: ep.index, scope: uint32(i)} }
	for i := range 3 * maxKept {
		if i%perTick == 0 {
			w.now++
		}
		w.keep(w.newVia(wire(i), proxyproto.V2UDP))
		w.keep(w.viaIndex[*wire(0)])
		if len(w.kept) > maxKept || len(w.viaIndex) != len(w.kept) {
			t.Errorf("%d kept, %d known", len(w.kept), len(w.viaIndex))
			return
		}
		for at, via := range w.kept[:min(8, len(w.kept))] {
			if v := &w.vias[via]; !v.kept || int(v.at) != at || v.refs != 1 {
				t.Errorf("%d: %+v", at, v)
				return
			}
		}
		if w.viaIndex[*wire(0)] == 0 || w.viaIndex[*wire(i)] == 0 {
			t.Errorf("after %d the busy or the last is gone", i)
			return
		}
	}
}
