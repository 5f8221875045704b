package native

import (
	"bytes"
	"encoding/binary"
	"unicode/utf8"
)

// handshake is what a Minecraft Java client says first:
//
//	length · 0 · protocol · host · port 2 · next state
//
// with variable-length integers, or before version 1.7 a server list ping,
// which begins with 0xfe.
type handshake struct {
	host      []byte // without what mods and proxies append, in any case
	wide      []byte // the host of a ping of 1.6: ASCII in UTF-16BE
	next      int32
	protocol  int32
	versioned bool // protocol is known
}

const (
	maxHost      = 1024 // with what is appended to it
	maxHandshake = maxHost + 16
	minHandshake = 1 + 1 + 1 + 1 + 2 + 1
)

// parse reads the beginning of a stream. final decides about the pings before
// 1.6, which are the beginning of the later one and have no host.
func (h *handshake) parse(b []byte, final bool) answer {
	if a := h.modern(b); a != no {
		if a == more && final && isBarePing(b) {
			h.next = stateStatus
			return yes
		}
		return a
	}
	return h.ping(b)
}

// isBarePing reports whether b is the ping of a client before 1.4, or before
// 1.6.
func isBarePing(b []byte) bool { return string(b) == "\xfe" || string(b) == "\xfe\x01" }

// The next states of a handshake.
const (
	stateStatus = 1 + iota
	stateLogin
	stateTransfer
)

func (h *handshake) state() string {
	return [...]string{stateStatus: "status", stateLogin: "login", stateTransfer: "transfer"}[h.next]
}

// modern reads the handshake of 1.7 and later. What is there of it must be
// right, so that another protocol is told as soon as it differs.
func (h *handshake) modern(b []byte) answer {
	r := reader{b: b, end: maxHandshake, answer: yes}
	length := r.varint()
	if r.answer != yes {
		return r.answer
	}
	if length < minHandshake || length > maxHandshake {
		return no
	}
	r.end = r.at + int(length)
	if id := r.varint(); id != 0 {
		return no
	}
	h.protocol, h.versioned = r.varint(), true
	n := r.varint()
	if r.answer == yes && (n < 1 || n > maxHost || r.at+int(n)+3 > r.end) {
		return no
	}
	host := r.upTo(int(n))
	if badHost(host, r.answer == yes) {
		return no
	}
	r.upTo(2) // the port
	h.next = r.varint()
	if r.answer == yes && (r.at != r.end || h.next < stateStatus || h.next > stateTransfer) {
		return no
	}
	h.host, _, _ = bytes.Cut(host, []byte{0})
	return r.answer
}

// badHost reports whether what there is of a host cannot be one. Behind the
// first NUL stands what mods and proxies append.
func badHost(host []byte, whole bool) (bad bool) {
	for i := 0; i < len(host); {
		c, n := utf8.DecodeRune(host[i:])
		switch {
		case c == 0:
			return i == 0
		case c <= ' ' || c == 0x7f:
			return true
		case c == utf8.RuneError && n == 1:
			return whole || utf8.FullRune(host[i:])
		}
		i += n
	}
	return false
}

// ping reads the ping of 1.6: it names the host. What is shorter is told apart
// by modern, which takes it for the beginning of a long handshake.
//
//	fe 01 fa · 11 "MC|PingHost" · length 2 · protocol 1 · host · port 4
func (h *handshake) ping(b []byte) answer {
	const head = "\xfe\x01\xfa\x00\x0b\x00M\x00C\x00|\x00P\x00i\x00n\x00g\x00H\x00o\x00s\x00t"
	if n := min(len(b), len(head)); string(b[:n]) != head[:n] {
		return no
	}
	if len(b) < len(head)+2 {
		return more
	}
	rest := b[len(head)+2:]
	const around = 1 + 2 + 4 // protocol, length of the host, port
	size := int(binary.BigEndian.Uint16(b[len(head):]))
	if size < around+2 || size > around+2*maxHost || size%2 != around%2 {
		return no
	}
	if len(rest) >= 3 && around+2*int(binary.BigEndian.Uint16(rest[1:])) != size {
		return no
	}
	wide := rest[min(3, len(rest)):min(size-4, len(rest))]
	for i, c := range wide {
		if i%2 == 0 && c != 0 || i%2 == 1 && (c <= ' ' || c >= 0x7f) {
			return no
		}
	}
	if len(rest) < size {
		return more
	}
	h.wide, h.protocol, h.versioned, h.next = wide, int32(rest[0]), true, stateStatus
	return yes
}

// appendNarrow appends ASCII that is in UTF-16BE as hosts are compared.
func appendNarrow(dst, wide []byte) []byte {
	for i := 1; i < len(wide); i += 2 {
		c := wide[i]
		if c == '.' && i == len(wide)-1 {
			break
		}
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		dst = append(dst, c)
	}
	return dst
}

// reader reads the fields of a packet. answer is yes until one is wrong or not
// there yet; those after it are zero.
type reader struct {
	b      []byte // what is there
	at     int
	end    int // of the packet
	answer answer
}

// byte reads one byte.
func (r *reader) byte() byte {
	switch {
	case r.answer != yes:
	case r.at >= r.end:
		r.answer = no
	case r.at >= len(r.b):
		r.answer = more
	default:
		r.at++
		return r.b[r.at-1]
	}
	return 0
}

// varint reads a number of up to five bytes.
func (r *reader) varint() int32 {
	var v uint32
	for i := range 5 {
		c := r.byte()
		v |= uint32(c&0x7f) << (7 * i)
		if r.answer != yes {
			return 0
		}
		if c < 0x80 {
			return int32(v)
		}
	}
	r.answer = no
	return 0
}

// upTo reads n bytes, or as many of them as are there.
func (r *reader) upTo(n int) []byte {
	if r.answer != yes {
		return nil
	}
	from := r.at
	if r.at += n; r.at > len(r.b) {
		r.at, r.answer = len(r.b), more
	}
	return r.b[from:r.at]
}
