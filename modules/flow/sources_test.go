package flow

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

// TestBounds opens flows of three sources until each bound is met, and gives
// back a place.
func TestBounds(t *testing.T) {
	l := ListenerOf(t.Name())
	b := Bounds{PerIP: 2, PerNet: 3}
	open := func(want Full, sources ...string) {
		t.Helper()
		for _, s := range sources {
			if got := l.Open(true, ip(s), b); got != want {
				t.Errorf("%s: %d, want %d", s, got, want)
			}
		}
	}
	open(Room, "192.0.2.1", "::ffff:192.0.2.1")
	open(FullIP, "192.0.2.1", "::192.0.2.1", "::ffff:192.0.2.1%eth0")
	open(Room, "192.0.2.2")
	open(FullNet, "192.0.2.3", "192.0.2.2")
	open(Room, "192.0.3.1", "2001:db8::1", "2001:db8::2%x")
	if ofIP, ofNet := l.Live(ip("192.0.2.1")); ofIP != 2 || ofNet != 3 {
		t.Errorf("192.0.2.1 has %d, its network %d", ofIP, ofNet)
	}
	l.Abandoned(true, ip("::ffff:192.0.2.1"))
	open(Room, "192.0.2.1")
	for _, s := range []string{"192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.3.1", "2001:db8::1", "2001:db8::2"} {
		l.Abandoned(true, ip(s))
	}
	if n := l.Sessions.Load(); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
}

// TestCountsAreExact opens and closes flows from many goroutines. A cap is never
// passed, never too low, and nothing is left.
func TestCountsAreExact(t *testing.T) {
	const workers, turns, perIP, perNet, process = 8, 3000, 3, 5, 12
	l := ListenerOf(t.Name())
	before, _ := Live()
	var ofIP, ofNet [4]atomic.Int64
	var ofAll atomic.Int64
	var wg sync.WaitGroup
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			var held []int
			drop := func() {
				i := held[0]
				held = held[1:]
				ofIP[i].Add(-1)
				ofNet[i/2].Add(-1)
				ofAll.Add(-1)
				l.Abandoned(false, source(i))
			}
			for range turns {
				i := rng.IntN(4)
				if l.Open(false, source(i), Bounds{PerIP: perIP, PerNet: perNet, Process: before + process}) == Room {
					held = append(held, i)
					if n := ofIP[i].Add(1); n > perIP {
						t.Errorf("%d flows of one address", n)
					}
					if n := ofNet[i/2].Add(1); n > perNet {
						t.Errorf("%d flows of one network", n)
					}
					if n := ofAll.Add(1); n > process {
						t.Errorf("%d flows in all", n)
					}
				}
				if len(held) > 2 || len(held) > 0 && rng.IntN(2) == 0 {
					drop()
				}
			}
			for len(held) > 0 {
				drop()
			}
		})
	}
	wg.Wait()
	for i := range l.sources.parts {
		if p := &l.sources.parts[i]; len(p.ips)+len(p.nets) > 0 {
			t.Errorf("part %d still has %d addresses and %d networks", i, len(p.ips), len(p.nets))
		}
	}
	if after, _ := Live(); after != before {
		t.Errorf("%d flows before, %d after", before, after)
	}
}

// source are two networks of two addresses.
func source(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 51, byte(i / 2), byte(i % 2)}) }

// TestFullProcess gives the place at a source back when the process is full.
func TestFullProcess(t *testing.T) {
	l := ListenerOf(t.Name())
	conns, _ := Live()
	if got := l.Open(false, ip("192.0.2.1"), Bounds{Process: conns + 1}); got != Room {
		t.Fatal(got)
	}
	if got := l.Open(false, ip("192.0.2.2"), Bounds{Process: conns + 1}); got != FullProcess {
		t.Errorf("%d, want FullProcess", got)
	}
	if _, ofNet := l.Live(ip("192.0.2.1")); ofNet != 1 {
		t.Errorf("the network has %d flows, want 1", ofNet)
	}
	l.Abandoned(false, ip("192.0.2.1"))
}

