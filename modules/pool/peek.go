package pool

import (
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
)

// Peek is Pick for a flow that nobody has sent: it takes no place, counts
// nothing and leaves the balancer's turns alone. known is false when the
// balancer cannot tell what it will choose; then the backend is nil.
func (p *Pool) Peek(f balancer.Flow) (b *Backend, r Result, known bool) {
	s := p.snap.Load()
	if s == nil {
		return nil, NoBackend, true
	}
	var w scratch
	if !w.collect(p, s, nil) {
		return nil, NoBackend, true
	}
	peeker, ok := p.balancer.(balancer.Peeker)
	if !ok {
		only := len(w.backends) == 1
		w.onlyRoom(p)
		switch {
		case len(w.backends) == 0:
			return nil, AtCapacity, true
		case only:
			return w.backends[0], OK, true
		}
		return nil, OK, false
	}
	// The first choice is from the snapshot, and one that has no room is made
	// again from those that have.
	for next := 0; next < 2 && len(w.backends) > 0; next++ {
		i := peeker.Peek(w.candids, f, next)
		if i < 0 || i >= len(w.backends) {
			i = 0 // as Pick does
		}
		if w.backends[i].room(&p.set) {
			return w.backends[i], OK, true
		}
		w.onlyRoom(p)
	}
	return nil, AtCapacity, true
}

// Takes reports whether a backend of the pool is among those that are chosen
// from, and whether it has room for one more flow.
func (p *Pool) Takes(b *Backend) (candidate, room bool) {
	s := p.snap.Load()
	if s == nil {
		return false, false
	}
	if p.tryAll(s) {
		return b.takes(true), b.room(&p.set)
	}
	return b.takes(false) && b.priority.Load() <= s.priority, b.room(&p.set)
}
