package native

import "encoding/binary"

const (
	stunHeader = 20
	stunCookie = "\x21\x12\xa4\x42"
	stunMax    = 2048 // of a request in a stream
)

// isSTUN reports whether a datagram is a request with the cookie of RFC 5389.
func isSTUN(b []byte) bool {
	return len(b) >= stunHeader && stunStream(b) == yes && len(b) == stunHeader+int(binary.BigEndian.Uint16(b[2:]))
}

// stunStream looks for a request at the beginning of a stream.
func stunStream(b []byte) answer {
	var h [8]byte
	n := copy(h[:], b)
	// The bits of the class are 0 in a request, and the upper two always.
	if h[0]&0xc1 != 0 || h[1]&0x10 != 0 || h[3]&3 != 0 {
		return no
	}
	if int(h[2])<<8 > stunMax {
		return no
	}
	if n > 4 && string(h[4:n]) != stunCookie[:n-4] {
		return no
	}
	if n < len(h) {
		return more
	}
	switch size := int(binary.BigEndian.Uint16(h[2:])); {
	case size > stunMax:
		return no
	case len(b) < stunHeader+size:
		return more
	}
	return yes
}
