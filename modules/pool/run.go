package pool

import (
	"context"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/health"
	"github.com/wayhouse-proxy/wayhouse/modules/intent"
)

// Start resolves host names or asks the source, for at most a second, and from
// then on keeps the set of backends, and runs the checks. What has no answer by
// then contributes its addresses later.
func (p *Pool) Start() error {
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel, p.ended = cancel, ctx.Done()
	p.answers = make(chan answer)
	p.follow(ctx)
	p.followSource()
	p.members()
	p.snap.Store(p.build())
	if p.checks() {
		p.runner = &health.Runner{Name: p.name, Check: p.check}
		p.runner.Start(healthTargets(p.snap.Load().all))
	}
	register(p)
	p.reset() // who has changed the overlay since members knew of no pool to tell
	p.wg.Go(func() { p.run(ctx) })
	return nil
}

// Stop ends what Start began. Backends that the newest pool of the same name
// does not have are dealt with as removed; without such a pool all of them are,
// unless the process ends.
func (p *Pool) Stop() {
	if p.cancel == nil {
		return
	}
	p.cancel()
	p.wg.Wait()
	if p.feed != nil {
		p.feed.Stop()
	}
	if p.runner != nil {
		p.runner.Stop()
	}
	mine := p.snap.Load().all
	for _, b := range mine {
		b.leave(p)
	}
	unregister(p)
	var theirs []*Backend
	if q := newest(p.name); q != nil {
		theirs = q.Backends()
	} else if caddy.Exiting() {
		return
	}
	kept := make(map[*Backend]bool, len(theirs))
	for _, b := range theirs {
		kept[b] = true
	}
	for _, b := range mine {
		if !kept[b] {
			removed(p, b)
		}
	}
}

// run keeps the snapshot true, and says what becomes of flows.
func (p *Pool) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var found <-chan struct{} // nil without a source
	if p.feed != nil {
		found = p.feed.Changed()
	}
	for {
		built := true
		select {
		case <-ctx.Done():
			return
		case a := <-p.answers:
			p.answered(a)
			p.reset()
		case <-found:
			p.reset()
		case done := <-p.overlaid:
			p.reset()
			close(done)
		case <-p.wake:
			built = false
		case <-timer.C:
			built = false
		}
		timer.Reset(p.act(built))
	}
}

// reset makes the set of backends what it is to be now.
func (p *Pool) reset() {
	changed, gone := p.members()
	p.snap.Store(p.build())
	if changed && p.runner != nil {
		p.runner.Set(healthTargets(p.snap.Load().all))
	}
	for _, b := range gone {
		if newest(p.name) == p { // an older one is compared when it stops
			removed(p, b)
		}
		b.give()
	}
}

