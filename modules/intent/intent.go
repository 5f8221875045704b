// Package intent keeps what operators and their tools want at run time, for as
// long as the process lives and over every reload: which backends are added to
// pools or removed from them, what state a backend is in, whether the instance
// is drained, and where clients are to go (route hints). With a directory it
// lives longer than the process: what is in the file is in file.go, and when
// which file is used in lifetime.go.
package intent

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// State is what the operator wants of a backend.
type State uint32

// The states. A backend that is not enabled is given no new flows; those it
// has keep running, and those of one that is draining until the pool's
// drain_deadline has passed.
const (
	Enabled State = iota
	Draining
	Disabled
)

var states = [...]string{"enabled", "draining", "disabled"}

func (s State) String() string { return states[s] }

// ParseState reads what String writes.
func ParseState(s string) (State, bool) {
	i := slices.Index(states[:], s)
	return State(max(i, 0)), i >= 0
}

// By says who has wanted something, and since when.
type By struct {
	Actor string    `json:"actor"`
	At    time.Time `json:"at"` // UTC; with the monotonic clock, of this process
}

// Now is an actor who wants something now.
func Now(actor string) By { return By{actor, time.Now().UTC()} }

// Backend is what operators want of one address of a pool. The zero value wants
// nothing beside what the config says.
type Backend struct {
	// The address is in the pool, with this weight, whatever the config says; 0:
	// it was not added.
	Weight uint32 `json:"weight,omitempty"`
	Added  By     `json:"added,omitzero"`

	// The address is not in the pool although the config or a source names it.
	// Not with a Weight.
	Removed By `json:"removed,omitzero"`

	State State `json:"state,omitempty"`
	Since By    `json:"since,omitzero"` // of another state than Enabled
}

// IsRemoved reports whether the address is not to be in the pool.
func (b Backend) IsRemoved() bool { return !b.Removed.At.IsZero() }

// plain is b as it comes back from disk.
func (b Backend) plain() Backend {
	for _, by := range []*By{&b.Added, &b.Removed, &b.Since} {
		by.At = by.At.Round(0)
	}
	return b
}

// Overlay is what operators want of the backends of one pool. It does not
// change.
type Overlay map[netip.AddrPort]Backend

// MaxBackends is of how many backends there may be something to want.
const MaxBackends = 10000

// ErrFull says that there is no room for another backend.
var ErrFull = fmt.Errorf("operators have changed %d backends already, as many as there may be", MaxBackends)

// Store is everything operators want. Changes are made one at a time and are
// over when they are on disk; reading is at any time, and takes no lock.
type Store struct {
	hints *Hints

	overlays atomic.Pointer[map[string]Overlay] // by pool; replaced, never changed
	drained  atomic.Pointer[By]                 // nil: the instance is not drained

	mu       sync.Mutex // of one change, from reading what there is to its end
	files    []*file    // in use, the newest last; that one is written to
	watchers map[*func(pool string)]struct{}

	open *caddy.UsagePool // *file by directory
}

// Process is what operators want of this process.
var Process = NewStore(RouteHints)

// NewStore makes an empty store in memory. Hints are kept in a table of the
// caller's.
func NewStore(hints *Hints) *Store {
	s := &Store{hints: hints, watchers: make(map[*func(string)]struct{}), open: caddy.NewUsagePool()}
	s.overlays.Store(&map[string]Overlay{})
	return s
}

// Overlay is what operators want of the backends of a pool, nil for nothing. It
// must not be changed.
func (s *Store) Overlay(pool string) Overlay { return (*s.overlays.Load())[pool] }

// Change changes what operators want of a backend. f says what that is, from
// what it was, and may refuse; it must not call the store. The change is on disk
// and those who watch have been told when Change returns nil. Any error has
// changed nothing.
func (s *Store) Change(pool string, addr netip.AddrPort, f func(Backend) (Backend, error)) error {
	changed, err := s.change(pool, addr, f)
	if changed {
		s.tell(pool)
	}
	return err
}

func (s *Store) change(pool string, addr netip.AddrPort, f func(Backend) (Backend, error)) (changed bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := *s.overlays.Load()
	was, known := all[pool][addr]
	b, err := f(was)
	if err != nil || b == was {
		return false, err
	}
	if !known && count(all) >= MaxBackends {
		return false, ErrFull
	}
	overlay := maps.Clone(all[pool])
	if overlay == nil {
		overlay = make(Overlay)
	}
	if b == (Backend{}) {
		delete(overlay, addr)
	} else {
		overlay[addr] = b
	}
	if err := s.writeLocked(func(w *writer) error { return w.backend(pool, addr, b) }); err != nil {
		return false, err
	}
	s.replaceLocked(pool, overlay)
	return true, nil
}

