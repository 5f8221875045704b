// Package clienthello reads the server name out of the ClientHello that opens a
// TLS connection, without ending the connection. It sees the stream as far as
// it has arrived, in any number of records, and allocates nothing.
//
// The answer is never given on a part of the hello: what a later byte could
// still make illegal has no name yet. So the same bytes give the same name
// however they were cut.
package clienthello

import (
	"encoding/binary"
	"sync"
)

// State says how far a stream has been understood.
type State uint8

// The states. More may become any of them; the others are for good.
const (
	NotTLS State = iota // no stream that begins like this opens with a legal hello
	More                // it may be the beginning of one
	Done                // a whole hello
)

func (s State) String() string { return [...]string{"not TLS", "more", "done", "?"}[s&3] }

// MaxLen is how long a hello may be, with its handshake header.
const MaxLen = 16 << 10

// MaxName is the longest name there is in DNS.
const MaxName = 253

const (
	recordHeader   = 5
	maxRecord      = 16 << 10
	typeHandshake  = 22
	messageHeader  = 4
	typeHello      = 1
	maxSessionID   = 32
	extServerName  = 0
	nameTypeHost   = 0
	randomAndMajor = 2 + 32
)

// joined holds a hello that came in several records.
var joined = sync.Pool{New: func() any { return new([MaxLen]byte) }}

// AppendName reads a TCP stream and appends the name of its hello to dst: in
// lower case and without one trailing dot. Nothing is appended unless the state
// is Done, nor when the hello has no name, or one with bytes that names do not
// have.
func AppendName(dst, stream []byte) ([]byte, State) {
	n, state := record(stream)
	if state != Done {
		return dst, state
	}
	whole := len(stream) >= recordHeader+n
	first := stream[recordHeader:min(recordHeader+n, len(stream))]
	total, state := messageLen(first)
	if state == NotTLS || state == Done && total <= n || !whole {
		return AppendMessageName(dst, first)
	}
	buf := joined.Get().(*[MaxLen]byte)
	defer joined.Put(buf)
	at := copy(buf[:], first)
	for rest := stream[recordHeader+n:]; ; rest = rest[recordHeader+n:] {
		if n, state = record(rest); state == NotTLS {
			return dst, NotTLS
		} else if state == More {
			return AppendMessageName(dst, buf[:at])
		}
		at += copy(buf[at:], rest[recordHeader:min(recordHeader+n, len(rest))])
		if total, state := messageLen(buf[:at]); state == NotTLS || state == Done && total <= at || recordHeader+n > len(rest) {
			return AppendMessageName(dst, buf[:at])
		}
	}
}

// record reads a record's header. Every byte of it that is there must be right.
func record(b []byte) (n int, state State) {
	if len(b) > 0 && b[0] != typeHandshake || len(b) > 1 && b[1] != 3 || len(b) > 2 && b[2] > 4 {
		return 0, NotTLS
	}
	if len(b) > 3 && int(b[3])<<8 > maxRecord {
		return 0, NotTLS
	}
	if len(b) < recordHeader {
		return 0, More
	}
	n = int(binary.BigEndian.Uint16(b[3:]))
	if n == 0 || n > maxRecord {
		return 0, NotTLS
	}
	return n, Done
}

// messageLen is the length of a hello with its header.
func messageLen(b []byte) (int, State) {
	if len(b) > 0 && b[0] != typeHello || len(b) > 1 && b[1] != 0 || len(b) > 2 && int(b[2])<<8 >= MaxLen {
		return 0, NotTLS
	}
	if len(b) < messageHeader {
		return 0, More
	}
	n := messageHeader + int(binary.BigEndian.Uint16(b[2:]))
	if n > MaxLen {
		return 0, NotTLS
	}
	return n, Done
}

// AppendMessageName is AppendName for a handshake message without records, as
// QUIC carries it.
func AppendMessageName(dst, msg []byte) ([]byte, State) {
	total, state := messageLen(msg)
	if state != Done {
		return dst, state
	}
	name, state := parse(msg[messageHeader:min(total, len(msg))], total-messageHeader, false)
	return appendPlain(dst, name, state)
}

// AppendDTLSName is AppendName for the body of a DTLS handshake message that is
// total bytes long, without its header.
func AppendDTLSName(dst, body []byte, total int) ([]byte, State) {
	if total > MaxLen {
		return dst, NotTLS
	}
	name, state := parse(body[:min(total, len(body))], total, true)
	return appendPlain(dst, name, state)
}

