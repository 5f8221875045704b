package tcprelay

import "math/bits"

// wheel is a timing wheel over the slots of a slab. An entry may fire early
// (its deadline lay beyond the wheel, or activity has moved it since), never
// late by more than a tick: whoever pops one looks at the real deadline and
// puts it back. So activity costs a store and no move. The wheel knows its
// next bucket in use, so that an idle worker does not tick.
type wheel struct {
	id    uint16 // of this wheel in conn.bucket, a multiple of buckets
	tick  int64  // nanoseconds
	early bool   // round down: another, finer wheel does the rest
	at    int64  // every bucket up to this tick is empty
	heads [buckets]ref
	used  [buckets / 64]uint64
}

const (
	buckets = 512
	never   = int64(1<<63 - 1)
)

// ref is a slot and one, so that the zero ref is none.
type ref uint32

// add puts a connection in the bucket of deadline. It must be in no wheel.
func (wh *wheel) add(s *slab, slot uint32, deadline int64) {
	t := deadline / wh.tick
	if !wh.early {
		t++
	}
	t = min(max(t, wh.at+1), wh.at+buckets-1)
	b := uint16(t % buckets)
	c := s.at(slot)
	c.bucket = wh.id + b + 1
	c.prev, c.next = 0, wh.heads[b]
	if c.next != 0 {
		s.at(uint32(c.next - 1)).prev = ref(slot + 1)
	}
	wh.heads[b] = ref(slot + 1)
	wh.used[b/64] |= 1 << (b % 64)
}

// remove takes a connection out.
func (wh *wheel) remove(s *slab, slot uint32) {
	c := s.at(slot)
	b := c.bucket - 1 - wh.id
	if c.prev != 0 {
		s.at(uint32(c.prev - 1)).next = c.next
	} else if wh.heads[b] = c.next; c.next == 0 {
		wh.used[b/64] &^= 1 << (b % 64)
	}
	if c.next != 0 {
		s.at(uint32(c.next - 1)).prev = c.prev
	}
	c.bucket, c.prev, c.next = 0, 0, 0
}

// next is the time at which the first bucket in use is due.
func (wh *wheel) next() int64 {
	from := int((wh.at + 1) % buckets)
	for i := range len(wh.used) + 1 {
		word := (from/64 + i) % len(wh.used)
		u := wh.used[word]
		if i == 0 {
			u &= ^uint64(0) << (from % 64)
		} else if i == len(wh.used) {
			u &= 1<<(from%64) - 1
		}
		if u != 0 {
			b := word*64 + bits.TrailingZeros64(u)
			return (wh.at + 1 + int64((b-from+buckets)%buckets)) * wh.tick
		}
	}
	return never
}

// pop takes out one connection that is due.
func (wh *wheel) pop(s *slab, now int64) (slot uint32, ok bool) {
	t := wh.next()
	if t > now {
		wh.at = max(wh.at, now/wh.tick)
		return 0, false
	}
	wh.at = t/wh.tick - 1
	slot = uint32(wh.heads[t/wh.tick%buckets] - 1)
	wh.remove(s, slot)
	return slot, true
}
