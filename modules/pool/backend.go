package pool

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/tokens"
	"github.com/wayhouse-proxy/wayhouse/modules/health"
	"github.com/wayhouse-proxy/wayhouse/modules/intent"
)

// Backend is one address of the pools of one name. It lives as long as a
// config lists it or a flow uses it, so that a reload changes neither its
// health, nor its operator state, nor its counts. Its methods may be called
// from any goroutine.
type Backend struct {
	pool string
	addr netip.AddrPort
	born time.Time // the beginning of bucket's clock

	// What a choice looks at; changed under mu, or counted.
	down     atomic.Bool
	state    atomic.Uint32
	weight   atomic.Uint32
	priority atomic.Uint32 // higher ones wait for all lower ones to be down
	capacity atomic.Int64  // flows that it may have, as its source says; 0: it does not
	active   atomic.Int64
	bucket   tokens.Bucket
	origin   atomic.Uint32

	total    atomic.Uint64
	failures [relay.SendFailed + 1]atomic.Uint64
	checks   [2]atomic.Uint64 // failed, passed

	rhythm  health.Rhythm
	suspect atomic.Bool // tally.Suspect, to be seen without mu
	owed    atomic.Int64

	mu        sync.Mutex
	tally     health.Tally
	downSince time.Time
	acted     bool // the flows have been dealt with since it went down
	lastCheck time.Time
	lastError string
	members   []membership // of running pools, the newest last
	wanted    wanted
}

// membership is what a pool says about its backend.
type membership struct {
	pool *Pool
	member
}

func newBackend(pool string, m member) *Backend {
	b := &Backend{pool: pool, addr: m.addr, born: time.Now()}
	b.show(m)
	return b
}

// show has those who choose see what a pool says about the backend.
func (b *Backend) show(m member) {
	b.weight.Store(m.weight)
	b.priority.Store(uint32(m.priority))
	b.capacity.Store(m.capacity)
	b.origin.Store(uint32(m.origin))
}

// State is what the operator wants of a backend.
type State = intent.State

// The states.
const (
	Enabled  = intent.Enabled
	Draining = intent.Draining
	Disabled = intent.Disabled
)

// Addr is the backend's address; IPv4 is never IPv4-mapped.
func (b *Backend) Addr() netip.AddrPort { return b.addr }

// Weight is the backend's share, at least 1.
func (b *Backend) Weight() uint32 { return b.weight.Load() }

// Origin is who names the backend.
func (b *Backend) Origin() Origin { return Origin(b.origin.Load()) }

// Active is how many flows the backend has.
func (b *Backend) Active() int64 { return b.active.Load() }

// Total is how many places for a flow the backend has given, ever.
func (b *Backend) Total() uint64 { return b.total.Load() }

// Healthy reports whether the backend is up, by checks and by flows.
func (b *Backend) Healthy() bool { return !b.down.Load() }

// State is what the operator wants.
func (b *Backend) State() State { return State(b.state.Load()) }

// SetState changes what the operator wants; it holds for the next choice.
func (b *Backend) SetState(s State) {
	b.state.Store(uint32(s))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pokeLocked()
}

// LastCheck is when the last check ended, zero before the first, and what it
// found wrong, or else what flows that have failed since have put the backend
// down for; "" when nothing is.
func (b *Backend) LastCheck() (time.Time, string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.lastCheck, b.lastError
}

// Checks are how many checks have passed and failed, ever.
func (b *Backend) Checks() (passed, failed uint64) {
	return b.checks[1].Load(), b.checks[0].Load()
}

// Failures is how much evidence of a kind flows have reported, ever.
func (b *Backend) Failures(f relay.Failure) uint64 { return b.failures[f].Load() }

// Release gives back the place of a flow that has ended or could not connect.
func (b *Backend) Release() {
	n := b.active.Add(-1)
	if n < 0 {
		panic("pool: a place at a backend was released twice")
	}
	if n == 0 && b.owed.Load() > 0 {
		b.settle()
	}
}

// Passive reports evidence against the backend. A shortage is our own and does
// not count.
func (b *Backend) Passive(f relay.Failure) {
	b.failures[f].Add(1)
	if f == relay.Shortage || b.down.Load() {
		return
	}
	b.mu.Lock()
	changed := b.tally.FlowFailed(b.rulesLocked())
	if changed {
		b.lastError = fmt.Sprintf("flows failed, the last one with %v", f)
	}
	log := b.changedLocked(changed, time.Now())
	b.mu.Unlock()
	if changed {
		log.Warn("backend is down", zap.Stringer("upstream", b.addr), zap.Stringer("reason", f))
	}
}