func (s *Store) replaceLocked(pool string, o Overlay) {
	all := maps.Clone(*s.overlays.Load())
	if len(o) == 0 {
		delete(all, pool)
	} else {
		all[pool] = o
	}
	s.overlays.Store(&all)
}

func count(all map[string]Overlay) (n int) {
	for _, o := range all {
		n += len(o)
	}
	return n
}

// Drop forgets what operators want of the backends of a pool, "" for all, and
// returns what that was.
func (s *Store) Drop(pool string) ([]Entry, error) {
	dropped, pools, err := s.drop(pool)
	for _, p := range pools {
		s.tell(p)
	}
	return dropped, err
}

func (s *Store) drop(pool string) (dropped []Entry, pools []string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := *s.overlays.Load()
	rest := make(map[string]Overlay)
	for p, o := range all {
		if pool != "" && p != pool {
			rest[p] = o
			continue
		}
		pools = append(pools, p)
		dropped = append(dropped, entries(p, o)...)
	}
	if len(pools) == 0 {
		return nil, nil, nil
	}
	err = s.writeLocked(func(w *writer) error {
		for _, p := range pools {
			for addr := range all[p] {
				if err := w.backend(p, addr, Backend{}); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	s.overlays.Store(&rest)
	sortEntries(dropped)
	return dropped, pools, nil
}

// Drained tells who has drained the instance, and whether anybody has.
func (s *Store) Drained() (By, bool) {
	if by := s.drained.Load(); by != nil {
		return *by, true
	}
	return By{}, false
}

// Drain drains the instance or, with nil, ends that. One that is drained
// already stays so by whom it was.
func (s *Store) Drain(by *By) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if (by == nil) == (s.drained.Load() == nil) {
		return nil
	}
	if err := s.writeLocked(func(w *writer) error { return w.drained(by) }); err != nil {
		return err
	}
	s.drained.Store(by)
	return nil
}

// writeLocked changes the file in use, if there is one.
func (s *Store) writeLocked(f func(*writer) error) error {
	if len(s.files) == 0 {
		return nil
	}
	return s.files[len(s.files)-1].update(f)
}

// Watch has f called after every change of the backends of a pool, by who makes
// it, several at a time, until stop is called. The caller of Change waits for it.
func (s *Store) Watch(f func(pool string)) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers[&f] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, &f)
	}
}

func (s *Store) tell(pool string) {
	s.mu.Lock()
	watchers := slices.Collect(maps.Keys(s.watchers))
	s.mu.Unlock()
	for _, f := range watchers {
		(*f)(pool)
	}
}

// Entry is one thing that operators want of a backend.
type Entry struct {
	Pool   string
	Addr   netip.AddrPort
	Change string // added, removed or state
	Weight uint32 // of one that is added
	State  State  // of a change of state
	By
}

// Entries is all that operators want of backends, in the order of pools and
// addresses.
func (s *Store) Entries() []Entry {
	var list []Entry
	for pool, o := range *s.overlays.Load() {
		list = append(list, entries(pool, o)...)
	}
	sortEntries(list)
	return list
}

func entries(pool string, o Overlay) (list []Entry) {
	for addr, b := range o {
		if b.Weight > 0 {
			list = append(list, Entry{Pool: pool, Addr: addr, Change: "added", Weight: b.Weight, By: b.Added})
		}
		if b.IsRemoved() {
			list = append(list, Entry{Pool: pool, Addr: addr, Change: "removed", By: b.Removed})
		}
		if b.State != Enabled {
			list = append(list, Entry{Pool: pool, Addr: addr, Change: "state", State: b.State, By: b.Since})
		}
	}
	return list
}

func sortEntries(list []Entry) {
	slices.SortFunc(list, func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Pool, b.Pool), a.Addr.Compare(b.Addr), cmp.Compare(a.Change, b.Change))
	})
}

// check says what no change could have made.
func (b Backend) check() error {
	switch {
	case int(b.State) >= len(states):
		return errors.New("a state that does not exist")
	case b.Weight > 0 && b.IsRemoved():
		return errors.New("a backend that is added and removed")
	case b == Backend{}:
		return errors.New("nothing is wanted")
	}
	return nil
}

// splitKey takes apart what joinKey has put together. Pools may have any
// name; addresses have no zero byte.
func splitKey(key []byte) (pool string, addr netip.AddrPort, err error) {
	i := bytes.LastIndexByte(key, 0)
	if i < 0 {
		return "", addr, errors.New("a key without an address")
	}
	addr, err = netip.ParseAddrPort(string(key[i+1:]))
	return string(key[:i]), addr, err
}

func joinKey(pool string, addr netip.AddrPort) []byte {
	return addr.AppendTo(append([]byte(pool), 0))
}
