package discovery

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
)

// names is what a source knows of host names. It belongs to the goroutine that
// calls List.
type names struct {
	resolver lookup.Resolver
	known    map[string]named
}

type named struct {
	lookup.Known
	due time.Time // when it is to be asked about again
}

// maxLookups is how many names are asked about at once.
const maxLookups = 16

// find asks about those of hosts whose answers have expired, and forgets the
// other names. It returns how long the answers hold, and what could not be
// found out; the addresses of those names are what they were.
func (n *names) find(ctx context.Context, hosts []string) (ttl time.Duration, trouble error) {
	now := time.Now()
	var mu sync.Mutex // guards the three
	known := make(map[string]named, len(hosts))
	var failed int
	var first error

	var due []string
	for _, h := range hosts {
		if _, twice := known[h]; !twice {
			known[h] = n.known[h]
			if !known[h].due.After(now) {
				due = append(due, h)
			}
		}
	}
	var wg sync.WaitGroup
	places := make(chan struct{}, maxLookups)
	for _, h := range due {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			addrs, ttl, err := lookup.Addresses(ctx, n.resolver, h)
			mu.Lock()
			defer mu.Unlock()
			old := known[h]
			next, _, _ := old.Take(addrs, err)
			if err != nil && !(next.Half && old.Half) { // of one family again: it was told, and may go on for ever
				if failed++; first == nil {
					first = fmt.Errorf("%s: %w", h, err)
				}
				ttl = 0
			}
			known[h] = named{next, now.Add(ttl)}
		})
	}
	wg.Wait()
	n.known = known
	ttl = lookup.MaxTTL
	for _, k := range known {
		if left := k.due.Sub(now); left > 0 {
			ttl = min(ttl, max(left, lookup.MinTTL))
		}
	}
	if failed > 1 {
		first = fmt.Errorf("%w, and %d more names", first, failed-1)
	}
	return ttl, first
}