// PassiveOK reports the first bytes that the backend has sent to a flow. That
// something could be sent to a backend is no success.
func (b *Backend) PassiveOK() {
	if !b.suspect.Load() {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.tally.FlowAnswered()
	b.suspect.Store(false)
}

// Checked hears the result of a check; see health.Target.
func (b *Backend) Checked(at time.Time, err error) {
	b.mu.Lock()
	b.lastCheck, b.lastError = at, ""
	if err != nil {
		b.lastError = err.Error()
		if health.NoVerdict(err) {
			b.mu.Unlock()
			return
		}
		b.checks[0].Add(1)
	} else {
		b.checks[1].Add(1)
	}
	changed := b.tally.Checked(err == nil, b.rulesLocked())
	log := b.changedLocked(changed, at)
	b.mu.Unlock()
	switch {
	case changed && err == nil:
		log.Info("backend is up", zap.Stringer("upstream", b.addr))
	case changed:
		log.Warn("backend is down", zap.Stringer("upstream", b.addr), zap.String("reason", err.Error()))
	}
}

// Rhythm is when the backend is checked; see health.Target.
func (b *Backend) Rhythm() *health.Rhythm { return &b.rhythm }

// changedLocked shows the tally to those who choose.
func (b *Backend) changedLocked(changed bool, at time.Time) *zap.Logger {
	b.suspect.Store(b.tally.Suspect())
	if !changed {
		return nil
	}
	b.down.Store(b.tally.Down)
	b.downSince, b.acted = at, false
	b.pokeLocked()
	if n := len(b.members); n > 0 {
		return b.members[n-1].pool.log
	}
	return zap.NewNop()
}

func (b *Backend) pokeLocked() {
	for _, m := range b.members {
		m.pool.poke()
	}
}

// rulesLocked are those of the newest config.
func (b *Backend) rulesLocked() health.Rules {
	if n := len(b.members); n > 0 {
		return b.members[n-1].pool.check.Common().Rules()
	}
	return health.Rules{Rise: health.DefaultRise, Fall: health.DefaultFall}
}

// join makes a pool that starts, or has found the address, hear of changes.
func (b *Backend) join(p *Pool, m member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.members = append(b.members, membership{p, m})
	b.show(m)
}

// awaitChecks keeps flows from a backend that is new in a running pool, until it
// has passed its checks. One that another pool of the name has is known. Flows that
// it has from before it was removed are left.
func (b *Backend) awaitChecks() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.members) > 0 {
		return
	}
	b.tally = health.Tally{Down: true}
	b.changedLocked(true, time.Now())
	b.acted = true
}

// revise takes in what a pool that has joined says now. What the newest one
// says counts.
func (b *Backend) revise(p *Pool, m member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.members {
		if b.members[i].pool == p {
			b.members[i].member = m
		}
	}
	b.show(b.members[len(b.members)-1].member)
}

func (b *Backend) leave(p *Pool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var rest []membership
	for _, m := range b.members {
		if m.pool != p {
			rest = append(rest, m)
			b.show(m.member)
		}
	}
	b.members = rest
}

// downDue reports whether flows are to be dealt with now, wait after the
// backend went down, or else when: zero for not at all. It says so once.
func (b *Backend) downDue(now time.Time, wait time.Duration) (due bool, at time.Time) {
	if !b.down.Load() {
		return false, time.Time{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.tally.Down || b.acted {
		return false, time.Time{}
	}
	if at := b.downSince.Add(wait); at.After(now) {
		return false, at
	}
	b.acted = true
	return true, time.Time{}
}

// readmit gives a backend another chance wait after it went down, or says when
// that will be.
func (b *Backend) readmit(now time.Time, wait time.Duration) (at time.Time) {
	if !b.down.Load() {
		return time.Time{}
	}
	b.mu.Lock()
	if at := b.downSince.Add(wait); !b.tally.Down || at.After(now) {
		b.mu.Unlock()
		return at
	}
	b.tally, b.lastError = health.Tally{}, ""
	log := b.changedLocked(true, now)
	b.mu.Unlock()
	log.Info("backend is given another chance", zap.Stringer("upstream", b.addr))
	return time.Time{}
}

// takes reports whether new flows may be given to the backend; anyHealth: also
// while it is down.
func (b *Backend) takes(anyHealth bool) bool {
	return State(b.state.Load()) == Enabled && (anyHealth || !b.down.Load())
}

// room reports whether reserve would find a place.
func (b *Backend) room(s *Settings) bool {
	if limit := b.limit(s); limit != 0 && b.active.Load() >= limit {
		return false
	}
	return s.MaxNewPerSec == 0 || b.bucket.HasAt(int64(time.Since(b.born)), s.MaxNewPerSec, s.MaxNewPerSec)
}

// limit is how many flows the backend may have at once, 0 for any number.
func (b *Backend) limit(s *Settings) int64 {
	if c := b.capacity.Load(); c != 0 && (s.MaxSessions == 0 || c < s.MaxSessions) {
		return c
	}
	return s.MaxSessions
}

// reserve takes a place for a flow, unless that would break a limit.
func (b *Backend) reserve(s *Settings) bool {
	if limit := b.limit(s); limit == 0 {
		b.active.Add(1)
	} else {
		for {
			n := b.active.Load()
			if n >= limit {
				return false
			}
			if b.active.CompareAndSwap(n, n+1) {
				break
			}
		}
	}
	if s.MaxNewPerSec != 0 && !b.bucket.TakeAt(int64(time.Since(b.born)), s.MaxNewPerSec, s.MaxNewPerSec) {
		b.Release()
		return false
	}
	b.total.Add(1)
	return true
}
