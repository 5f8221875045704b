// Package quicinitial reads the ClientHello out of the Initial packets that
// open a QUIC connection: versions 1 and 2 and the drafts 29 to 34. It works on
// the datagrams of one client so far and keeps nothing between calls but the
// keys last used.
//
//	datagrams → packets → keys.open → CRYPTO frames → hello
//
// What a client can make it do is bounded: the number of packets that are
// opened, their size and the extent of the hello.
package quicinitial

import (
	"bytes"
	"encoding/binary"
	"sync"

	"github.com/wayhouse-proxy/wayhouse/internal/clienthello"
)

// State says what the datagrams are.
type State uint8

// The states. Datagrams that come later may only turn Partial into Done.
const (
	NotQUIC State = iota // the first one is no client's Initial
	Partial              // it is, and the hello has not been seen whole
	Done                 // the hello is whole, or cannot be read with any more datagrams
)

func (s State) String() string { return [...]string{"not QUIC", "partial", "done", "?"}[s&3] }

// Bounds of what is done for a client.
const (
	maxPackets = 16       // that are opened
	maxPacket  = 16 << 10 // bytes in one
	minDCID    = 8        // a client's first is never shorter
	maxCID     = 20
)

// AppendName reads the datagrams that a client has sent so far, in any order
// but with an Initial first, and appends the server name to dst as clienthello
// does.
func AppendName(dst []byte, datagrams [][]byte) ([]byte, State) {
	if len(datagrams) == 0 {
		return dst, NotQUIC
	}
	first, _, ok := parse(datagrams[0])
	if !ok || !first.initial {
		return dst, NotQUIC
	}
	if first.version < draft29 && first.version >= draft {
		return dst, Done // its keys are of no use any more
	}
	a := assemblies.Get().(*assembly)
	defer assemblies.Put(a)
	a.Reset()
	if err := a.keys.make(first.version, first.dcid); err != nil {
		return dst, NotQUIC
	}
	opened, tried := 0, 0
	for _, d := range datagrams {
		for len(d) > 0 && tried < maxPackets {
			p, rest, ok := parse(d)
			if !ok {
				break
			}
			d = rest
			// Another connection ID is another connection's.
			if !p.initial || p.version != first.version || !bytes.Equal(p.dcid, first.dcid) || len(p.whole) > maxPacket {
				continue
			}
			tried++
			if plain, ok := a.keys.open(a.plain[:], p.whole, p.pnAt); ok {
				opened++
				a.frames(plain)
			}
		}
		if opened == 0 { // the first datagram holds no packet of a client
			return dst, NotQUIC
		}
	}
	if a.Conflict {
		return dst, Partial // and no datagram will make it better
	}
	name, state := clienthello.AppendMessageName(dst, a.Bytes())
	if state == clienthello.More {
		return dst, Partial
	}
	return name, Done
}

// packet is a packet with a long header.
type packet struct {
	initial bool
	version uint32
	dcid    []byte
	pnAt    int    // offset of the packet number
	whole   []byte // from the first byte to the end
}

// parse takes the first packet off a datagram. It is not ok with anything but
// a well-formed packet of a known version that is an Initial or may follow one.
func parse(d []byte) (p packet, rest []byte, ok bool) {
	const form, fixed = 0x80, 0x40
	if len(d) < 7 || d[0]&(form|fixed) != form|fixed {
		return p, nil, false
	}
	p.version = binary.BigEndian.Uint32(d[1:])
	kind := d[0] >> 4 & 3
	switch {
	case p.version == v2:
		kind = (kind - 1) & 3 // as version 1 counts them
	case p.version == v1, p.version >= draft23 && p.version <= draft34:
	default:
		return p, nil, false
	}
	const initial, retry = 0, 3
	if kind == retry {
		return p, nil, false
	}
	p.initial = kind == initial
	at := 5
	n := int(d[at])
	if at++; n < minDCID || n > maxCID || len(d) < at+n+1 {
		return p, nil, false
	}
	p.dcid = d[at : at+n]
	at += n
	if n = int(d[at]); n > maxCID || len(d) < at+1+n {
		return p, nil, false
	}
	at += 1 + n
	if p.initial {
		token, ok := varint(d, &at)
		if !ok || token > uint64(len(d)-at) {
			return p, nil, false
		}
		at += int(token)
	}
	length, ok := varint(d, &at)
	if !ok || length > uint64(len(d)-at) || length < 4+tagLen {
		return p, nil, false
	}
	p.pnAt = at
	end := at + int(length)
	p.whole = d[:end]
	return p, d[end:], true
}

// varint reads QUIC's variable-length integer at *at and moves on.
func varint(b []byte, at *int) (uint64, bool) {
	if *at >= len(b) {
		return 0, false
	}
	n := 1 << (b[*at] >> 6)
	if len(b)-*at < n {
		return 0, false
	}
	v := uint64(b[*at] & 0x3f)
	for _, c := range b[*at+1 : *at+n] {
		v = v<<8 | uint64(c)
	}
	*at += n
	return v, true
}

// assembly is what is needed to read a client's datagrams.
type assembly struct {
	clienthello.Assembly
	keys  keys
	plain [maxPacket]byte
}

var assemblies = sync.Pool{New: func() any { return new(assembly) }}

// The frames a client may send in an Initial.
const (
	framePadding = 0x00
	framePing    = 0x01
	frameACK     = 0x02
	frameACKECN  = 0x03
	frameCrypto  = 0x06
)

// frames reads the frames of a packet as far as they are legal.
func (a *assembly) frames(b []byte) {
	for at := 0; at < len(b); {
		kind := b[at]
		at++
		switch kind {
		case framePadding: // often most of the packet
			for len(b)-at >= 8 && binary.LittleEndian.Uint64(b[at:]) == 0 {
				at += 8
			}
		case framePing:
		case frameACK, frameACKECN:
			if !skipACK(b, &at, kind == frameACKECN) {
				return
			}
		case frameCrypto:
			offset, ok := varint(b, &at)
			if !ok {
				return
			}
			n, ok := varint(b, &at)
			if !ok || n > uint64(len(b)-at) || offset > clienthello.MaxLen || !a.Put(int(offset), b[at:at+int(n)]) {
				return
			}
			at += int(n)
		default: // CONNECTION_CLOSE, after which nothing matters, or illegal
			return
		}
	}
}

func skipACK(b []byte, at *int, ecn bool) bool {
	var ranges uint64
	for i := range 4 { // largest, delay, ranges, first range
		v, ok := varint(b, at)
		if !ok {
			return false
		}
		if i == 2 {
			ranges = v
		}
	}
	if ranges > uint64(len(b)) {
		return false
	}
	n := 2 * int(ranges)
	if ecn {
		n += 3
	}
	for range n {
		if _, ok := varint(b, at); !ok {
			return false
		}
	}
	return true
}
