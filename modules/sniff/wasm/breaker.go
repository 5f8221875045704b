package wasm

import (
	"sync"
	"time"
)

// A module that keeps failing is not called for a while. Timeouts take a core
// for the whole call timeout, traps next to nothing, and a client that knows of
// a trap could shut the module for everybody with few packets, so traps count
// for less.
const (
	breakAt       = 50 // failures in a row, by weight
	weightTimeout = 10
	weightTrap    = 1

	minBreak = time.Second
	maxBreak = 30 * time.Second
)

// breaker is closed, which lets calls pass, until failures in a row weigh
// breakAt. Then it is open, and from time to time one call is let pass as a
// probe; the first good one closes it.
type breaker struct {
	mu      sync.Mutex
	weight  int           // of the failures since the last good call
	wait    time.Duration // zero when closed, else the time between probes
	until   time.Time     // of the next probe
	probing bool
}

// allow reports whether a call may be made, and whether it is a probe. Each
// call that may must end in done or cancel.
func (b *breaker) allow(now time.Time) (ok, probe bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.wait == 0 {
		return true, false
	}
	if b.probing || now.Before(b.until) {
		return false, false
	}
	b.probing = true
	return true, true
}

// cancel is for a call that was not made.
func (b *breaker) cancel(probe bool) {
	if !probe {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probing = false
}

// done tells how a call ended: weight is zero for a good one. It reports
// whether the breaker has opened or closed by it. A call that was under way
// when the breaker opened changes nothing.
func (b *breaker) done(now time.Time, probe bool, weight int) (changed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case probe:
		b.probing = false
		if weight == 0 {
			b.wait, b.weight = 0, 0
			return true
		}
		b.wait = min(2*b.wait, maxBreak)
		b.until = now.Add(b.wait)
	case b.wait != 0:
	case weight == 0:
		b.weight = 0
	default:
		if b.weight += weight; b.weight >= breakAt {
			b.wait, b.until = minBreak, now.Add(minBreak)
			return true
		}
	}
	return false
}

func (b *breaker) open() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.wait != 0
}
