package balancer

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

func TestOrderIsAPermutation(t *testing.T) {
	o := orderOf(0x123456789abcdef)
	seen := make([]bool, places)
	for rank := range uint32(places) {
		p := o.place(rank)
		if p >= places || seen[p] || o.rank(p) != rank {
			t.Fatalf("rank %d is place %d, seen before or of rank %d", rank, p, o.rank(p))
		}
		seen[p] = true
	}
}

// random are backends of addresses and weights from a seed.
func random(rng *rand.Rand, n int, weight func() uint32) []Candidate {
	list := backends(make([]uint32, n)...)
	for _, c := range list {
		b := c.(*backend)
		var a [4]byte
		for i := range a {
			a[i] = byte(rng.Uint32())
		}
		b.addr, b.weight = netip.AddrPortFrom(netip.AddrFrom4(a), uint16(1+rng.IntN(65535))), weight()
	}
	return list
}

// A large set is walked and a small one is not; who is chosen must not show it,
// nor the order of the list, nor how the set came to be. What
// one choice takes has a bound.
func TestConsistentHashOfMany(t *testing.T) {
	const seed = 7
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	h := provisioned(t, srcIPPort)
	for name, weight := range map[string]func() uint32{
		"equal":   func() uint32 { return 3 },
		"similar": func() uint32 { return 1 + rng.Uint32N(4) },
		"skewed":  func() uint32 { return 1 << rng.IntN(16) },
		"one great": func() uint32 {
			if rng.IntN(5000) == 0 {
				return maxWeight
			}
			return 1
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, n := range []int{300, 700, 10_000} {
				list := random(rng, n, weight)
				shuffled := slices.Clone(list)
				rng.Shuffle(n, func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
				gone := list[n-1]
				all, rest, other := h.Prepare(list).(*hashed), h.Prepare(list[:n-1]), h.Prepare(shuffled)
				most, sum := 0, 0
				const clients = 300
				for i := range clients {
					at, steps := all.pick(client(i))
					most, sum = max(most, steps), sum+steps
					chosen := list[at]
					if i < 10 && chosen != list[h.Pick(list, client(i))] {
						t.Fatalf("of %d, client %d: Prepare and Pick choose differently", n, i)
					}
					if got := shuffled[other.Pick(client(i))]; got != chosen {
						t.Fatalf("of %d, client %d: another order of the list chooses another backend", n, i)
					}
					if got := list[rest.Pick(client(i))]; got != chosen && chosen != gone {
						t.Fatalf("of %d, client %d moved although its backend stayed", n, i)
					}
				}
				if sum/clients > 2500 || most > 12_000 {
					t.Errorf("of %d: %d steps in the mean and %d at the most", n, sum/clients, most)
				}
			}
		})
	}
}

// Those who share a place have less each, by a quarter of a share; the spread
// over ten thousand stays near that of chance.
func TestConsistentHashSpreadsOverTenThousand(t *testing.T) {
	const seed, n, each = 11, 10_000, 30
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	h := provisioned(t, srcIPPort)
	p := h.Prepare(random(rng, n, func() uint32 { return 1 }))
	got := make([]int, n)
	for range n * each {
		a := netip.AddrFrom4([4]byte{byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())})
		got[p.Pick(Flow{Client: netip.AddrPortFrom(a, uint16(rng.Uint32()))})]++
	}
	squares, least, most := 0.0, got[0], got[0]
	for _, k := range got {
		squares += float64((k - each) * (k - each))
		least, most = min(least, k), max(most, k)
	}
	deviation := math.Sqrt(squares/n) / each
	t.Logf("from %d to %d of %d, a deviation of %.1f %%; chance alone has %.1f %%", least, most, each, 100*deviation, 100/math.Sqrt(each))
	if deviation > 0.24 || least < 3 || most > 75 {
		t.Errorf("from %d to %d of %d, a deviation of %.1f %%", least, most, each, 100*deviation)
	}
}

// Weights hold among many too. Two that share a place have half of it each.
func TestConsistentHashWeightsOfMany(t *testing.T) {
	const seed = 13
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	h := provisioned(t, srcIPPort)
	turn := uint32(0)
	list := random(rng, 3000, func() uint32 { turn++; return []uint32{1, 3, 10}[turn%3] })
	p := h.Prepare(list)
	got := make(map[uint32]int)
	const clients = 60_000
	for i := range clients {
		f := client(i % 60_000)
		f.Client = netip.AddrPortFrom(f.Client.Addr(), uint16(rng.Uint32()))
		got[list[p.Pick(f)].Weight()]++
	}
	for w, k := range got {
		want := clients * int(w) / 14
		if k < want*92/100 || k > want*108/100 {
			t.Errorf("those of weight %d have %d clients, want about %d", w, k, want)
		}
	}
	var s search
	s.at, s.order, s.client, s.even = -1, orderOf(1), 1, true
	wins := make([]int, 2)
	for c := range uint64(1000) {
		s.client, s.at = hash(c, netip.AddrPort{}), -1
		s.meet(0, 5, 1, 111)
		s.meet(1, 5, 1, 222)
		wins[s.at]++
	}
	if wins[0] < 400 || wins[0] > 600 {
		t.Errorf("of two at one place the first has %d of 1000 clients", wins[0])
	}
}
