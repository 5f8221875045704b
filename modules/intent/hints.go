package intent

import (
	"container/heap"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// MaxHints is how many route hints there may be.
const MaxHints = 200000

// A hint's time to live is within these.
const (
	MinHintTTL = time.Second
	MaxHintTTL = time.Hour
)

// Hint says that the flows of a client go to a pool.
type Hint struct {
	Client netip.Addr
	Pool   string
	Left   time.Duration // until it ends
	By
}

// Hints is a table of route hints. Reading is for every new flow, from many
// goroutines; time is monotonic.
type Hints struct {
	max int

	mu     sync.RWMutex
	byAddr map[netip.Addr]*hint
	queue  byExpiry // the same hints, the first to end at its head

	// Clients whose hint is not on disk as it is here; nil: nobody keeps them.
	dirty map[netip.Addr]struct{}
	wake  chan struct{} // there are some
}

type hint struct {
	client  netip.Addr
	pool    string
	by      By
	expires time.Time
	at      int // in the queue
}

// RouteHints are the hints of this process.
var RouteHints = NewHints(MaxHints)

// NewHints makes a table for max hints.
func NewHints(max int) *Hints {
	return &Hints{max: max, byAddr: make(map[netip.Addr]*hint), wake: make(chan struct{}, 1)}
}

// Set is Put of a hint by nobody in particular.
func (t *Hints) Set(client netip.Addr, pool string, ttl time.Duration) bool {
	return t.Put(Hint{Client: client, Pool: pool, Left: ttl})
}

// Put adds a hint or replaces the client's. It reports false when the table is
// full: hints that are there are not pushed out by new ones.
func (t *Hints) Put(v Hint) bool {
	v.Client = cidr.Plain(v.Client)
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.putLocked(v, now) {
		return false
	}
	t.touchLocked(v.Client)
	return true
}

// putLocked is Put of a hint that is on disk.
func (t *Hints) putLocked(v Hint, now time.Time) bool {
	t.sweepLocked(now)
	client := v.Client
	h := t.byAddr[client]
	switch {
	case h != nil:
		h.pool, h.by, h.expires = v.Pool, v.By, now.Add(v.Left)
		heap.Fix(&t.queue, h.at)
	case len(t.byAddr) >= t.max:
		return false
	default:
		h = &hint{client: client, pool: v.Pool, by: v.By, expires: now.Add(v.Left)}
		t.byAddr[client] = h
		heap.Push(&t.queue, h)
	}
	return true
}

// touchLocked notes that the hint of a client has changed.
func (t *Hints) touchLocked(client netip.Addr) {
	if t.dirty == nil {
		return
	}
	t.dirty[client] = struct{}{}
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// sweepLocked forgets the hints that have ended.
func (t *Hints) sweepLocked(now time.Time) {
	for len(t.queue) > 0 && !now.Before(t.queue[0].expires) {
		h := heap.Pop(&t.queue).(*hint)
		delete(t.byAddr, h.client)
		t.touchLocked(h.client)
	}
}

// Get is the pool for a client.
func (t *Hints) Get(client netip.Addr) (pool string, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if len(t.byAddr) == 0 {
		return "", false
	}
	h := t.byAddr[cidr.Plain(client)]
	if h == nil || !time.Now().Before(h.expires) {
		return "", false
	}
	return h.pool, true
}

// Delete forgets the hint of a client and reports whether there was one.
func (t *Hints) Delete(client netip.Addr) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(time.Now())
	h := t.byAddr[cidr.Plain(client)]
	if h == nil {
		return false
	}
	heap.Remove(&t.queue, h.at)
	delete(t.byAddr, h.client)
	t.touchLocked(h.client)
	return true
}

// Len is how many hints there are.
func (t *Hints) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(time.Now())
	return len(t.byAddr)
}

// All calls yield for every hint, by address. It holds no lock meanwhile: hints
// that end or come meanwhile may be among them or not.
func (t *Hints) All(yield func(Hint) bool) {
	t.mu.RLock()
	clients := make([]netip.Addr, 0, len(t.byAddr))
	for a := range t.byAddr {
		clients = append(clients, a)
	}
	t.mu.RUnlock()
	slices.SortFunc(clients, netip.Addr.Compare)
	for _, a := range clients {
		t.mu.RLock()
		var v Hint
		if h := t.byAddr[a]; h != nil {
			v = Hint{Client: a, Pool: h.pool, Left: time.Until(h.expires), By: h.by}
		}
		t.mu.RUnlock()
		if v.Left > 0 && !yield(v) {
			return
		}
	}
}

// keep has the table note which hints change, or no longer, and returns whether
// it did.
func (t *Hints) keep(on bool) (did bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	did = t.dirty != nil
	switch {
	case !on:
		t.dirty = nil
	case t.dirty == nil:
		t.dirty = make(map[netip.Addr]struct{})
	}
	return did
}

// clear forgets all hints.
func (t *Hints) clear() {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.byAddr)
	t.queue = nil
	if t.dirty != nil {
		clear(t.dirty)
	}
}

// change is how the hint of a client is to be on disk: nil for none.
type change struct {
	client netip.Addr
	hint   *savedHint
}

// changes returns up to max of those that have changed, and forgets that they
// have. The caller gives back with unsaved what it could not save.
func (t *Hints) changes(max int) (list []change) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	for client := range t.dirty {
		if len(list) == max {
			break
		}
		delete(t.dirty, client)
		c := change{client: client}
		if h := t.byAddr[client]; h != nil {
			c.hint = h.saved(now)
		}
		list = append(list, c)
	}
	return list
}

// unsaved notes again what changes has returned.
func (t *Hints) unsaved(list []change) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.dirty == nil {
		return
	}
	for _, c := range list {
		t.dirty[c.client] = struct{}{}
	}
}

// saved are all hints as they are to be on disk.
func (t *Hints) saved() (list []savedHint) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	for _, h := range t.byAddr {
		list = append(list, *h.saved(now))
	}
	return list
}

// saved is the hint with the wall clock's time of its end.
func (h *hint) saved(now time.Time) *savedHint {
	return &savedHint{client: h.client, Pool: h.pool, Expires: now.Round(0).Add(h.expires.Sub(now)).UTC(), By: h.by}
}

// restore puts hints from disk into the table. Those that are there already win,
// and those for which there is no time or room are to be forgotten on disk too.
func (t *Hints) restore(list []savedHint) {
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	for _, h := range list {
		client := cidr.Plain(h.client)
		if client == h.client && t.byAddr[client] != nil {
			continue
		}
		// A clock that was set back must not let a hint live longer than any could.
		left := min(h.Expires.Sub(now.Round(0)), MaxHintTTL)
		if client != h.client || left <= 0 || !t.putLocked(Hint{client, h.Pool, left, h.By}, now) {
			t.touchLocked(h.client)
		}
	}
}

// byExpiry is a heap of hints.
type byExpiry []*hint

func (q byExpiry) Len() int           { return len(q) }
func (q byExpiry) Less(i, j int) bool { return q[i].expires.Before(q[j].expires) }
func (q byExpiry) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].at, q[j].at = i, j
}

func (q *byExpiry) Push(v any) {
	h := v.(*hint)
	h.at = len(*q)
	*q = append(*q, h)
}

func (q *byExpiry) Pop() any {
	last := len(*q) - 1
	h := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	return h
}