func appendPlain(dst, name []byte, state State) ([]byte, State) {
	if state != Done || !plain(name) {
		return dst, state
	}
	if n := len(name) - 1; name[n] == '.' {
		name = name[:n]
	}
	for _, c := range name {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		dst = append(dst, c)
	}
	return dst, Done
}

// plain reports whether a name is one that DNS may have. An underscore is in
// many that work.
func plain(name []byte) bool {
	if n := len(name); n > 0 && name[n-1] == '.' {
		name = name[:n-1]
	}
	if len(name) == 0 || len(name) > MaxName {
		return false
	}
	for _, c := range name {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '-', c == '_':
		default:
			return false
		}
	}
	return true
}

// reader goes through a message of which a part may be there. need says what
// to take next; a length that leaves the message is illegal at once, and one
// that leaves only what is there waits for more.
type reader struct {
	b    []byte // what is there
	end  int    // length of the message
	at   int
	fail State // NotTLS or More, after ok has been false
}

func (r *reader) ok(n int) bool {
	switch {
	case r.at+n > r.end:
		r.fail = NotTLS
	case r.at+n > len(r.b):
		r.fail = More
	default:
		return true
	}
	return false
}

func (r *reader) skip(n int) bool {
	if !r.ok(n) {
		return false
	}
	r.at += n
	return true
}

func (r *reader) uint8() (int, bool) {
	if !r.ok(1) {
		return 0, false
	}
	r.at++
	return int(r.b[r.at-1]), true
}

func (r *reader) uint16() (int, bool) {
	if !r.ok(2) {
		return 0, false
	}
	r.at += 2
	return int(binary.BigEndian.Uint16(r.b[r.at-2:])), true
}

// parse finds the name in the body of a hello. b is what is there of it, and
// total how long it is. The hello of DTLS counts its versions down and has a
// cookie.
func parse(b []byte, total int, dtls bool) (name []byte, state State) {
	r := &reader{b: b, end: total}
	major := byte(3)
	if dtls {
		major = 0xfe
	}
	if total < randomAndMajor || len(b) > 0 && b[0] != major {
		return nil, NotTLS
	}
	if !r.skip(randomAndMajor) {
		return nil, r.fail
	}
	n, ok := r.uint8()
	if ok && n > maxSessionID {
		return nil, NotTLS
	}
	if !ok || !r.skip(n) {
		return nil, r.fail
	}
	if dtls {
		if n, ok = r.uint8(); !ok || !r.skip(n) {
			return nil, r.fail
		}
	}
	if n, ok = r.uint16(); ok && n%2 != 0 {
		return nil, NotTLS
	}
	if !ok || !r.skip(n) {
		return nil, r.fail
	}
	if n, ok = r.uint8(); !ok || !r.skip(n) {
		return nil, r.fail
	}
	if r.at == r.end {
		return nil, Done // older than extensions
	}
	if n, ok = r.uint16(); !ok {
		return nil, r.fail
	}
	if r.at+n != r.end {
		return nil, NotTLS
	}
	seen := false
	for r.at < r.end {
		kind, ok := r.uint16()
		if !ok {
			return nil, r.fail
		}
		if n, ok = r.uint16(); !ok || !r.skip(n) {
			return nil, r.fail
		}
		if kind != extServerName {
			continue
		}
		if seen {
			return nil, NotTLS
		}
		seen = true
		if name, ok = host(r.b[r.at-n : r.at]); !ok {
			return nil, NotTLS
		}
	}
	return name, Done
}

// host finds the host name in a server_name extension. A second one is illegal.
func host(ext []byte) (name []byte, ok bool) {
	if len(ext) < 2 || int(binary.BigEndian.Uint16(ext)) != len(ext)-2 {
		return nil, false
	}
	for list := ext[2:]; len(list) > 0; {
		if len(list) < 3 {
			return nil, false
		}
		kind, n := list[0], int(binary.BigEndian.Uint16(list[1:]))
		if n > len(list)-3 {
			return nil, false
		}
		if kind == nameTypeHost {
			if name != nil {
				return nil, false
			}
			name = list[3 : 3+n]
		}
		list = list[3+n:]
	}
	return name, true
}
