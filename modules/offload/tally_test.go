package offload

import (
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

func counter(v *prometheus.CounterVec, labels ...string) float64 {
	var m dto.Metric
	v.WithLabelValues(labels...).Write(&m)
	return m.Counter.GetValue()
}

func TestTally(t *testing.T) {
	var c tally
	for i, want := range []bool{false, false, true, false, false} {
		if got := c.hit(1<<40|7, 9, 3); got != want {
			t.Errorf("hit %d: %v", i+1, got)
		}
	}
	c.hit(1<<40|7, 10, 3)
	c.hit(1<<40|7, 10, 3)
	c.hit(2<<40|7, 10, 3) // pushes the other out
	for range 2 {
		if c.hit(1<<40|7, 10, 3) {
			t.Error("a source was counted for another")
		}
	}
	for range 1 << 17 {
		c.hit(3<<40|8, 10, 3)
	}
	if c.hit(3<<40|8, 10, 3) {
		t.Error("the count has begun again")
	}
}

// TestRing wants every event that was pushed to come out, once and in the order
// of its worker, however full the ring is.
func TestRing(t *testing.T) {
	var r ring
	const workers, each = 4, 50_000
	var wg sync.WaitGroup
	for id := range workers {
		wg.Go(func() {
			for i := 0; i < each; {
				if r.push(event{id: id, client: netip.AddrPortFrom(netip.IPv6Loopback(), uint16(i))}) {
					i++
				}
			}
		})
	}
	var next [workers]int
	for n := 0; n < workers*each; {
		e, ok := r.pop()
		if !ok {
			continue
		}
		if e.client.Port() != uint16(next[e.id]) {
			t.Fatalf("worker %d: event %d, want %d", e.id, e.client.Port(), uint16(next[e.id]))
		}
		next[e.id]++
		n++
	}
	wg.Wait()
	if _, ok := r.pop(); ok || r.ready() {
		t.Error("an event too many")
	}
	for range ringSize {
		if !r.push(event{}) {
			t.Fatal("no room in an empty ring")
		}
	}
	if r.push(event{}) {
		t.Error("more than fits")
	}
}

// TestWorkersDoNotAllocate holds that what workers call costs them nothing.
func TestWorkersDoNotAllocate(t *testing.T) {
	k := &Kernel{wake: make(chan struct{}, 1)}
	k.set.Store(&settings{2, time.Second, 100})
	s := &Shield{k, 1}
	a, c := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddrPort("[2001:db8::1]:7")
	k.marks.set(hashOf(1, sourceOf(c.Addr(), aNet)), second(time.Now())+100)
	if n := testing.AllocsPerRun(1000, func() {
		s.Refused(a, "rate_ip")
		s.Refused(a, "rate_net")
		s.Refused(c.Addr(), "src_conn_net")
		s.Refused(c.Addr(), "acl")
		s.Admitted(c)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if !k.ring.ready() {
		t.Error("nothing was told")
	}
}

func BenchmarkRefused(b *testing.B) {
	k := &Kernel{wake: make(chan struct{}, 1)}
	k.set.Store(&settings{20, time.Second, 100})
	s := &Shield{k, 1}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		s.Refused(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), "rate_net")
	}
}
