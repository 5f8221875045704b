package balancer

import (
	"math/rand/v2"
	"testing"
)

// TestPeek wants Peek to tell what Pick will choose, and to leave no trace.
func TestPeek(t *testing.T) {
	const seed = 41
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for name, b := range map[string]Balancer{
		"round_robin": new(RoundRobin), "least_conn": new(LeastConn), "weighted": new(Weighted),
		"first_available": new(FirstAvailable), "consistent_hash": provisioned(t, srcIP),
	} {
		t.Run(name, func(t *testing.T) {
			p, c := b.(Peeker), backends(3, 1, 5, 2)
			for i := range 200 {
				for _, one := range c {
					one.(*backend).active = int64(rng.IntN(3))
				}
				f := client(i)
				p.Peek(c, f, 0)
				want, after := p.Peek(c, f, 0), p.Peek(c, f, 1)
				if got := b.Pick(c, f); got != want {
					t.Fatalf("choice %d is %d, and Peek said %d", i, got, want)
				}
				if got := p.Peek(c, f, 0); got != after {
					t.Fatalf("after choice %d Peek says %d, and said %d before", i, got, after)
				}
			}
		})
	}
}