// TestReturning wants a source known while it has a flow, and for a while after
// one that has been answered.
func TestReturning(t *testing.T) {
	for i := range recent.parts { // of an earlier run
		p := &recent.parts[i]
		p.mu.Lock()
		clear(p.ended)
		p.mu.Unlock()
	}
	l := ListenerOf(t.Name())
	for name, tc := range map[string]struct {
		client string
		udp    bool
		answer uint64
		known  bool
	}{
		"tcp":                  {"198.51.100.1:7", false, 0, true},
		"udp, answered":        {"198.51.100.2:7", true, 1, true},
		"udp, never answered":  {"198.51.100.3:7", true, 0, false},
		"in another notation":  {"[::ffff:198.51.100.4]:7", true, 1, true},
		"with a zone":          {"[fe80::5%eth0]:7", true, 1, true},
		"in a third one, v4":   {"[::198.51.100.6]:7", false, 0, true},
		"on a plain v6 source": {"[2001:db8::7]:7", true, 9, true},
	} {
		t.Run(name, func(t *testing.T) {
			client := netip.MustParseAddrPort(tc.client)
			if Returning(client.Addr()) {
				t.Error("known before it came")
			}
			l.Open(tc.udp, client.Addr(), Bounds{})
			if !Returning(client.Addr()) {
				t.Error("not known while it has a flow")
			}
			l.Closed(&relay.Info{ID: relay.MakeID(tc.udp, 0, 1, 1), Client: client, PacketsS2C: tc.answer}, relay.ClientClose)
			if got := Returning(client.Addr()); got != tc.known {
				t.Errorf("known afterwards: %v", got)
			}
		})
	}
}

// TestRecentIsBounded notes more sources than there is room for.
func TestRecentIsBounded(t *testing.T) {
	var r recents
	at := func(n int) netip.Addr {
		return netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)})
	}
	now := time.Hour
	for n := range 2 * maxRecent {
		r.note(at(n), now)
	}
	size := 0
	for i := range r.parts {
		size += len(r.parts[i].ended)
	}
	if size > maxRecent {
		t.Errorf("%d sources, more than %d", size, maxRecent)
	}
	if !r.has(at(2*maxRecent-1), now) {
		t.Error("the last source is not known")
	}
	if r.has(at(2*maxRecent-1), now+RecentWindow+1) {
		t.Error("it still is when its time is over")
	}
}

func TestCountingAllocatesNothing(t *testing.T) {
	l := ListenerOf(t.Name())
	client := netip.MustParseAddrPort("203.0.113.7:1")
	l.Open(true, client.Addr(), Bounds{}) // and stays, as its maps do
	info := &relay.Info{ID: relay.MakeID(true, 0, 1, 1), Client: client, PacketsS2C: 1}
	l.Rule("acl").Tell()
	if n := testing.AllocsPerRun(1000, func() {
		if l.Open(true, client.Addr(), Bounds{PerIP: 5}) == Room {
			l.Closed(info, relay.ClientClose)
		}
		l.Open(true, client.Addr(), Bounds{PerIP: 1})
		l.Rule("acl").Count()
		l.Rule("acl").Tell()
		Returning(client.Addr())
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	l.Abandoned(true, client.Addr())
}

func BenchmarkOpenClose(b *testing.B) {
	l := ListenerOf(b.Name())
	client := netip.MustParseAddrPort("203.0.113.7:1")
	info := &relay.Info{ID: relay.MakeID(true, 0, 1, 1), Client: client, PacketsS2C: 1}
	b.ReportAllocs()
	for b.Loop() {
		l.Open(true, client.Addr(), Bounds{PerIP: 5})
		l.Closed(info, relay.ClientClose)
	}
}

// TestHold holds flows whose client is not known: they take a place of the
// process, and become a client's or are given back.
func TestHold(t *testing.T) {
	l := ListenerOf(t.Name())
	before, _ := Live()
	most := before + 2
	for i, want := range []bool{true, true, false} {
		if got := l.Hold(false, most); got != want {
			t.Fatalf("hold %d: %t, want %t", i, got, want)
		}
	}
	if got := l.Open(false, ip("192.0.2.1"), Bounds{Process: most}); got != FullProcess {
		t.Errorf("opened beside them: %d", got)
	}
	if ofIP, _ := l.Live(ip("192.0.2.1")); ofIP != 0 {
		t.Errorf("%d are left of who was kept out", ofIP)
	}
	if got := l.Open(false, ip("192.0.2.1"), Bounds{Process: most, PerIP: 1, Held: true}); got != Room {
		t.Errorf("the first becomes a client's: %d", got)
	}
	if got := l.Open(false, ip("192.0.2.1"), Bounds{Process: most, PerIP: 1, Held: true}); got != FullIP {
		t.Errorf("the second becomes the same client's: %d", got)
	}
	if n := l.Conns.Load(); n != 1 {
		t.Errorf("%d are left, want the first", n)
	}
	l.Closed(&relay.Info{Client: netip.MustParseAddrPort("192.0.2.1:1")}, relay.ClientClose)
	l.Hold(false, 0)
	l.ClosedHeld(&relay.Info{Client: netip.MustParseAddrPort("192.0.2.9:1")}, relay.Admin)
	l.Hold(false, 0)
	l.Release(false)
	if now, _ := Live(); now != before || l.Conns.Load() != 0 {
		t.Errorf("%d are left, and %d of the process", l.Conns.Load(), now-before)
	}
	if Returning(ip("192.0.2.9")) || !Returning(ip("192.0.2.1")) {
		t.Error("who comes back is not who was a client")
	}
}
