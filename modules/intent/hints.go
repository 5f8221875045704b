// Package intent keeps what operators and their tools want at run time, for as
// long as the process lives and over every reload.
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
}

// Hints is a table of route hints. Reading is for every new flow, from many
// goroutines; time is monotonic.
type Hints struct {
	max int

	mu     sync.RWMutex
	byAddr map[netip.Addr]*hint
	queue  byExpiry // the same hints, the first to end at its head
}

type hint struct {
	client  netip.Addr
	pool    string
	expires time.Time
	at      int // in the queue
}

// RouteHints are the hints of this process.
var RouteHints = NewHints(MaxHints)

// NewHints makes a table for max hints.
func NewHints(max int) *Hints {
	return &Hints{max: max, byAddr: make(map[netip.Addr]*hint)}
}

// Set adds a hint or replaces the client's. It reports false when the table is
// full: hints that are there are not pushed out by new ones.
func (t *Hints) Set(client netip.Addr, pool string, ttl time.Duration) bool {
	client = cidr.Plain(client)
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sweepLocked(now)
	if h := t.byAddr[client]; h != nil {
		h.pool, h.expires = pool, now.Add(ttl)
		heap.Fix(&t.queue, h.at)
		return true
	}
	if len(t.byAddr) >= t.max {
		return false
	}
	h := &hint{client: client, pool: pool, expires: now.Add(ttl)}
	t.byAddr[client] = h
	heap.Push(&t.queue, h)
	return true
}

// sweepLocked forgets the hints that have ended.
func (t *Hints) sweepLocked(now time.Time) {
	for len(t.queue) > 0 && !now.Before(t.queue[0].expires) {
		h := heap.Pop(&t.queue).(*hint)
		delete(t.byAddr, h.client)
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
			v = Hint{Client: a, Pool: h.pool, Left: time.Until(h.expires)}
		}
		t.mu.RUnlock()
		if v.Left > 0 && !yield(v) {
			return
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
