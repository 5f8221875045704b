package pool

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/modules/intent"
)

// What operators want of backends: the set of a pool is that of the config,
// with the backends they have added and without those they have removed, and
// each has the state they have given it.

// Origin is who names a backend.
type Origin uint32

// The origins. A backend of the config, or of its source, that operators have
// added too is the config's, with the operators' weight.
const (
	FromConfig Origin = iota
	FromSource
	FromOverlay
)

func (o Origin) String() string { return [...]string{"config", "source", "overlay"}[o] }

func init() {
	// Whoever changes something waits until it holds.
	intent.Process.Watch(func(pool string) {
		for _, p := range running(pool) {
			p.overlayChanged()
		}
	})
}

// overlayChanged returns when the pool is what operators want it to be.
func (p *Pool) overlayChanged() {
	done := make(chan struct{})
	select {
	case p.overlaid <- done:
		select {
		case <-done:
		case <-p.ended:
		}
	case <-p.ended:
	}
}

// overlaid are the backends that the pool is to have: those that the config or
// the source names, without those that operators have removed, and those that
// they have added, by address. These are as much preferred as the most preferred
// of the others.
func overlaid(named []member, o intent.Overlay) (list []member, hidden []netip.AddrPort) {
	if len(o) == 0 {
		return named, nil
	}
	seen := make(map[netip.AddrPort]bool, len(named))
	priority := uint16(0)
	for i, m := range named {
		seen[m.addr] = true
		if i == 0 || m.priority < priority {
			priority = m.priority
		}
		b := o[m.addr]
		if b.IsRemoved() {
			hidden = append(hidden, m.addr)
			continue
		}
		if b.Weight > 0 {
			m.weight = b.Weight
		}
		list = append(list, m)
	}
	for _, a := range slices.SortedFunc(maps.Keys(o), netip.AddrPort.Compare) {
		if b := o[a]; b.Weight > 0 && !seen[a] {
			list = append(list, member{addr: a, weight: b.Weight, priority: priority, origin: FromOverlay})
		}
	}
	return list, hidden
}

// applyState gives a backend the state that operators want.
func (p *Pool) applyState(b *Backend, o intent.Overlay) {
	if b.want(o[b.addr]) {
		p.tellReturned(b.addr)
	}
}

// Errors of changes.
var (
	ErrNoPool  = errors.New("no such pool")
	ErrThere   = errors.New("the pool has this backend already")
	ErrUnknown = errors.New("the pool has no such backend")
)

// Add adds a backend to the running pool of a name. A weight of 0 is 1, or what
// the config says of a backend that operators have removed.
func Add(pool string, addr netip.AddrPort, weight uint32, by intent.By) error {
	return intent.Process.Change(pool, addr, func(b intent.Backend) (intent.Backend, error) {
		named, there, err := stands(pool, addr, b)
		if there {
			err = ErrThere
		}
		if err != nil {
			return b, err
		}
		if named && weight == 0 {
			return intent.Backend{}, nil
		}
		return intent.Backend{Weight: max(weight, 1), Added: by}, nil
	})
}

// Remove removes a backend from the running pool of a name.
func Remove(pool string, addr netip.AddrPort, by intent.By) error {
	return intent.Process.Change(pool, addr, func(b intent.Backend) (intent.Backend, error) {
		named, there, err := stands(pool, addr, b)
		switch {
		case err != nil:
			return b, err
		case !there:
			return b, ErrUnknown
		case named:
			return intent.Backend{Removed: by}, nil
		}
		return intent.Backend{}, nil
	})
}

// SetState changes what the operator wants of a backend of the running pool of
// a name. One that is in the state already stays in it since then.
func SetState(pool string, addr netip.AddrPort, s State, by intent.By) error {
	return intent.Process.Change(pool, addr, func(b intent.Backend) (intent.Backend, error) {
		_, there, err := stands(pool, addr, b)
		switch {
		case err != nil:
			return b, err
		case !there:
			return b, ErrUnknown
		case s == b.State:
			return b, nil
		}
		b.State, b.Since = s, by
		if s == Enabled {
			b.Since = intent.By{}
		}
		return b, nil
	})
}

// stands tells how a backend stands in the running pool: whether the config or a
// source names it, and whether it is there, with what operators want of it.
func stands(pool string, addr netip.AddrPort, b intent.Backend) (named, there bool, err error) {
	p := Running(pool)
	if p == nil {
		return false, false, ErrNoPool
	}
	s := p.snap.Load()
	has := s.index[addr]
	named = has != nil && has.Origin() != FromOverlay || slices.Contains(s.hidden, addr)
	return named, b.Weight > 0 || named && !b.IsRemoved(), nil
}

// ParseAddr reads the address of a backend, ip:port. IPv4-mapped ones become
// IPv4.
func ParseAddr(s string) (netip.AddrPort, error) {
	t, err := hostport.Parse(s)
	switch {
	case err != nil:
		return netip.AddrPort{}, err
	case t.Host != "":
		return netip.AddrPort{}, fmt.Errorf("%q is not an IP address and a port: host names are for the config", s)
	}
	return t.Addr, nil
}

// wanted is what the operator wants of a backend, and since when.
type wanted struct {
	state State
	since time.Time
	seen  time.Time // by this process
	ended bool      // since the deadline has passed, the flows have been dealt with
}

// want takes over what the operator wants. It reports whether flows that were
// being ended are to be left.
func (b *Backend) want(o intent.Backend) (left bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	w := &b.wanted
	if o.State == w.state && o.Since.At.Equal(w.since) {
		return false
	}
	left = w.ended
	*w = wanted{state: o.State, since: o.Since.At, seen: time.Now()}
	b.state.Store(uint32(o.State))
	return left
}

// drainDue reports whether the deadline has passed of a backend that an operator
// drains, or else when that will be: zero for not at all. It says so once.
func (b *Backend) drainDue(now time.Time, deadline time.Duration) (due bool, at time.Time) {
	if deadline == 0 || b.State() != Draining {
		return false, time.Time{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.wanted.ended {
		return false, time.Time{}
	}
	if left := b.drainLeftLocked(now, deadline); left > 0 {
		return false, now.Add(left)
	}
	b.wanted.ended = true
	return true, time.Time{}
}

// drainLeft is how much is left of a deadline that has begun when the operator
// began to drain the backend, or begins now.
func (b *Backend) drainLeft(now time.Time, deadline time.Duration) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.drainLeftLocked(now, deadline)
}

func (b *Backend) drainLeftLocked(now time.Time, deadline time.Duration) time.Duration {
	w := &b.wanted
	if w.state != Draining {
		return deadline
	}
	// The wall clock of an earlier process may have been another one.
	begun := max(now.Sub(w.since), now.Sub(w.seen))
	return max(deadline-begun, 0)
}
