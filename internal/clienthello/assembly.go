package clienthello

import "math/bits"

// Assembly puts a hello together from pieces that come in any order, again and
// again, as in QUIC and DTLS. It is large: keep it in a pool.
type Assembly struct {
	// Conflict is set when two pieces disagree about a byte. Servers differ in
	// which they believe, so that such a hello has no name.
	Conflict bool

	b      [MaxLen]byte
	have   [MaxLen / 64]uint64 // a bit for each byte
	extent int                 // there is nothing at or behind it
}

// Reset empties the assembly.
func (a *Assembly) Reset() {
	clear(a.have[:(a.extent+63)/64])
	a.extent, a.Conflict = 0, false
}

// Put adds a piece, and reports whether it lies within MaxLen.
func (a *Assembly) Put(offset int, piece []byte) bool {
	if offset < 0 || offset > MaxLen-len(piece) {
		return false
	}
	a.extent = max(a.extent, offset+len(piece))
	for len(piece) > 0 {
		low := offset % 64
		n := min(64-low, len(piece))
		word := &a.have[offset/64]
		mask := ^uint64(0) >> (64 - n) << low
		if *word&mask == 0 {
			copy(a.b[offset:], piece[:n])
		} else {
			a.merge(offset, piece[:n], *word>>low)
		}
		*word |= mask
		offset, piece = offset+n, piece[n:]
	}
	return true
}

// merge stores those bytes whose bit in have is not set.
func (a *Assembly) merge(offset int, piece []byte, have uint64) {
	for i, c := range piece {
		if have>>i&1 == 0 {
			a.b[offset+i] = c
		} else if a.b[offset+i] != c {
			a.Conflict = true
		}
	}
}

// Bytes is what is there from the beginning without a gap, until Reset.
func (a *Assembly) Bytes() []byte {
	for i, w := range a.have[:(a.extent+63)/64] {
		if w != ^uint64(0) {
			return a.b[:64*i+bits.TrailingZeros64(^w)]
		}
	}
	return a.b[:a.extent]
}