// act does what is due and returns how long until something else is. Of several
// pools of one name only the newest acts. built says that the snapshot has just
// been made; what has changed since wakes the pool again.
func (p *Pool) act(built bool) time.Duration {
	const never = time.Hour
	if newest(p.name) != p {
		if !built {
			p.snap.Store(p.build())
		}
		return never
	}
	now := time.Now()
	var next time.Time
	soonest := func(at time.Time) {
		if !at.IsZero() && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	s := p.check.Common()
	if p.runner == nil {
		wait := time.Duration(*s.Rise) * time.Duration(*s.Interval)
		for _, b := range p.snap.Load().all {
			soonest(b.readmit(now, wait))
		}
		built = false // for those that were
	}
	if !built { // before flows are moved, which choose from it
		p.snap.Store(p.build())
	}
	wait := time.Duration(0)
	if p.set.OnBackendDown == DownHold {
		wait = p.set.Hold
	}
	for _, b := range p.snap.Load().all {
		due, at := b.downDue(now, wait)
		soonest(at)
		if due && p.watcher != nil {
			p.watcher.BackendDown(p, b.addr, p.set.OnBackendDown)
		}
		due, at = b.drainDue(now, p.set.DrainDeadline)
		soonest(at)
		if due {
			p.tellRemoved(b.addr, RemovedDrain)
		}
	}
	if next.IsZero() {
		return never
	}
	return max(time.Until(next), 0)
}

// members brings held up to date with the targets, the names, the source and
// what operators want. It returns whether there is anything new, and the backends
// that are no longer members; those are the caller's to give back.
func (p *Pool) members() (changed bool, gone []*Backend) {
	old := p.Backends()
	joined := make(map[*Backend]bool, len(old))
	for _, b := range old {
		joined[b] = true
	}
	overlay := intent.Process.Overlay(p.name)
	wanted, hidden := overlaid(p.addresses(), overlay)
	returning := p.hidden
	p.hidden = hidden
	keep := make(map[netip.AddrPort]bool, len(wanted))
	served := p.served(wanted)
	for i, m := range wanted {
		keep[m.addr] = true
		b := p.held[m.addr]
		if b != nil && joined[b] {
			p.applyState(b, overlay)
			if p.said[m.addr] != m {
				b.revise(p, m)
				changed = true
			}
			changed = changed || old[min(i, len(old)-1)] != b // another order
			continue
		}
		changed = true
		if b == nil {
			var err error
			if b, err = take(p.name, m); err != nil {
				p.log.Error("backend cannot be added", zap.Stringer("upstream", m.addr), zap.Error(err))
				continue
			}
			p.held[m.addr] = b
		}
		p.applyState(b, overlay)
		byHand := p.runner != nil && (m.origin == FromOverlay || slices.Contains(returning, m.addr))
		if served || byHand && p.checks() {
			b.awaitChecks()
		}
		b.join(p, m)
		returned(p, b)
	}
	for _, b := range old {
		if !keep[b.addr] {
			delete(p.held, b.addr)
			b.leave(p)
			gone = append(gone, b)
		}
	}
	if changed = changed || len(gone) > 0; !changed {
		return false, nil
	}
	p.said = make(map[netip.AddrPort]member, len(wanted))
	p.order = make([]*Backend, 0, len(wanted))
	for _, m := range wanted {
		if b := p.held[m.addr]; b != nil {
			p.said[m.addr] = m
			p.order = append(p.order, b)
		}
	}
	return true, gone
}

// checks reports whether the pool asks its backends how they are.
func (p *Pool) checks() bool {
	_, none := p.check.(*health.None)
	return !none
}

// served reports whether a backend that the pool or the one before it has, and
// that stays, takes flows. Then those that are new wait for their checks. Else
// there is nobody to take their flows meanwhile, as at the start of the process
// or when all backends are replaced at once, and they are tried as they are.
func (p *Pool) served(wanted []member) bool {
	if !p.checks() {
		return false
	}
	s := p.snap.Load()
	if s == nil {
		before := newest(p.name)
		if before == nil {
			return false
		}
		s = before.snap.Load()
	}
	return slices.ContainsFunc(wanted, func(m member) bool {
		b := s.index[m.addr]
		return b != nil && b.takes(false)
	})
}

// member is what a config or a source says about a backend.
type member struct {
	addr     netip.AddrPort
	weight   uint32
	priority uint16
	capacity int64 // flows it may have; 0: not said
	origin   Origin
}

// addresses are the backends of the config or the source, in its order, each
// once.
func (p *Pool) addresses() []member {
	if p.feed != nil {
		return p.sourced()
	}
	var list []member
	seen := make(map[netip.AddrPort]bool)
	add := func(a netip.AddrPort, t hostport.Target) {
		if !seen[a] {
			seen[a] = true
			list = append(list, member{addr: a, weight: p.weight(t)})
		}
	}
	for _, t := range p.targets {
		if t.Host == "" {
			add(t.Addr, t)
			continue
		}
		for _, ip := range p.names[t.Host].Addrs {
			add(netip.AddrPortFrom(ip, t.Port), t)
		}
	}
	return list
}

// build makes a snapshot of what the backends say now.
func (p *Pool) build() *snapshot {
	s := &snapshot{names: p.names, all: p.order, hidden: p.hidden}
	if old := p.snap.Load(); old != nil && sameBackends(old.all, s.all) {
		s.index = old.index
	} else {
		s.index = make(map[netip.AddrPort]*Backend, len(s.all))
		for _, b := range s.all {
			s.index[b.addr] = b
		}
	}
	s.fill(false)
	if len(s.takes) == 0 && p.set.OnAllDown == TryAll {
		s.anyHealth = true
		s.fill(true)
	}
	s.prepared = p.prepare(s.candids)
	return s
}

// prepare has the balancer look at the candidates, if it wants to. One that
// panics is asked without.
func (p *Pool) prepare(c []balancer.Candidate) (prepared balancer.Prepared) {
	b, ok := p.balancer.(balancer.Preparer)
	if !ok || len(c) == 0 {
		return nil
	}
	defer func() {
		if v := recover(); v != nil {
			p.log.Error("a balancer panicked", zap.Any("panic", v), zap.Stack("stack"))
			prepared = nil
		}
	}()
	return b.Prepare(c)
}

// sameBackends reports whether two lists are one, which is never changed.
func sameBackends(a, b []*Backend) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// fill lists the backends that take flows. Those of a higher priority number do
// not while one of a lower number does; when all are down and tried all the
// same, all are.
func (s *snapshot) fill(anyHealth bool) {
	lowest, n := uint32(math.MaxUint32), 0
	for _, b := range s.all {
		switch p := b.priority.Load(); {
		case !b.takes(anyHealth) || !anyHealth && p > lowest:
		case anyHealth || p == lowest:
			n++
		default:
			lowest, n = p, 1
		}
	}
	if n == 0 {
		return
	}
	s.priority = lowest
	s.takes, s.candids = make([]*Backend, 0, n), make([]balancer.Candidate, 0, n)
	for _, b := range s.all {
		if b.takes(anyHealth) && (anyHealth || b.priority.Load() == lowest) {
			s.takes = append(s.takes, b)
			s.candids = append(s.candids, balancer.Candidate(b))
		}
	}
}

func healthTargets(backends []*Backend) []health.Target {
	list := make([]health.Target, len(backends))
	for i, b := range backends {
		list[i] = b
	}
	return list
}
