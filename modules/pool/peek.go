package pool

import (
	"slices"

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
	var takes []*Backend
	var candids []balancer.Candidate
	anyHealth := p.tryAll(s)
	for _, b := range s.all {
		if b.takes(anyHealth) {
			takes, candids = append(takes, b), append(candids, b)
		}
	}
	result := NoBackend
	peeker, ok := p.balancer.(balancer.Peeker)
	for next := 0; len(takes) > 0; next++ {
		if !ok {
			free := slices.ContainsFunc(takes, func(b *Backend) bool { return b.room(&p.set) })
			if !free {
				return nil, AtCapacity, true
			}
			if len(takes) > 1 {
				return nil, OK, false
			}
			return takes[0], OK, true
		}
		i := peeker.Peek(candids, f, next)
		if i < 0 || i >= len(takes) {
			i = 0 // as Pick does
		}
		if takes[i].room(&p.set) {
			return takes[i], OK, true
		}
		result = AtCapacity
		if next > 0 { // the first choice is from the snapshot, and is made again
			takes, candids = slices.Delete(takes, i, i+1), slices.Delete(candids, i, i+1)
		}
	}
	return nil, result, true
}

// Takes reports whether a backend of the pool is among those that are chosen
// from, and whether it has room for one more flow.
func (p *Pool) Takes(b *Backend) (candidate, room bool) {
	s := p.snap.Load()
	if s == nil {
		return false, false
	}
	return b.takes(p.tryAll(s)), b.room(&p.set)
}
