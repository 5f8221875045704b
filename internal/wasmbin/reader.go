package wasmbin

import (
	"errors"
	"unicode/utf8"
)

var (
	errShort  = errors.New("cut short")
	errNumber = errors.New("malformed number")
	errUTF8   = errors.New("name is not UTF-8")
)

// reader takes values off the front of bytes. After the first failure it
// stands still and yields zeros, so that the error is looked at once, at the
// end of a step; loops also stop at it.
type reader struct {
	b   []byte
	off int
	err error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

func (r *reader) left() int { return len(r.b) - r.off }

func (r *reader) byte() byte {
	if r.err != nil || r.off >= len(r.b) {
		r.fail(errShort)
		return 0
	}
	r.off++
	return r.b[r.off-1]
}

func (r *reader) bytes(n int) []byte {
	if r.err != nil || n > r.left() {
		r.fail(errShort)
		return nil
	}
	r.off += n
	return r.b[r.off-n : r.off : r.off]
}

// u32 reads an unsigned number of at most 32 bits.
func (r *reader) u32() uint32 {
	var v uint32
	for shift := 0; shift < 35; shift += 7 {
		c := r.byte()
		if shift == 28 && c > 0x0f {
			break
		}
		v |= uint32(c&0x7f) << shift
		if c < 0x80 {
			return v
		}
	}
	r.fail(errNumber)
	return 0
}

// signed reads a signed number of at most 32, 33 or 64 bits. The bits that its
// last byte has too many must be copies of the sign.
func (r *reader) signed(size int) int64 {
	var v int64
	for shift := 0; shift < size; shift += 7 {
		c := r.byte()
		v |= int64(c&0x7f) << shift
		if shift+7 >= size { // the last byte it may have
			sign := int8(c<<1) >> 1
			if top := sign >> (size - shift - 1); c >= 0x80 || top != 0 && top != -1 {
				break
			}
		}
		if c < 0x80 {
			if shift += 7; shift < 64 {
				v = v << (64 - shift) >> (64 - shift)
			}
			return v
		}
	}
	r.fail(errNumber)
	return 0
}

// count reads the length of a list whose elements take at least a byte each.
func (r *reader) count(max int, what string) int {
	n := r.u32()
	switch {
	case uint64(n) > uint64(max):
		r.fail(tooMany(what, uint64(n), max))
	case int(n) > r.left():
		r.fail(errShort)
	}
	if r.err != nil {
		return 0
	}
	return int(n)
}

func (r *reader) name() string {
	n := r.u32()
	if uint64(n) > uint64(r.left()) {
		r.fail(errShort)
		return ""
	}
	b := r.bytes(int(n))
	if !utf8.Valid(b) {
		r.fail(errUTF8)
	}
	return string(b)
}

func appendU32(to []byte, v uint32) []byte {
	for v >= 0x80 {
		to = append(to, byte(v)|0x80)
		v >>= 7
	}
	return append(to, byte(v))
}

func appendS32(to []byte, v int32) []byte {
	for v < -64 || v > 63 {
		to = append(to, byte(v)|0x80)
		v >>= 7
	}
	return append(to, byte(v)&0x7f)
}
