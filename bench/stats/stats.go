// Package stats holds the statistics of the benchmark: a histogram of
// latencies, and medians and ratios over the rounds of a run.
package stats

import (
	"math"
	"math/bits"
	"slices"
	"time"
)

const (
	subBits = 6 // 64 buckets a power of two: an error of at most 1.6 %
	sub     = 1 << subBits
	buckets = (64 - subBits + 1) * sub
)

// Hist is a histogram of durations. The zero value is empty and ready.
type Hist struct {
	counts [buckets]uint64
	n      uint64
	max    time.Duration
}

// Add counts d. A negative duration counts as zero.
func (h *Hist) Add(d time.Duration) {
	d = max(d, 0)
	h.counts[bucket(uint64(d))]++
	h.n++
	h.max = max(h.max, d)
}

// N is how many durations were added.
func (h *Hist) N() uint64 { return h.n }

// Max is the largest duration added.
func (h *Hist) Max() time.Duration { return h.max }

// Quantile is the smallest duration that at least the share q of all are no
// greater than, to the width of a bucket; 0 when there are none.
func (h *Hist) Quantile(q float64) time.Duration {
	rank := max(uint64(math.Ceil(q*float64(h.n))), 1)
	var seen uint64
	for i, c := range h.counts {
		if seen += c; c > 0 && seen >= rank {
			return min(time.Duration(upper(i)), h.max)
		}
	}
	return h.max
}

// bucket is the index of v's bucket: values below sub have one each, above
// that every power of two has sub of them.
func bucket(v uint64) int {
	shift := bits.Len64(v) - subBits - 1
	if shift <= 0 {
		return int(v)
	}
	return shift*sub + int(v>>shift)
}

// upper is the largest value in bucket i.
func upper(i int) uint64 {
	if i < 2*sub {
		return uint64(i)
	}
	shift := i/sub - 1
	return uint64(i-shift*sub+1)<<shift - 1
}

// Median is the middle of xs, the mean of the two middle ones where their
// number is even, and NaN where there are none. It does not change xs.
func Median(xs []float64) float64 {
	if len(xs) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(xs))
	if m := len(s) / 2; len(s)%2 == 0 {
		return (s[m-1] + s[m]) / 2
	} else {
		return s[m]
	}
}

// Ratio is the median of x[i]/y[i] over the rounds both have. Pairing the
// rounds first takes out what changes on the machine from round to round.
func Ratio(x, y map[int]float64) float64 {
	var rs []float64
	for round, v := range x {
		if w, ok := y[round]; ok && w > 0 {
			rs = append(rs, v/w)
		}
	}
	return Median(rs)
}
