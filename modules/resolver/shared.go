package resolver

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/sync/singleflight"
)

// maxCalls is how many calls of a resolver may be under way at once. Flows
// above it wait for one to end, within their timeout.
const maxCalls = 256

// shared is what a resolver keeps over reloads that do not change it.
type shared struct {
	flights singleflight.Group
	slots   chan struct{} // has one for each call that is under way

	mu      sync.Mutex
	entries *simplelru.LRU[cacheKey, entry] // nil without a cache
}

// entry is an answer that is kept.
type entry struct {
	answer  Answer
	expires time.Time // on the monotonic clock
}

// resolvers has the shared part of every resolver of the process.
var resolvers = caddy.NewUsagePool()

// sharedKey tells resolvers apart: what is kept goes with the config.
type sharedKey struct{ name, config string }

func takeShared(k sharedKey, c *Cache) (*shared, error) {
	v, _, err := resolvers.LoadOrNew(k, func() (caddy.Destructor, error) {
		s := &shared{slots: make(chan struct{}, maxCalls)}
		if c != nil {
			var err error
			if s.entries, err = simplelru.NewLRU[cacheKey, entry](*c.MaxEntries, nil); err != nil {
				return nil, err
			}
		}
		return s, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*shared), nil
}

// Destruct implements caddy.Destructor.
func (s *shared) Destruct() error { return nil }

func (s *shared) get(k cacheKey) (entry, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entries.Get(k)
}

func (s *shared) put(k cacheKey, e entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries.Add(k, e)
}

func (s *shared) remove(k cacheKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries.Remove(k)
}

func (s *shared) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.entries.Len()
}

// enter waits for a call to be allowed.
func (s *shared) enter(ctx context.Context) error {
	select {
	case s.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *shared) leave() { <-s.slots }

// hosts are those that have not been cleaned up, in the order in which they
// came.
type hosts struct {
	mu  sync.Mutex
	all []*Host
}

var live hosts

func (l *hosts) add(h *Host) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, h)
}

func (l *hosts) drop(h *Host) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = slices.DeleteFunc(l.all, func(o *Host) bool { return o == h })
}

// named is the first of that name, nil when there is none.
func (l *hosts) named(name string) *Host {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.IndexFunc(l.all, func(h *Host) bool { return h.name == name }); i >= 0 {
		return l.all[i]
	}
	return nil
}
