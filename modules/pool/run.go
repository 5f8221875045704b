package pool

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/health"
)

// Start resolves host names, for at most a second, and from then on keeps the
// set of backends, and runs the checks. A name that has no answer by then
// contributes its addresses later.
func (p *Pool) Start() error {
	ctx, cancel := context.WithCancel(context.Background())
	p.cancel = cancel
	p.answers = make(chan answer)
	p.follow(ctx)
	p.members()
	p.snap.Store(p.build())
	if _, none := p.check.(*health.None); !none {
		p.runner = &health.Runner{Name: p.name, Check: p.check}
		p.runner.Start(healthTargets(p.snap.Load().all))
	}
	register(p)
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
	for _, b := range mine {
		if !slices.Contains(theirs, b) {
			removed(p, b.addr)
		}
	}
}

// run keeps the snapshot true, and says what becomes of flows.
func (p *Pool) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case a := <-p.answers:
			p.answered(a)
			gone := p.members()
			p.snap.Store(p.build())
			if p.runner != nil {
				p.runner.Set(healthTargets(p.snap.Load().all))
			}
			for _, b := range gone {
				if newest(p.name) == p { // an older one is compared when it stops
					removed(p, b.addr)
				}
				b.give()
			}
		case <-p.wake:
		case <-timer.C:
		}
		timer.Reset(p.act())
	}
}

// act does what is due and returns how long until something else is. Of several
// pools of one name only the newest acts.
func (p *Pool) act() time.Duration {
	const never = time.Hour
	if newest(p.name) != p {
		p.snap.Store(p.build())
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
	}
	p.snap.Store(p.build()) // before flows are moved, which choose from it
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
	}
	if next.IsZero() {
		return never
	}
	return max(time.Until(next), 0)
}

// members brings held up to date with the targets and the names, and returns
// the backends that are no longer members; those are the caller's to give back.
func (p *Pool) members() (gone []*Backend) {
	old := p.Backends()
	wanted := p.addresses()
	for _, m := range wanted {
		if b := p.held[m.addr]; b != nil && slices.Contains(old, b) {
			continue
		}
		if p.held[m.addr] == nil {
			b, err := take(p.name, m.addr, m.weight)
			if err != nil {
				p.log.Error("backend cannot be added", zap.Stringer("upstream", m.addr), zap.Error(err))
				continue
			}
			p.held[m.addr] = b
		}
		p.held[m.addr].join(p, m.weight)
		returned(p.name, m.addr)
	}
	for _, b := range old {
		if !slices.ContainsFunc(wanted, func(m member) bool { return m.addr == b.addr }) {
			delete(p.held, b.addr)
			b.leave(p)
			gone = append(gone, b)
		}
	}
	return gone
}

type member struct {
	addr   netip.AddrPort
	weight uint32
}

// addresses are the backends that the pool is to have now, in the order of the
// config, each once.
func (p *Pool) addresses() []member {
	var list []member
	seen := make(map[netip.AddrPort]bool)
	add := func(a netip.AddrPort, t hostport.Target) {
		if !seen[a] {
			seen[a] = true
			list = append(list, member{a, p.weight(t)})
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
	s := &snapshot{names: p.names}
	for _, m := range p.addresses() {
		if b := p.held[m.addr]; b != nil {
			s.all = append(s.all, b)
		}
	}
	s.fill(false)
	if len(s.takes) == 0 && p.set.OnAllDown == TryAll {
		s.anyHealth = true
		s.fill(true)
	}
	return s
}

func (s *snapshot) fill(anyHealth bool) {
	for _, b := range s.all {
		if b.takes(anyHealth) {
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
