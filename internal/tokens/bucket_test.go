package tokens

import (
	"math/rand/v2"
	"testing"
	"time"
)

// TestHas wants HasAt to know what TakeAt will say, and to take nothing.
func TestHas(t *testing.T) {
	const seed = 44
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, rate := range []int64{1, 3, 1000} {
		var b Bucket
		now, got := int64(0), int64(0)
		for range 10000 {
			now += rng.Int64N(int64(2*time.Second) / rate)
			want := b.HasAt(now, rate, rate)
			if b.HasAt(now, rate, rate) != want {
				t.Fatal("asking has changed the answer")
			}
			if b.TakeAt(now, rate, rate) != want {
				t.Fatalf("rate %d: has %v, and taking says the opposite", rate, want)
			}
			if want {
				got++
			}
		}
		if most := now/int64(time.Second)*rate + 2*rate; got == 0 || got > most {
			t.Errorf("rate %d: took %d in %v, at most %d are possible", rate, got, time.Duration(now), most)
		}
	}
}
