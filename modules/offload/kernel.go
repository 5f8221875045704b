package offload

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// Surroundings are what the kernel's help needs of the process.
type Surroundings struct {
	Logger *zap.Logger
	Flows  Flows

	// Count adds packets that the kernel has dropped to what a listener's filters
	// have refused.
	Count func(listener string, packets uint64)
}

// Kernel is the kernel's help for the process. Its goroutine, run, is started
// by Acquire and ended by the last Release, and owns what stands below calls.
type Kernel struct {
	Surroundings

	set    atomic.Pointer[settings]
	tally  tally
	marks  marks
	ring   ring
	asleep atomic.Bool // run waits to be woken when there is an event
	wake   chan struct{}
	full   atomic.Uint64 // events that found the ring full

	calls  chan func()
	cancel context.CancelFunc
	done   chan struct{}

	plain   bool   // tables without an owner; for tests
	t       *table // nil: there is none, and retryAt is when to make one
	err     error  // why there is none
	retryAt time.Time
	backoff time.Duration
	uses    []*Use // the last is in effect
	ids     map[string]int
	scopes  map[int]*scope
	pending map[int]map[source]struct{} // to be published with the next look through the sessions
	looked  time.Time                   // when that was last done
	looking time.Duration               // how long it took
	swept   time.Time
}

// scope is what is known of a guarded listener.
type scope struct {
	*Scope
	id      int
	before  any                  // what Denied has returned last
	wanted  cidr.Ranges          // what it has returned with it
	denied  cidr.Ranges          // what the table has of it
	blocked map[source]time.Time // and when the table has certainly forgotten them
	kept    map[netip.AddrPort]struct{}
	counts  [causes]uint64 // as the table had them
}

// Times of run.
const (
	eventPause = 10 * time.Millisecond  // in which events gather
	lookPause  = 250 * time.Millisecond // at least, between two looks through all sessions
	lookShare  = 10                     // and as much time as this many such looks take
	sweepPause = 30 * time.Second       // between two looks for what need no longer be kept
	minBackoff = time.Second
	maxBackoff = time.Minute
	spare      = 2 * time.Second // what clocks of ours and the kernel's may differ by, generously
)

var (
	started = time.Now()
	pool    = caddy.NewUsagePool()
	current atomic.Pointer[Kernel] // for metrics
)

// second counts from 1: 0 is a mark that was never set.
func second(t time.Time) uint32 { return uint32(t.Sub(started)/time.Second) + 1 }

type poolKey struct{}

