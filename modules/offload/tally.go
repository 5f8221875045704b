package offload

import (
	"hash/maphash"
	"net/netip"
	"sync/atomic"
)

// What the engines' workers touch. Nothing here allocates, takes a lock or
// waits: a worker tells what it has refused and admitted, and goes on.

// source is a client's address, or its network, as limits count them.
type source struct {
	addr netip.Addr // plain, of a network the first
	kind int
}

// sourceOf is the source of that kind that an address belongs to.
func sourceOf(a netip.Addr, kind int) source {
	if kind == aNet {
		bits := 24
		if !a.Is4() {
			bits = 64
		}
		p, _ := a.Prefix(bits)
		a = p.Addr()
	}
	return source{a, kind}
}

var hashSeed = maphash.MakeSeed()

func hashOf(id int, s source) uint64 {
	b := s.addr.As16()
	h := maphash.Bytes(hashSeed, b[:])
	h ^= uint64(id)<<1 ^ uint64(s.kind)
	return h * 0x9e3779b97f4a7c15
}

// tally counts refusals by source within a second. It is a sketch: two sources
// in one place push each other out, so that what it has of one may be too little
// but never more than its own.
type tally struct {
	places [tallySize]atomic.Uint64 // 32 bits of the hash, 16 of the second, 16 of the count
}

const tallySize = 1 << 16

// hit counts a refusal, and reports whether it is the one that makes n in this
// second.
func (t *tally) hit(hash uint64, second uint16, n uint16) bool {
	p := &t.places[hash%tallySize]
	was := p.Load()
	head := hash&^(1<<32-1) | uint64(second)<<16
	count := uint64(1)
	if was&^(1<<16-1) == head {
		count = min(was&(1<<16-1)+1, 1<<16-1)
	}
	// One that two workers count at once may be lost.
	return p.CompareAndSwap(was, head|count) && count == uint64(n)
}

// marks remember which sources are blocked, and for how long, so that a
// session of one that is admitted all the same is told of. Sources may share a
// mark, and then too much is told.
type marks struct {
	until [markSize]atomic.Uint32 // seconds
	any   atomic.Uint32           // the latest of them
}

const markSize = 1 << 16

func (m *marks) set(hash uint64, until uint32) {
	raise(&m.until[hash%markSize], until)
	raise(&m.any, until)
}

func raise(u *atomic.Uint32, to uint32) {
	for was := u.Load(); was < to && !u.CompareAndSwap(was, to); was = u.Load() {
	}
}

func (m *marks) has(hash uint64, now uint32) bool { return m.until[hash%markSize].Load() >= now }

// ring takes events from many workers to one goroutine, as many as fit.
type ring struct {
	cells [ringSize]cell
	head  atomic.Uint64
	_     [56]byte
	tail  uint64 // the goroutine's
}

const ringSize = 1 << 13

type cell struct {
	turn atomic.Uint64 // position+1 when it can be taken; position+ringSize when it can be filled again
	e    event
}

// event is something a worker has to tell.
type event struct {
	id       int
	kind     uint8 // anIP and aNet: refused once too often; admitted
	client   netip.AddrPort
	admitted bool
}

// push reports whether there was room.
func (r *ring) push(e event) bool {
	for {
		pos := r.head.Load()
		c := &r.cells[pos%ringSize]
		turn := c.turn.Load()
		if pos >= ringSize && turn != pos || pos < ringSize && turn != 0 {
			if r.head.Load() != pos {
				continue // another worker was faster
			}
			return false
		}
		if r.head.CompareAndSwap(pos, pos+1) {
			c.e = e
			c.turn.Store(pos + 1 | filled)
			return true
		}
	}
}

// filled marks a turn whose event can be taken.
const filled = 1 << 63

// pop takes the oldest event.
func (r *ring) pop() (event, bool) {
	c := &r.cells[r.tail%ringSize]
	if c.turn.Load() != r.tail+1|filled {
		return event{}, false
	}
	e := c.e
	c.turn.Store(r.tail + ringSize)
	r.tail++
	return e, true
}

// ready reports whether pop would find an event.
func (r *ring) ready() bool { return r.cells[r.tail%ringSize].turn.Load() == r.tail+1|filled }
