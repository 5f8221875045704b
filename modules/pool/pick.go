package pool

import (
	"math"
	"net/netip"
	"slices"
	"sync"

	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
)

// The choice of a backend:
//
//	Pick → balancer.Pick over the snapshot → reserve
//
// It runs in the goroutine of every new flow, takes no lock and allocates
// nothing. Only when the first choice cannot be had, or backends were tried
// before, the slow path builds a list of its own, in memory that is used again.

// Pick chooses a backend for a flow that none of tried could serve, and takes a
// place at it, which the caller gives back with Release. The backend is nil
// unless the result is OK.
func (p *Pool) Pick(f balancer.Flow, tried []netip.AddrPort) (*Backend, Result) {
	b, r := p.pick(f, tried)
	p.counts[r].Add(1)
	return b, r
}

func (p *Pool) pick(f balancer.Flow, tried []netip.AddrPort) (*Backend, Result) {
	s := p.snap.Load()
	if s == nil {
		return nil, NoBackend
	}
	if len(tried) == 0 && len(s.takes) > 0 {
		// The snapshot may be older than what the backend says of itself.
		if b := s.takes[p.first(s, f)]; b.takes(s.anyHealth) && b.reserve(&p.set) {
			return b, OK
		}
	}
	return p.pickSlow(s, f, tried)
}

// Taking are the backends that Pick chooses from now, in the order of the config.
// They must not be changed.
func (p *Pool) Taking() []*Backend {
	if s := p.snap.Load(); s != nil {
		return s.takes
	}
	return nil
}

// PickAddr takes a place at the backend of that address, if the pool has it
// and it takes flows; else the result is NoBackend or AtCapacity and nothing is
// counted, for the caller goes on to Pick.
func (p *Pool) PickAddr(addr netip.AddrPort) (*Backend, Result) {
	s := p.snap.Load()
	if s == nil {
		return nil, NoBackend
	}
	b := s.index[addr]
	if b == nil || !b.takes(s.anyHealth) {
		return nil, NoBackend
	}
	if !b.reserve(&p.set) {
		return nil, AtCapacity
	}
	p.counts[OK].Add(1)
	return b, OK
}

// Has reports whether the pool has a backend of that address.
func (p *Pool) Has(addr netip.AddrPort) bool {
	s := p.snap.Load()
	return s != nil && s.index[addr] != nil
}

// first is the choice from the snapshot.
func (p *Pool) first(s *snapshot, f balancer.Flow) int {
	if s.prepared == nil {
		return p.choose(s.candids, f)
	}
	if i := s.prepared.Pick(f); i >= 0 && i < len(s.takes) {
		return i
	}
	return 0
}

// choose asks the balancer; an index that does not exist is the first.
func (p *Pool) choose(c []balancer.Candidate, f balancer.Flow) int {
	if i := p.balancer.Pick(c, f); i >= 0 && i < len(c) {
		return i
	}
	return 0
}

// tryAll reports whether backends that are down are tried all the same.
func (p *Pool) tryAll(s *snapshot) bool {
	return p.set.OnAllDown == TryAll && !slices.ContainsFunc(s.all, func(b *Backend) bool { return b.takes(false) })
}

type scratch struct {
	backends []*Backend
	candids  []balancer.Candidate
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

func (p *Pool) pickSlow(s *snapshot, f balancer.Flow, tried []netip.AddrPort) (*Backend, Result) {
	w := scratches.Get().(*scratch)
	defer w.release()
	if !w.collect(p, s, tried) {
		return nil, NoBackend
	}
	w.onlyRoom(p)
	for len(w.backends) > 0 {
		i := p.choose(w.candids, f)
		if b := w.backends[i]; b.reserve(&p.set) {
			return b, OK
		}
		// Another flow was faster.
		w.backends = slices.Delete(w.backends, i, i+1)
		w.candids = slices.Delete(w.candids, i, i+1)
	}
	return nil, AtCapacity
}

// collect lists the backends that a flow may be given as far as their state is
// concerned, and reports whether there are any: of the lowest priority of which
// one takes flows and was not tried.
func (w *scratch) collect(p *Pool, s *snapshot, tried []netip.AddrPort) bool {
	anyHealth := p.tryAll(s)
	lowest := uint32(math.MaxUint32)
	for _, b := range s.all {
		if !b.takes(anyHealth) || slices.Contains(tried, b.addr) {
			continue
		}
		if at := b.priority.Load(); !anyHealth && at != lowest {
			if at > lowest {
				continue
			}
			lowest = at
			w.backends, w.candids = w.backends[:0], w.candids[:0]
		}
		w.backends, w.candids = append(w.backends, b), append(w.candids, b)
	}
	return len(w.backends) > 0
}

// onlyRoom takes those out that are at a limit.
func (w *scratch) onlyRoom(p *Pool) {
	n := 0
	for i, b := range w.backends {
		if b.room(&p.set) {
			w.backends[n], w.candids[n] = b, w.candids[i]
			n++
		}
	}
	clear(w.backends[n:])
	clear(w.candids[n:])
	w.backends, w.candids = w.backends[:n], w.candids[:n]
}

func (w *scratch) release() {
	clear(w.backends[:cap(w.backends)])
	clear(w.candids[:cap(w.candids)])
	w.backends, w.candids = w.backends[:0], w.candids[:0]
	scratches.Put(w)
}
