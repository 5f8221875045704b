package native

import (
	"encoding/binary"
	"sync"

	"github.com/wayhouse-proxy/wayhouse/internal/clienthello"
)

var hellos = sync.Pool{New: func() any { return new(clienthello.Assembly) }}

// Of a DTLS record and of a handshake message in it.
const (
	dtlsRecord    = 13
	dtlsHandshake = 12
)

// appendDTLSName appends the server name in a ClientHello, which may be in
// fragments over several records and datagrams. The first record of the first
// datagram has to be one of them.
func appendDTLSName(dst []byte, datagrams [][]byte) ([]byte, clienthello.State) {
	a := hellos.Get().(*clienthello.Assembly)
	defer hellos.Put(a)
	a.Reset()
	total, seq := -1, uint16(0)
	for _, d := range datagrams {
		for len(d) > 0 {
			f, rest, ok := parseFragment(d)
			if ok && total < 0 {
				total, seq = f.total, f.seq
			}
			if !ok || f.total != total || f.seq != seq || !a.Put(f.offset, f.data) {
				break
			}
			d = rest
		}
		if total < 0 {
			return dst, clienthello.NotTLS
		}
	}
	if a.Conflict {
		return dst, clienthello.More
	}
	return clienthello.AppendDTLSName(dst, a.Bytes(), total)
}

// fragment is a part of a ClientHello.
type fragment struct {
	total, offset int
	seq           uint16
	data          []byte
}

// parseFragment takes a record with a part of a ClientHello off a datagram:
//
//	type 1 · version 2 · epoch 2 · sequence 6 · length 2 ·
//	message 1 · total 3 · message sequence 2 · offset 3 · length 3
func parseFragment(d []byte) (f fragment, rest []byte, ok bool) {
	const handshake, clientHello = 22, 1
	if len(d) < dtlsRecord+dtlsHandshake || d[0] != handshake || d[1] != 0xfe || d[2] != 0xff && d[2] != 0xfd || d[3] != 0 || d[4] != 0 {
		return f, nil, false
	}
	n := int(binary.BigEndian.Uint16(d[11:]))
	if n < dtlsHandshake || n > len(d)-dtlsRecord {
		return f, nil, false
	}
	b := d[dtlsRecord : dtlsRecord+n]
	f = fragment{total: uint24(b[1:]), seq: binary.BigEndian.Uint16(b[4:]), offset: uint24(b[6:]), data: b[dtlsHandshake:]}
	if b[0] != clientHello || uint24(b[9:]) != len(f.data) || f.total > clienthello.MaxLen || f.offset+len(f.data) > f.total {
		return f, nil, false
	}
	return f, d[dtlsRecord+n:], true
}

func uint24(b []byte) int { return int(b[0])<<16 | int(b[1])<<8 | int(b[2]) }
