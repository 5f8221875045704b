package wasm

import (
	"encoding/binary"
	"unicode/utf8"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// Bits of the first byte of a hint. The others are ignored.
const (
	hintReject = 1 << iota
	hintHost
	hintKey
)

// decode reads a routing hint from a guest's memory and copies what is in it.
// It reports false, and leaves h in any state, when the hint is cut short or a
// string is not UTF-8.
func decode(b []byte, h *sniff.Hint) bool {
	if len(b) == 0 {
		return false
	}
	flags, b := b[0], b[1:]
	var host, key []byte
	ok := true
	if flags&hintHost != 0 {
		host, b, ok = text(b)
	}
	if ok && flags&hintKey != 0 {
		key, _, ok = text(b)
	}
	if !ok {
		return false
	}
	h.Reject = flags&hintReject != 0
	if flags&hintHost != 0 {
		h.SetHost(host)
	}
	if flags&hintKey != 0 {
		h.Key, h.HasKey = append(h.Key[:0], key...), true
	}
	return true
}

// text takes a string with its length off the front of b.
func text(b []byte) (s, rest []byte, ok bool) {
	if len(b) < 2 {
		return nil, nil, false
	}
	n := int(binary.LittleEndian.Uint16(b))
	if b = b[2:]; n > len(b) || !utf8.Valid(b[:n]) {
		return nil, nil, false
	}
	return b[:n], b[n:], true
}