// Acquire returns the kernel's help for the process, which it begins if no
// config has it. Give it back with Release.
func Acquire(c *Config, s Surroundings) (*Kernel, error) {
	v, _, err := pool.LoadOrNew(poolKey{}, func() (caddy.Destructor, error) {
		k, err := begin(s, false)
		if err != nil {
			return nil, err
		}
		now := c.settings()
		k.set.Store(&now)
		current.Store(k)
		return k, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*Kernel), nil
}

// Release gives back what Acquire has returned.
func Release() error {
	_, err := pool.Delete(poolKey{})
	return err
}

// Destruct implements caddy.Destructor: the last config has stopped.
func (k *Kernel) Destruct() error {
	current.CompareAndSwap(k, nil)
	return k.end()
}

// begin makes a table and starts run.
func begin(s Surroundings, plain bool) (*Kernel, error) {
	t, err := newTable(plain)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	k := &Kernel{
		Surroundings: s,
		wake:         make(chan struct{}, 1), calls: make(chan func()), cancel: cancel, done: make(chan struct{}),
		plain: plain, t: t, backoff: minBackoff, ids: make(map[string]int), scopes: make(map[int]*scope), pending: make(map[int]map[source]struct{}),
	}
	k.set.Store(&settings{defaultBlockAfter, defaultBlockFor, defaultMaxBlocked})
	up.WithLabelValues().Set(1)
	go k.run(ctx)
	return k, nil
}

func (k *Kernel) end() error {
	k.cancel()
	<-k.done
	var err error
	if k.t != nil {
		k.count()
	}
	if k.t != nil {
		err = k.t.close()
	}
	up.Reset() // nobody wants it: that is no failure
	return err
}

// Use is what one config has the kernel do.
type Use struct {
	k      *Kernel
	set    settings
	scopes []*Scope
}

// Prepare makes a Use that is not in effect yet.
func (k *Kernel) Prepare(c *Config, scopes []*Scope) *Use {
	return &Use{k, c.settings(), scopes}
}

// Shield is what a guarded listener's workers tell, nil for others.
func (u *Use) Shield(listener string) *Shield {
	for _, s := range u.scopes {
		if s.Listener == listener && s.Guard {
			var id int
			u.k.call(func() { id = u.k.id(listener) })
			return &Shield{u.k, id}
		}
	}
	return nil
}

// Serve puts the use in effect, once the listeners of its config have begun to
// serve by it. By the time it returns nobody is turned away any more who should
// not be; those who should be may take a moment longer.
func (u *Use) Serve() {
	u.k.call(func() {
		u.k.uses = append(u.k.uses, u)
		u.k.follow()
	})
}

// Close takes the use out of effect.
func (u *Use) Close() {
	u.k.call(func() {
		n := len(u.k.uses)
		last := n > 0 && u.k.uses[n-1] == u
		if u.k.uses = slices.DeleteFunc(u.k.uses, func(o *Use) bool { return o == u }); last {
			u.k.follow()
		}
	})
}

// Shield tells the kernel's side what becomes of the new flows of a listener.
// Workers call it, many at a time; it never waits.
type Shield struct {
	k  *Kernel
	id int
}

// Refused notes that a rule has kept out a flow. source is in its plain form.
func (s *Shield) Refused(from netip.Addr, rule string) {
	kind, ok := kindOf(rule)
	if !ok {
		return
	}
	src := sourceOf(from, kind)
	if s.k.tally.hit(hashOf(s.id, src), uint16(second(time.Now())), s.k.set.Load().after) {
		s.k.tell(event{id: s.id, kind: uint8(kind), client: netip.AddrPortFrom(src.addr, 0)})
	}
}

// Admitted notes that a UDP session begins.
func (s *Shield) Admitted(client netip.AddrPort) {
	now := second(time.Now())
	if s.k.marks.any.Load() < now {
		return
	}
	a := cidr.Plain(client.Addr())
	for kind := range kinds {
		if s.k.marks.has(hashOf(s.id, sourceOf(a, kind)), now) {
			s.k.tell(event{id: s.id, client: netip.AddrPortFrom(a, client.Port()), admitted: true})
			return
		}
	}
}

func (k *Kernel) tell(e event) {
	if !k.ring.push(e) {
		k.full.Add(1)
		return
	}
	if k.asleep.CompareAndSwap(true, false) {
		select {
		case k.wake <- struct{}{}:
		default:
		}
	}
}

// call has run call f, and waits for it; when run has ended, nobody does.
func (k *Kernel) call(f func()) bool {
	done := make(chan struct{})
	select {
	case k.calls <- func() { f(); close(done) }:
		<-done
		return true
	case <-k.done:
		return false
	}
}

// run is the goroutine that has the table.
func (k *Kernel) run(ctx context.Context) {
	defer close(k.done)
	every := time.NewTicker(time.Second)
	defer every.Stop()
	soon := time.NewTimer(time.Hour)
	soon.Stop()
	defer soon.Stop()
	k.asleep.Store(true)
	for {
		select {
		case <-ctx.Done():
			return
		case f := <-k.calls:
			f()
		case <-every.C:
			k.everySecond()
		case <-k.wake:
			soon.Reset(eventPause)
			continue // run is awake; the ring is looked into when soon has come
		case <-soon.C:
			more := k.drain()
			wait := k.publish()
			switch {
			case more:
				soon.Reset(eventPause)
			case wait > 0:
				soon.Reset(wait)
				k.asleep.Store(true)
			default:
				k.asleep.Store(true)
			}
		}
		if k.asleep.Load() && k.ring.ready() && k.asleep.CompareAndSwap(true, false) {
			soon.Reset(eventPause) // one came between the last look and going to sleep
		}
	}
}

// id is the number of a listener in tables.
func (k *Kernel) id(listener string) int {
	if k.ids[listener] == 0 {
		k.ids[listener] = len(k.ids) + 1
	}
	return k.ids[listener]
}

// drain takes what workers have told, as much as they can at once, and reports
// whether there may be more.
func (k *Kernel) drain() (more bool) {
	admitted := make(map[*scope][]netip.AddrPort)
	for range ringSize {
		e, ok := k.ring.pop()
		if !ok {
			break
		}
		s := k.scopes[e.id]
		switch {
		case s == nil: // of a listener that is gone
		case e.admitted:
			if _, known := s.kept[e.client]; !known {
				admitted[s] = append(admitted[s], e.client)
			}
		default:
			if k.pending[e.id] == nil {
				k.pending[e.id] = make(map[source]struct{})
			}
			k.pending[e.id][source{e.client.Addr(), int(e.kind)}] = struct{}{}
		}
	}
	for s, clients := range admitted {
		if k.t == nil {
			break // there is nothing that would be dropped
		}
		if len(s.kept)+len(clients) > maxKept {
			k.giveUp(s)
			continue
		}
		if k.keep(s, clients) != nil {
			break
		}
	}
	return k.ring.ready()
}

// giveUp turns nobody away for a listener that has more sessions to be kept
// than fit: all that was published goes, and comes back bit by bit.
func (k *Kernel) giveUp(s *scope) {
	missed.WithLabelValues("kept").Inc()
	k.count()
	if k.t == nil {
		return
	}
	clear(s.blocked)
	clear(s.kept)
	s.denied, s.before, s.counts = nil, nil, [causes]uint64{}
	err := k.t.forget(s.id)
	if err == nil {
		err = k.point()
	}
	if err != nil {
		k.lost(err)
	}
}

// publish has the table block the sources that are pending, once the time for a
// look through the sessions has come. It returns how long that is off.
func (k *Kernel) publish() (wait time.Duration) {
	if len(k.pending) == 0 {
		return 0
	}
	now := time.Now()
	if wait = k.looked.Add(max(lookPause, lookShare*k.looking)).Sub(now); wait > 0 {
		return wait
	}
	pending := k.pending
	k.pending = make(map[int]map[source]struct{})
	if k.t == nil {
		return 0
	}
	set := k.set.Load()
	until := now.Add(set.blockFor)
	for id, sources := range pending {
		s := k.scopes[id]
		if s == nil {
			continue
		}
		sheet := make(map[source]time.Duration)
		for src := range sources {
			if s.blocked[src].After(now) {
				continue
			}
			if len(s.blocked)+len(sheet) >= set.maxBlocked {
				missed.WithLabelValues("max_blocked").Inc()
				continue
			}
			sheet[src] = set.blockFor
			k.marks.set(hashOf(id, src), second(until.Add(2*spare)))
		}
		if len(sheet) == 0 {
			continue
		}
		keep, fits := k.look(s, func(a netip.Addr) bool {
			if _, ok := sheet[sourceOf(a, anIP)]; ok {
				return true
			}
			_, ok := sheet[sourceOf(a, aNet)]
			return ok
		})
		if !fits {
			missed.WithLabelValues("kept").Add(float64(len(sheet)))
			continue
		}
		if k.keep(s, keep) != nil {
			return 0
		}
		if err := k.t.block(id, sheet); err != nil {
			k.lost(err)
			return 0
		}
		for src := range sheet {
			s.blocked[src] = until.Add(spare)
		}
		blocks.WithLabelValues(s.Listener).Add(float64(len(sheet)))
	}
	k.looked = time.Now()
	k.looking = k.looked.Sub(now)
	return 0
}

// everySecond does what is not urgent.
func (k *Kernel) everySecond() {
	if n := k.full.Swap(0); n > 0 {
		missed.WithLabelValues("queue").Add(float64(n))
	}
	if k.t == nil {
		k.remake()
	}
	if k.t != nil {
		k.count()
	}
	now := time.Now()
	for _, s := range k.scopes {
		maps.DeleteFunc(s.blocked, func(_ source, until time.Time) bool { return until.Before(now) })
		k.updateDenied(s, true)
	}
	if now.Sub(k.swept) > sweepPause {
		k.swept = now
		k.sweep()
	}
	k.gauge()
}

// sweep forgets the clients that have no sessions any more.
func (k *Kernel) sweep() {
	if k.t == nil || !slices.ContainsFunc(slices.Collect(maps.Values(k.scopes)), func(s *scope) bool { return len(s.kept) > 0 }) {
		return
	}
	live := make(map[netip.AddrPort]struct{})
	k.Flows(func(c netip.AddrPort) bool {
		live[netip.AddrPortFrom(cidr.Plain(c.Addr()), c.Port())] = struct{}{}
		return true
	})
	for _, s := range k.scopes {
		var gone []netip.AddrPort
		for c := range s.kept {
			if _, ok := live[c]; !ok {
				gone = append(gone, c)
			}
		}
		if len(gone) == 0 {
			continue
		}
		if err := k.t.keep(s.id, gone, true); err != nil {
			k.lost(err)
			return
		}
		for _, c := range gone {
			delete(s.kept, c)
		}
	}
}
