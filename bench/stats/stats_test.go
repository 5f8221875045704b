package stats

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestBucketsAreInOrderAndNarrow(t *testing.T) {
	for _, v := range []uint64{0, 1, 63, 64, 127, 128, 129, 255, 256, 1000, 65535, 65536, 1e9, 1 << 40, math.MaxInt64} {
		i := bucket(v)
		if up := upper(i); up < v || float64(up-v) > float64(v)/sub {
			t.Errorf("value %d is in bucket %d, which ends at %d", v, i, up)
		}
		if i > 0 && upper(i-1) >= v {
			t.Errorf("value %d is in bucket %d, but the one before ends at %d", v, i, upper(i-1))
		}
	}
}

func TestQuantile(t *testing.T) {
	const seed = 7
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var h Hist
	var all []time.Duration
	for range 10_000 {
		d := time.Duration(rng.ExpFloat64() * float64(100*time.Microsecond))
		h.Add(d)
		all = append(all, d)
	}
	slices.Sort(all)
	for _, q := range []float64{0, 0.5, 0.99, 1} {
		want := all[max(int(math.Ceil(q*float64(len(all))))-1, 0)]
		if got := h.Quantile(q); got < want || float64(got-want) > float64(want)/sub {
			t.Errorf("Quantile(%v) = %v, want %v", q, got, want)
		}
	}
	if h.N() != 10_000 || h.Max() != all[len(all)-1] {
		t.Errorf("N %d, Max %v, want 10000, %v", h.N(), h.Max(), all[len(all)-1])
	}
}

func TestEmptyHist(t *testing.T) {
	var h Hist
	if got := h.Quantile(0.5); got != 0 {
		t.Errorf("Quantile of nothing = %v, want 0", got)
	}
	if h.Add(-1); h.Quantile(1) != 0 {
		t.Errorf("a negative duration counts as %v, want 0", h.Quantile(1))
	}
}

func TestMedian(t *testing.T) {
	for name, tc := range map[string]struct {
		in   []float64
		want float64
	}{
		"one":  {[]float64{3}, 3},
		"odd":  {[]float64{9, 1, 5}, 5},
		"even": {[]float64{9, 1, 5, 3}, 4},
	} {
		t.Run(name, func(t *testing.T) {
			in := slices.Clone(tc.in)
			if got := Median(in); got != tc.want {
				t.Errorf("Median(%v) = %v, want %v", tc.in, got, tc.want)
			}
			if !slices.Equal(in, tc.in) {
				t.Errorf("Median changed its argument to %v", in)
			}
		})
	}
	if got := Median(nil); !math.IsNaN(got) {
		t.Errorf("Median of nothing = %v, want NaN", got)
	}
}

func TestRatioPairsRounds(t *testing.T) {
	x := map[int]float64{0: 10, 1: 100, 2: 30}
	y := map[int]float64{0: 20, 1: 200, 3: 1}
	if got := Ratio(x, y); got != 0.5 {
		t.Errorf("Ratio = %v, want 0.5: only rounds 0 and 1 are in both", got)
	}
	if got := Ratio(x, nil); !math.IsNaN(got) {
		t.Errorf("Ratio to nothing = %v, want NaN", got)
	}
}
