package pool

import (
	"cmp"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// What lives as long as the process.

// key names a backend in every config.
type key struct {
	pool string
	addr netip.AddrPort
}

// backends holds the Backend of every key. Each pool that lists it holds one
// reference; a pool that gives it back while flows use it leaves its reference
// to them (owed), and the last flow gives that back.
var backends = caddy.NewUsagePool()

// Destruct implements caddy.Destructor.
func (b *Backend) Destruct() error { return nil }

func take(pool string, m member) (*Backend, error) {
	v, _, err := backends.LoadOrNew(key{pool, m.addr}, func() (caddy.Destructor, error) {
		return newBackend(pool, m), nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*Backend), nil
}

// give gives back what take has taken.
func (b *Backend) give() {
	b.owed.Add(1)
	if b.active.Load() == 0 {
		b.settle()
	}
}

// settle gives back the references that were left to flows.
func (b *Backend) settle() {
	for range b.owed.Swap(0) {
		_, _ = backends.Delete(key{b.pool, b.addr}) // Destruct returns no error
	}
}

// Result is the outcome of a choice.
type Result uint8

// The results. The strings are label values of wayhouse_lb_selections_total.
const (
	OK         Result = iota
	NoBackend         // none takes flows, or all that do were tried
	AtCapacity        // those that would take it are at a limit
	numResults
)

func (r Result) String() string { return [...]string{"ok", "no_backend", "at_capacity"}[r] }

type counts [numResults]atomic.Uint64

type selection struct{ pool, policy string }

// registry knows the running pools of each name, the newest last.
var registry = struct {
	mu         sync.Mutex
	running    map[string][]*Pool
	selections map[selection]*counts
	deadlines  map[key]*time.Timer // of the flows of backends that were removed
}{
	running:    make(map[string][]*Pool),
	selections: make(map[selection]*counts),
	deadlines:  make(map[key]*time.Timer),
}

// countsOf returns the counters of a pool's name and policy.
func countsOf(pool, policy string) *counts {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	s := selection{pool, policy}
	if registry.selections[s] == nil {
		registry.selections[s] = new(counts)
	}
	return registry.selections[s]
}

// Selections calls yield for every pool and policy there has been, with how
// many choices had each Result.
func Selections(yield func(pool, policy string, results [3]uint64)) {
	registry.mu.Lock()
	all := maps.Clone(registry.selections)
	registry.mu.Unlock()
	for s, c := range all {
		yield(s.pool, s.policy, [numResults]uint64{c[OK].Load(), c[NoBackend].Load(), c[AtCapacity].Load()})
	}
}

// ForgetSelections removes the counts of a pool that no config has any more.
func ForgetSelections(pool string) {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	maps.DeleteFunc(registry.selections, func(s selection, _ *counts) bool { return s.pool == pool })
}

// All returns the running pools of the newest config, by name.
func All() iter.Seq[*Pool] {
	registry.mu.Lock()
	var pools []*Pool
	for _, list := range registry.running {
		pools = append(pools, list[len(list)-1])
	}
	registry.mu.Unlock()
	slices.SortFunc(pools, func(a, b *Pool) int { return cmp.Compare(a.name, b.name) })
	return slices.Values(pools)
}

// newest returns the newest running pool of a name, nil when there is none.
func newest(name string) *Pool {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if list := registry.running[name]; len(list) > 0 {
		return list[len(list)-1]
	}
	return nil
}

// running are the running pools of a name.
func running(name string) []*Pool {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	return slices.Clone(registry.running[name])
}

func register(p *Pool) {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	registry.running[p.name] = append(registry.running[p.name], p)
}

func unregister(p *Pool) {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	list := slices.DeleteFunc(slices.Clone(registry.running[p.name]), func(q *Pool) bool { return q == p })
	if len(list) == 0 {
		delete(registry.running, p.name)
		return
	}
	registry.running[p.name] = list
	list[len(list)-1].poke()
}

// removed deals with the flows of a backend that p no longer has, and that no
// newer pool of its name has, as the newest config wants it. The deadline of one
// that was draining has begun with that.
func removed(p *Pool, b *Backend) {
	addr := b.addr
	by := newest(p.name)
	if by == nil {
		by = p
	}
	switch s := &by.set; {
	case s.OnBackendRemoved == RemovedClose:
		by.tellRemoved(addr, RemovedClose)
	case s.DrainDeadline > 0:
		registry.mu.Lock()
		defer registry.mu.Unlock()
		k := key{p.name, addr}
		if old := registry.deadlines[k]; old != nil {
			old.Stop()
		}
		var t *time.Timer
		t = time.AfterFunc(b.drainLeft(time.Now(), s.DrainDeadline), func() {
			registry.mu.Lock()
			current := registry.deadlines[k] == t
			if current {
				delete(registry.deadlines, k)
			}
			registry.mu.Unlock()
			if !current {
				return
			}
			if p := newest(k.pool); p != nil {
				by = p
			}
			by.tellRemoved(addr, RemovedDrain)
		})
		registry.deadlines[k] = t
	}
}

// returned has the flows left of a backend that was removed and is in a pool
// again, whether its deadline has passed or not.
func returned(p *Pool, b *Backend) {
	registry.mu.Lock()
	k := key{p.name, b.addr}
	t := registry.deadlines[k]
	delete(registry.deadlines, k)
	registry.mu.Unlock()
	if t != nil {
		t.Stop()
	}
	if b.State() != Draining { // its flows may be ending for that
		p.tellReturned(b.addr)
	}
}
