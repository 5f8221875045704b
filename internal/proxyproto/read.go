package proxyproto

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"net/netip"
	"strconv"
	"strings"
)

// Header is what a header says. Without a Client it says nothing: the
// connection is the proxy's own (Local), or the proxy does not know whose it is.
type Header struct {
	Client netip.AddrPort // IPv4-mapped addresses are IPv4
	Dest   netip.AddrPort // the address that the client has hit
	Own    bool           // the proxy has opened the flow itself, as for a health check
	SPP    bool           // …by Cloudflare's header, which answers begin with too
}

// Names reports whether the header names a client that there can be.
func (h *Header) Names() bool {
	a := h.Client.Addr()
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast()
}

// The errors. Every other one is of a header that is wrong.
var (
	ErrNone  = errors.New("no header")          // the bytes begin with something else
	ErrShort = errors.New("the header goes on") // what there is may be the beginning of one
)

var (
	errLong    = errors.New("the header is too long")
	errLine    = errors.New("the line is no PROXY header")
	errVersion = errors.New("neither PROXY nor LOCAL of version 2")
	errFamily  = errors.New("addresses of a family or protocol that cannot be here")
	errLength  = errors.New("shorter than its addresses")
	errField   = errors.New("a field goes beyond the header")
	errCRC     = errors.New("the checksum is wrong")
)

// ReadStream reads the header that a TCP connection begins with; n is its
// length.
func ReadStream(b []byte) (h Header, n int, err error) {
	if begins(b, signature) {
		return readV2(b, stream4, stream6)
	}
	if begins(b, "PROXY ") {
		return readV1(b)
	}
	return h, 0, ErrNone
}

// ReadDatagram reads the header that a datagram begins with.
func ReadDatagram(p []byte) (h Header, n int, err error) {
	if len(p) >= 2 && binary.BigEndian.Uint16(p) == magicSPP {
		if len(p) < LenSPP {
			return h, 0, errLength
		}
		return readSPP(p), LenSPP, nil
	}
	return ReadV2UDP(p)
}

// ReadV2UDP is ReadDatagram for one that cannot have a header of SPP: its two
// first bytes are too few to tell that from payload.
func ReadV2UDP(p []byte) (h Header, n int, err error) {
	if len(p) < len(signature) || string(p[:len(signature)]) != signature {
		return h, 0, ErrNone
	}
	if h, n, err = readV2(p, dgram4, dgram6); err == ErrShort {
		err = errLength // there is no more of a datagram
	}
	return h, n, err
}

// begins reports whether b begins as s does, as far as it goes. Nothing at all
// may become anything.
func begins(b []byte, s string) bool {
	n := min(len(b), len(s))
	return string(b[:n]) == s[:n]
}

func readV1(b []byte) (h Header, n int, err error) {
	end := bytes.IndexByte(b[:min(len(b), MaxV1)], '\n')
	if end < 0 {
		if len(b) >= MaxV1 {
			return h, 0, errLong
		}
		return h, 0, ErrShort
	}
	if end == 0 || b[end-1] != '\r' {
		return h, 0, errLine
	}
	var words [6]string
	rest, more := string(b[:end-1]), true
	for i := range words {
		if words[i], rest, more = strings.Cut(rest, " "); i == 1 && words[1] == "UNKNOWN" { // whatever follows
			return h, end + 1, nil
		}
		if more != (i < len(words)-1) {
			return h, 0, errLine
		}
	}
	var client, dest netip.AddrPort
	if client, err = wordAddr(words[1], words[2], words[4]); err == nil {
		dest, err = wordAddr(words[1], words[3], words[5])
	}
	if err != nil {
		return h, 0, err
	}
	return Header{Client: client, Dest: dest}, end + 1, nil
}

func wordAddr(family, addr, port string) (netip.AddrPort, error) {
	a, err := netip.ParseAddr(addr)
	if err != nil || a.Zone() != "" || !(family == "TCP4" && a.Is4() || family == "TCP6" && a.Is6()) {
		return netip.AddrPort{}, errLine
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || len(port) > 1 && port[0] == '0' {
		return netip.AddrPort{}, errLine
	}
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), nil
}

// readV2 reads a header whose signature is there, as far as it goes.
func readV2(b []byte, ipv4, ipv6 byte) (h Header, n int, err error) {
	if len(b) < fixedV2 {
		return h, 0, ErrShort
	}
	cmd, family := b[len(signature)], b[len(signature)+1]
	n = fixedV2 + int(binary.BigEndian.Uint16(b[fixedV2-2:]))
	size := addrs4
	switch {
	case cmd != cmdLocal && cmd != cmdProxy:
		return h, 0, errVersion
	case n > MaxV2:
		return h, 0, errLong
	case cmd == cmdLocal: // its family and addresses mean nothing
		size = 0
	case family == unspec:
		size = 0
	case family == ipv6:
		size = addrs6
	case family != ipv4:
		return h, 0, errFamily
	}
	if n < fixedV2+size {
		return h, 0, errLength
	}
	if len(b) < n {
		return h, 0, ErrShort
	}
	if cmd == cmdLocal {
		return Header{Own: true}, n, nil
	}
	if err := checkFields(b[:n], fixedV2+size); err != nil {
		return h, 0, err
	}
	switch p := b[fixedV2:]; size {
	case addrs4:
		h.Client = addrPort(netip.AddrFrom4([4]byte(p)), p[8:])
		h.Dest = addrPort(netip.AddrFrom4([4]byte(p[4:])), p[10:])
	case addrs6:
		h.Client = addrPort(netip.AddrFrom16([16]byte(p)), p[32:])
		h.Dest = addrPort(netip.AddrFrom16([16]byte(p[16:])), p[34:])
	}
	return h, n, nil
}

// checkFields looks whether the fields from at on fill the header, and whether a
// checksum among them is right.
func checkFields(head []byte, at int) error {
	for at < len(head) {
		if len(head)-at < 3 {
			return errField
		}
		t, size := head[at], int(binary.BigEndian.Uint16(head[at+1:]))
		if at += 3; size > len(head)-at {
			return errField
		}
		if t == fieldCRC {
			if size != 4 {
				return errCRC
			}
			sum := crc32.Update(0, castagnoli, head[:at])
			sum = crc32.Update(sum, castagnoli, zeros[:])
			sum = crc32.Update(sum, castagnoli, head[at+4:])
			if sum != binary.BigEndian.Uint32(head[at:]) {
				return errCRC
			}
		}
		at += size
	}
	return nil
}

var zeros [4]byte // what the checksum is while it is being made

func readSPP(p []byte) Header {
	return Header{
		Client: addrPort(netip.AddrFrom16([16]byte(p[2:])), p[34:]),
		Dest:   addrPort(netip.AddrFrom16([16]byte(p[18:])), p[36:]),
		SPP:    true,
	}
}

func addrPort(a netip.Addr, port []byte) netip.AddrPort {
	return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(port))
}
