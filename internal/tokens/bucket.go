// Package tokens has a token bucket without a lock, small enough to keep many
// of them.
package tokens

import (
	"sync/atomic"
	"time"
)

// Bucket is a token bucket that starts full. It keeps one number, the time at
// which it would be full again, so the zero value is ready and rate and burst
// may differ from call to call.
type Bucket struct {
	full atomic.Int64 // nanoseconds after start
}

var start = time.Now()

// Take takes a token from a bucket that gains rate tokens a second and holds
// at most burst, and reports whether there was one.
func (b *Bucket) Take(rate, burst int64) bool {
	return b.TakeAt(int64(time.Since(start)), rate, burst)
}

// Has reports whether Take would find a token.
func (b *Bucket) Has(rate, burst int64) bool {
	return b.HasAt(int64(time.Since(start)), rate, burst)
}

// HasAt is Has at a time given in nanoseconds of a monotonic clock.
func (b *Bucket) HasAt(now, rate, burst int64) bool {
	step := int64(time.Second) / rate
	return max(b.full.Load()-now, 0)+step <= step*burst
}

// TakeAt is Take at a time given in nanoseconds of a monotonic clock.
func (b *Bucket) TakeAt(now, rate, burst int64) bool {
	step := int64(time.Second) / rate
	for {
		full := b.full.Load()
		next := max(full, now) + step
		if next-now > step*burst {
			return false
		}
		if b.full.CompareAndSwap(full, next) {
			return true
		}
	}
}
