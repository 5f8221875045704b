package proxyproto

import (
	"encoding/binary"
	"hash/crc32"
	"net/netip"
	"strconv"
)

// Sizes of headers.
const (
	MaxV1  = 107 // by its definition
	MaxV2  = 536 // that is read
	LenSPP = 38

	fixedV2 = 16 // before the addresses
	addrs4  = 12
	addrs6  = 36

	// MostWritten is more than the longest header that is written.
	MostWritten = fixedV2 + addrs6 + 3 + maxID + 3 + maxHost + 3 + maxTrace + 3 + 4

	maxID   = 128 // by the definition of the field
	maxHost = 255

	maxTrace = 55 // by W3C's definition of traceparent
)

// signature begins a header of version 2.
const signature = "\r\n\r\n\x00\r\nQUIT\n"

// The bytes behind the signature.
const (
	cmdLocal = 0x20
	cmdProxy = 0x21

	stream4 = 0x11
	stream6 = 0x21
	dgram4  = 0x12
	dgram6  = 0x22
	unspec  = 0x00
)

// The fields of version 2 that are written or looked at.
const (
	fieldAuthority = 0x02
	fieldCRC       = 0x03
	fieldUniqueID  = 0x05
	fieldTrace     = 0xe7 // of those that are for applications
)

const magicSPP = 0x56ec

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Flow is what a header tells.
type Flow struct {
	Client, Local netip.AddrPort
	ID            []byte // "": not known
	Host          []byte // "": none was named
	Trace         []byte // as W3C's traceparent; "": it is not traced
}

// Append appends the header that servers of the form get of a flow. Addresses
// of two families are both told as IPv6. Of a flow whose client is not known
// the header tells nothing; where only the address it went to is not, that is told
// as unspecified.
func (f *Form) Append(b []byte, w *Flow) []byte {
	switch f.Version {
	case V1:
		return appendV1(b, w.Client, w.Local)
	case V2, V2UDP:
		return f.appendV2(b, w)
	case SPP:
		return appendSPP(b, w.Client, w.Local)
	}
	return b
}

// pair brings two addresses to one family; IPv4-mapped ones are IPv4.
func pair(client, local netip.AddrPort) (c, l netip.Addr, is4, known bool) {
	c, l = client.Addr().Unmap(), local.Addr().Unmap()
	if !c.IsValid() {
		return c, l, false, false
	}
	if !l.IsValid() {
		if l = netip.IPv6Unspecified(); c.Is4() {
			l = netip.IPv4Unspecified()
		}
	}
	if c.Is4() && l.Is4() {
		return c, l, true, true
	}
	return netip.AddrFrom16(c.As16()), netip.AddrFrom16(l.As16()), false, true
}

func appendV1(b []byte, client, local netip.AddrPort) []byte {
	c, l, is4, known := pair(client, local)
	switch {
	case !known:
		return append(b, "PROXY UNKNOWN\r\n"...)
	case is4:
		b = append(b, "PROXY TCP4 "...)
	default:
		b = append(b, "PROXY TCP6 "...)
	}
	b = append(c.AppendTo(b), ' ')
	b = append(l.AppendTo(b), ' ')
	b = append(strconv.AppendUint(b, uint64(client.Port()), 10), ' ')
	return append(strconv.AppendUint(b, uint64(local.Port()), 10), '\r', '\n')
}

func (f *Form) appendV2(b []byte, w *Flow) []byte {
	start := len(b)
	udp := f.Version == V2UDP
	c, l, is4, known := pair(w.Client, w.Local)
	b = append(b, signature...)
	switch {
	case !known: // servers take no PROXY without addresses
		b = append(b, cmdLocal, unspec, 0, 0)
	case is4:
		b = append(b, cmdProxy, kind(udp, stream4, dgram4), 0, 0)
		from, to := c.As4(), l.As4()
		b = append(append(b, from[:]...), to[:]...)
	default:
		b = append(b, cmdProxy, kind(udp, stream6, dgram6), 0, 0)
		from, to := c.As16(), l.As16()
		b = append(append(b, from[:]...), to[:]...)
	}
	if known {
		b = binary.BigEndian.AppendUint16(b, w.Client.Port())
		b = binary.BigEndian.AppendUint16(b, w.Local.Port())
	}
	if f.Authority && len(w.Host) > 0 && len(w.Host) <= maxHost {
		b = appendField(b, fieldAuthority, w.Host)
	}
	if f.UniqueID && len(w.ID) > 0 && len(w.ID) <= maxID {
		b = appendField(b, fieldUniqueID, w.ID)
	}
	if f.Trace && len(w.Trace) > 0 && len(w.Trace) <= maxTrace {
		b = appendField(b, fieldTrace, w.Trace)
	}
	if f.CRC {
		b = append(b, fieldCRC, 0, 4, 0, 0, 0, 0)
	}
	head := b[start:]
	binary.BigEndian.PutUint16(head[fixedV2-2:], uint16(len(head)-fixedV2))
	if f.CRC {
		binary.BigEndian.PutUint32(head[len(head)-4:], crc32.Checksum(head, castagnoli))
	}
	return b
}

func kind(udp bool, stream, dgram byte) byte {
	if udp {
		return dgram
	}
	return stream
}

func appendField(b []byte, t byte, v []byte) []byte {
	b = append(b, t, byte(len(v)>>8), byte(len(v)))
	return append(b, v...)
}

func appendSPP(b []byte, client, local netip.AddrPort) []byte {
	b = binary.BigEndian.AppendUint16(b, magicSPP)
	for _, a := range []netip.Addr{client.Addr(), local.Addr()} {
		var raw [16]byte
		if a.IsValid() {
			raw = a.As16() // IPv4 mapped
		}
		b = append(b, raw[:]...)
	}
	b = binary.BigEndian.AppendUint16(b, client.Port())
	return binary.BigEndian.AppendUint16(b, local.Port())
}

// isSPP reports whether a datagram begins with a header of SPP.
func isSPP(p []byte) bool {
	return len(p) >= LenSPP && binary.BigEndian.Uint16(p) == magicSPP
}
