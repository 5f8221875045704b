package balancer

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// Prepared choices are those that Pick makes.
func TestPreparedAgrees(t *testing.T) {
	const seed = 43
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for round := range 200 {
		weights := make([]uint32, 1+rng.IntN(40))
		for i := range weights {
			weights[i] = 1 + rng.Uint32N([]uint32{1, 3, 100, maxWeight}[round%4])
		}
		c := backends(weights...)
		for name, pair := range map[string][2]Balancer{
			"weighted":        {new(Weighted), new(Weighted)},
			"consistent_hash": {provisioned(t, srcIP), provisioned(t, srcIPPort)},
		} {
			a, b := pair[0], pair[1]
			if name == "consistent_hash" {
				b = a
			}
			prepared := b.(Preparer).Prepare(c)
			for i := range 100 {
				if want, got := a.Pick(c, client(i)), prepared.Pick(client(i)); got != want {
					t.Fatalf("%s of %v: choice %d is %d, and Pick chooses %d", name, weights, i, got, want)
				}
			}
		}
	}
}

// counted counts what a choice looks at.
type counted struct {
	backend
	looks *int
}

func (c *counted) Addr() netip.AddrPort { *c.looks++; return c.backend.Addr() }
func (c *counted) Weight() uint32       { *c.looks++; return c.backend.Weight() }
func (c *counted) Active() int64        { *c.looks++; return c.backend.Active() }

// What a choice looks at must not grow with the backends: ten thousand of them
// cost what a thousand do.
func TestChoicesDoNotLookAtAll(t *testing.T) {
	most := map[string]int{"round_robin": 0, "first_available": 0, "weighted": 0, "consistent_hash": 0, "least_conn": 2 * window}
	for _, n := range []int{1000, 10_000} {
		for name, b := range map[string]Balancer{
			"round_robin": new(RoundRobin), "least_conn": new(LeastConn), "weighted": new(Weighted),
			"first_available": new(FirstAvailable), "consistent_hash": provisioned(t, srcIP),
		} {
			looks := 0
			list := make([]Candidate, n)
			for i, c := range backends(make([]uint32, n)...) {
				o := *c.(*backend)
				o.weight = uint32(1 + i%7)
				list[i] = &counted{o, &looks}
			}
			pick := func(f Flow) int { return b.Pick(list, f) }
			if p, ok := b.(Preparer); ok {
				pick = p.Prepare(list).Pick
			}
			looks = 0
			for i := range 100 {
				pick(client(i))
			}
			if looks > 100*most[name] {
				t.Errorf("%s of %d: %d looks at candidates in 100 choices, want %d at most", name, n, looks, 100*most[name])
			}
		}
	}
}

// A ring longer than 64 bits can be multiplied in is walked all the same.
func TestWeightedOfGreatWeights(t *testing.T) {
	w := new(Weighted)
	weights := make([]uint32, 10_000)
	for i := range weights {
		weights[i] = maxWeight - uint32(i%2)
	}
	c := backends(weights...)
	p := w.Prepare(c)
	seen := make(map[int]bool)
	for range 20_000 {
		seen[p.Pick(Flow{})] = true
	}
	if len(seen) < 9_900 {
		t.Errorf("20000 choices have come to %d of 10000 backends", len(seen))
	}
	if hi, _ := bits.Mul64(10_000*maxWeight, 10_000*maxWeight); hi == 0 {
		t.Error("the ring is too short to tell")
	}
}

// Among more backends than one choice compares, those with fewer flows still
// get the new ones.
func TestLeastConnOfMany(t *testing.T) {
	l := new(LeastConn)
	list := backends(make([]uint32, 1000)...)
	for i, c := range list {
		c.(*backend).weight = 1
		c.(*backend).active = int64(i % 3)
	}
	for range 1000 {
		list[l.Pick(list, Flow{})].(*backend).active++
	}
	counts := make(map[int64]int)
	for _, c := range list {
		counts[c.Active()]++
	}
	// 999 flows at first, and 1,000 more: two for each but one.
	if counts[0] > 0 || counts[1]+counts[3] > 60 {
		t.Errorf("backends by flows: %v", counts)
	}
}

func BenchmarkPickOf10k(b *testing.B) {
	hash := &ConsistentHash{HashOn: srcIP}
	for _, n := range []int{2, 100, 700, 10_000} {
		list := backends(make([]uint32, n)...)
		for i := range list {
			list[i].(*backend).weight = uint32(1 + i%3)
		}
		for name, bal := range map[string]Balancer{
			"round_robin": new(RoundRobin), "least_conn": new(LeastConn), "weighted": new(Weighted), "consistent_hash": hash,
		} {
			pick := func(f Flow) int { return bal.Pick(list, f) }
			if p, ok := bal.(Preparer); ok {
				pick = p.Prepare(list).Pick
			}
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for i := range b.N {
					pick(client(i))
				}
			})
		}
	}
}
