package balancer

import (
	"math"
	"math/bits"
)

// How consistent_hash chooses. There are 262,144 places. A backend has two of
// them, by its address. Every client has an order of its own of all places, and
// its backend is the one that has the first place with somebody in it. So a
// backend that joins takes only those clients that meet it before the one they
// had, one that leaves gives away only its own, and nothing depends on who else
// there is, on their order, or on what was before.
//
// The order is a permutation that runs both ways. Of few backends it tells how
// early each place comes; among many it is walked from the start until a place
// has somebody. With m places taken that is about min(m, places/m) steps, some
// seven hundred at the most, and both ways find the same.
const (
	placeBits = 18
	places    = 1 << placeBits
	half      = placeBits / 2
	halfMask  = 1<<half - 1
)

// order is a client's: a Feistel network of four rounds.
type order [4]uint64

func orderOf(client uint64) (o order) {
	for i := range o {
		o[i] = mix(client^seedScore, odd+uint64(i)<<1)
	}
	return o
}

// rank is how many places come before this one.
func (o *order) rank(place uint32) uint32 {
	l, r := uint64(place>>half), uint64(place&halfMask)
	l ^= (r ^ o[0]) * odd >> (64 - half)
	r ^= (l ^ o[1]) * odd >> (64 - half)
	l ^= (r ^ o[2]) * odd >> (64 - half)
	r ^= (l ^ o[3]) * odd >> (64 - half)
	return uint32(l<<half | r)
}

// place is the one of that rank.
func (o *order) place(rank uint32) uint32 {
	l, r := uint64(rank>>half), uint64(rank&halfMask)
	r ^= (l ^ o[3]) * odd >> (64 - half)
	l ^= (r ^ o[2]) * odd >> (64 - half)
	r ^= (l ^ o[1]) * odd >> (64 - half)
	l ^= (r ^ o[0]) * odd >> (64 - half)
	return uint32(l<<half | r)
}

// placesOf are the two places of a backend, which are never one.
func placesOf(backend uint64) [2]uint32 {
	first := uint32(backend) % places
	return [2]uint32{first, (first + 1 + uint32(backend>>32)%(places-1)) % places}
}

// search is the search for the first place of one client.
type search struct {
	order  order
	client uint64
	even   bool // all weights are one

	at   int     // the best so far, -1 for none
	wait float64 // and how long the client takes to come to it
	tie  uint64
}

// meet compares a backend that is at a place of that rank. A backend of twice
// the weight is come to in half the time, which is stretched so that the chance
// to be the first is in proportion to the weight. Two that share a place, and
// weigh the same, share its clients.
func (s *search) meet(i int, rank uint32, weight uint32, backend uint64) {
	wait := float64(rank)
	if !s.even {
		wait = -math.Log1p(-(wait+0.5)/places) / float64(weight)
	}
	if s.at >= 0 && wait > s.wait {
		return
	}
	tie := mix(s.client^seedScore, backend)
	if s.at >= 0 && wait == s.wait && tie <= s.tie {
		return
	}
	s.at, s.wait, s.tie = i, wait, tie
}

// reach is the rank from which on no backend of at most that weight is better
// than the best so far.
func (s *search) reach(weight uint32) uint32 {
	switch {
	case s.at < 0:
		return places
	case s.even:
		return uint32(s.wait) + 1
	}
	r := -math.Expm1(-s.wait*float64(weight))*places + 2 // not to depend on how it is rounded
	return uint32(min(r, places))
}

// class is the backends whose weights are alike: none is twice as heavy as
// another.
type class struct {
	heaviest uint32
	members  []member

	// Only where they are many: which places have somebody, how many do before
	// each word of these bits, and who. Those who share a place follow next.
	taken  []uint64
	before []uint32
	first  []seat
	next   []seat // by seat
}

// member is a backend as it is compared.
type member struct {
	at      int // where it is in the list
	weight  uint32
	backend uint64
	places  [2]uint32
}

// seat is a place of a member, twice its index and which of the two it is, and
// one more: 0 is none.
type seat uint32

func (s seat) member() int { return int(s-1) >> 1 }

// index prepares a class for a walk, if there are so many that it is shorter.
func (c *class) index() {
	m := 2 * len(c.members)
	if m*m < 2*places {
		return
	}
	c.taken = make([]uint64, places/64)
	for i := range c.members {
		for _, p := range c.members[i].places {
			c.taken[p>>6] |= 1 << (p & 63)
		}
	}
	c.before = make([]uint32, len(c.taken))
	n := uint32(0)
	for i, w := range c.taken {
		c.before[i] = n
		n += uint32(bits.OnesCount64(w))
	}
	c.first, c.next = make([]seat, n), make([]seat, m+1)
	for i := range c.members {
		for k, p := range c.members[i].places {
			s, at := seat(2*i+k+1), c.position(p)
			c.next[s], c.first[at] = c.first[at], s
		}
	}
}

// position is where in first a place that is taken is.
func (c *class) position(place uint32) uint32 {
	w := place >> 6
	return c.before[w] + uint32(bits.OnesCount64(c.taken[w]&(1<<(place&63)-1)))
}

// search looks for a better member than what was found, and returns in how many
// steps.
func (c *class) search(s *search) (steps int) {
	reach := s.reach(c.heaviest)
	if c.taken == nil {
		for i := range c.members {
			m := &c.members[i]
			for _, p := range m.places {
				if rank := s.order.rank(p); rank < reach {
					s.meet(m.at, rank, m.weight, m.backend)
					reach = s.reach(c.heaviest)
				}
			}
		}
		return 2 * len(c.members)
	}
	rank := uint32(0)
	for ; rank < reach; rank++ {
		p := s.order.place(rank)
		if c.taken[p>>6]&(1<<(p&63)) == 0 {
			continue
		}
		for seat := c.first[c.position(p)]; seat != 0; seat = c.next[seat] {
			m := &c.members[seat.member()]
			s.meet(m.at, rank, m.weight, m.backend)
		}
		reach = s.reach(c.heaviest)
	}
	return int(rank)
}
