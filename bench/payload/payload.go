// Package payload makes and checks what the benchmark sends: messages of a
// fixed size that carry their session, number, time and checksum, and a
// pattern for bulk streams in which every byte depends on its position.
package payload

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"time"
)

// MinSize is the size of the smallest message.
const MinSize = headLen + sumLen

const (
	magic   = 0x9e77a11e // its first byte on the wire is 0x1e: the backend's echo mode
	headLen = 4 + 4 + 8 + 8
	sumLen  = 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// What may be wrong with a message.
var (
	ErrSize  = errors.New("message of the wrong size")
	ErrMagic = errors.New("not a message of the benchmark")
	ErrSum   = errors.New("checksum does not match")
)

// Put writes the message seq of session into all of b, which is at least
// MinSize long. The bytes between head and checksum stay as they are.
func Put(b []byte, session uint32, seq uint64, sent time.Duration) {
	binary.LittleEndian.PutUint32(b, magic)
	binary.LittleEndian.PutUint32(b[4:], session)
	binary.LittleEndian.PutUint64(b[8:], seq)
	binary.LittleEndian.PutUint64(b[16:], uint64(sent))
	end := len(b) - sumLen
	binary.LittleEndian.PutUint32(b[end:], crc32.Checksum(b[:end], castagnoli))
}

// Parse checks a message that ought to have size bytes and returns what Put
// had been given.
func Parse(b []byte, size int) (session uint32, seq uint64, sent time.Duration, err error) {
	if len(b) != size || size < MinSize {
		return 0, 0, 0, ErrSize
	}
	if binary.LittleEndian.Uint32(b) != magic {
		return 0, 0, 0, ErrMagic
	}
	end := len(b) - sumLen
	if binary.LittleEndian.Uint32(b[end:]) != crc32.Checksum(b[:end], castagnoli) {
		return 0, 0, 0, ErrSum
	}
	return binary.LittleEndian.Uint32(b[4:]), binary.LittleEndian.Uint64(b[8:]),
		time.Duration(binary.LittleEndian.Uint64(b[16:])), nil
}

// Verdict is what a Tracker says of a message's number.
type Verdict uint8

// The verdicts.
const (
	Fresh     Verdict = iota // the highest number so far
	Reordered                // lower than one that came before, but the first of its number
	Duplicate                // a number that has been before, or is too old to tell
)

const window = 256 // numbers below the highest that are told apart

// Tracker remembers which numbers of each session have arrived. Numbers of a
// session begin at 1.
type Tracker struct{ sessions []seen }

type seen struct {
	highest uint64
	bits    [window / 64]uint64 // bit n%window: n has arrived, for the window below highest
}

// NewTracker makes a Tracker for sessions 0 to n-1.
func NewTracker(n int) *Tracker { return &Tracker{make([]seen, n)} }

// Take records the number seq of session, which is below the Tracker's n.
func (t *Tracker) Take(session uint32, seq uint64) Verdict {
	s := &t.sessions[session]
	word, bit := &s.bits[seq%window/64], uint64(1)<<(seq%64)
	switch {
	case seq > s.highest:
		for n := max(s.highest+1, seq-min(seq, window-1)); n < seq; n++ {
			s.bits[n%window/64] &^= 1 << (n % 64)
		}
		s.highest = seq
		*word |= bit
		return Fresh
	case seq == 0 || s.highest-seq >= window || *word&bit != 0:
		return Duplicate
	}
	*word |= bit
	return Reordered
}

// MaxChunk is the longest piece of a Pattern.
const MaxChunk = 256 << 10

const period = 65521 // prime, so that no power-of-two shift goes unseen

// Pattern is the content of bulk streams.
type Pattern struct{ buf []byte }

// NewPattern makes the pattern, which is the same in every process.
func NewPattern() *Pattern {
	p := &Pattern{make([]byte, period+MaxChunk)}
	x := uint32(2463534242)
	for i := range period {
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		p.buf[i] = byte(x >> 16)
	}
	for i := period; i < len(p.buf); i++ {
		p.buf[i] = p.buf[i-period]
	}
	return p
}

// At is n bytes, at most MaxChunk, of a stream from offset off. The caller
// does not change them.
func (p *Pattern) At(stream uint32, off uint64, n int) []byte {
	i := (off + uint64(stream)*7919) % period
	return p.buf[i:][:n]
}

// Match reports whether b, at most MaxChunk long, is the stream's content from
// offset off.
func (p *Pattern) Match(stream uint32, off uint64, b []byte) bool {
	return bytes.Equal(b, p.At(stream, off, len(b)))
}
