package pool

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
)

// TestPeek wants Peek to say what Pick will do next, whatever takes flows and
// whatever is full, and to leave no trace.
func TestPeek(t *testing.T) {
	const seed = 43
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for i, policy := range []string{"round_robin", "least_conn", "weighted", "first_available", "consistent_hash"} {
		for _, down := range []string{"refuse", "try_all"} {
			t.Run(policy+" "+down, func(t *testing.T) {
				p := begin(t, provision(t, fmt.Sprintf(
					`{"targets": [%s], "health": {"check": "none"}, "balancer": {"policy": %q}, "on_all_down": %q, "per_backend": {"max_sessions": 4}}`,
					three, policy, down)))
				f := balancer.Flow{Client: netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), 40000)}
				for n := range 300 {
					b := p.Backends()[rng.IntN(3)]
					switch rng.IntN(6) {
					case 0:
						b.SetState(State(rng.IntN(3)))
					case 1:
						b.down.Store(rng.IntN(2) == 0)
					case 2:
						for b.Active() > 0 {
							b.Release()
						}
					}
					p.snap.Store(p.build())
					before := selections(t)
					p.Peek(f)
					want, result, known := p.Peek(f)
					if selections(t) != before {
						t.Fatal("Peek has counted")
					}
					got, r := p.Pick(f, nil)
					if !known || got != want || r != result {
						t.Fatalf("choice %d is %v, %v, and Peek said %v, %v, %v", n, got, r, want, result, known)
					}
				}
				for _, b := range p.Backends() {
					b.down.Store(false)
					for b.Active() > 0 {
						b.Release()
					}
				}
			})
		}
	}
}
