package tcprelay

import (
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"
)

// TestWheel adds, moves and removes at random and checks each pop against the
// deadlines.
func TestWheel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, early := range []bool{false, true} {
		const tick = 10
		var s slab
		wh := wheel{id: buckets, tick: tick, early: early}
		deadlines := make(map[uint32]int64)
		now := int64(rng.IntN(1 << 30))
		wh.pop(&s, now)
		for range 600 {
			slot, _ := s.take()
			deadlines[slot] = now + 1 + rng.Int64N(3*buckets*tick)
			wh.add(&s, slot, deadlines[slot])
		}
		for step := 0; len(deadlines) > 0; step++ {
			if step > 1e6 {
				t.Fatalf("%d are never popped", len(deadlines))
			}
			if next := wh.next(); next == never {
				t.Fatalf("nothing is next and %d wait", len(deadlines))
			}
			now += rng.Int64N(50)
			for {
				slot, ok := wh.pop(&s, now)
				if !ok {
					break
				}
				switch d, ok := deadlines[slot]; {
				case !ok:
					t.Fatalf("slot %d popped after it was removed", slot)
				case d > now:
					wh.add(&s, slot, d)
					if early && d-now <= tick {
						wh.remove(&s, slot)
						delete(deadlines, slot)
					}
				default:
					if late := now - d; late > tick+50 {
						t.Fatalf("popped %d late", late)
					}
					delete(deadlines, slot)
				}
			}
			if rng.IntN(10) == 0 {
				for slot := range deadlines {
					wh.remove(&s, slot)
					delete(deadlines, slot)
					break
				}
			}
		}
		if next := wh.next(); next != never {
			t.Errorf("%d is next and nothing waits", next)
		}
	}
}

func TestSlabSize(t *testing.T) {
	if n := unsafe.Sizeof(conn{}); n > 192 {
		t.Errorf("a connection takes %d bytes, more than 192", n)
	}
}
