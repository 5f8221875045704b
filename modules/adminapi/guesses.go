package adminapi

import (
	"net/netip"
	"sync"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/tokens"
)

// guesses are the wrong tokens of late, by who has sent them. They belong to
// the process: a reload forgives nobody.
var guesses = guessTable{by: make(map[netip.Prefix]*tokens.Bucket)}

const (
	guessRate  = 1  // wrong tokens a second that go unpunished
	guessBurst = 20 // and at once
	retryAfter = 2  // seconds, in which one is forgiven
	maxSources = 4096
)

type guessTable struct {
	mu     sync.Mutex // guards what is below, and is held while a token is looked at
	by     map[netip.Prefix]*tokens.Bucket
	others tokens.Bucket // of all who find the table full
	began  time.Time     // of the clock of the buckets
	swept  time.Time
}

// judge looks at a token, unless its sender is to be kept waiting. One at a
// time: a thousand guesses at once are not a thousand guesses for the price of
// one.
func (t *guessTable) judge(from netip.Prefix, find func() *secret) (found *secret, limited bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.began.IsZero() {
		t.began = time.Now()
	}
	now := int64(time.Since(t.began))
	b := t.by[from]
	if b == nil && len(t.by) >= maxSources {
		t.sweepLocked(now)
		if len(t.by) >= maxSources {
			b = &t.others
		}
	}
	if b != nil && !b.HasAt(now, guessRate, guessBurst) {
		return nil, true
	}
	if found = find(); found != nil {
		return found, false
	}
	if b == nil {
		b = new(tokens.Bucket)
		t.by[from] = b
	}
	b.TakeAt(now, guessRate, guessBurst)
	return nil, false
}

// sweepLocked forgets those who have nothing left to be forgiven.
func (t *guessTable) sweepLocked(now int64) {
	if time.Since(t.swept) < time.Second {
		return
	}
	t.swept = time.Now()
	for from, b := range t.by {
		if b.HasAt(now, guessRate, 1) {
			delete(t.by, from)
		}
	}
}
