package quicinitial

import (
	"crypto/sha256"
	"encoding"
	"hash"
)

// mac is a key of HMAC-SHA256 as the states of its two hashes once they have
// taken the key in, so that each message costs no more than its own blocks.
type mac struct{ inner, outer []byte }

// hasher computes with such keys and allocates nothing once each has been set.
type hasher struct {
	sha   hash.Hash
	state state // of sha
	block [sha256.BlockSize]byte
	out   [sha256.Size]byte
}

type state interface {
	encoding.BinaryAppender
	encoding.BinaryUnmarshaler
}

func newHasher() *hasher {
	sha := sha256.New()
	return &hasher{sha: sha, state: sha.(state)}
}

// setKey makes m that of a key of at most a block.
func (h *hasher) setKey(m *mac, key []byte) {
	clear(h.block[copy(h.block[:], key):])
	m.inner = h.pad(m.inner, 0x36)
	m.outer = h.pad(m.outer, 0x36^0x5c)
}

// pad takes the block in, changed by x, and appends the state to dst[:0]. An
// error there is none: the hash is one that can do it.
func (h *hasher) pad(dst []byte, x byte) []byte {
	for i := range h.block {
		h.block[i] ^= x
	}
	h.sha.Reset()
	h.sha.Write(h.block[:])
	dst, _ = h.state.AppendBinary(dst[:0])
	return dst
}

// sum is the HMAC of a message, until the next call.
func (h *hasher) sum(m *mac, msg []byte) []byte {
	_ = h.state.UnmarshalBinary(m.inner)
	h.sha.Write(msg)
	inner := h.sha.Sum(h.out[:0])
	_ = h.state.UnmarshalBinary(m.outer)
	h.sha.Write(inner)
	return h.sha.Sum(h.out[:0])
}
