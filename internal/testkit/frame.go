package testkit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/netip"
)

// A Frame is a message of a load: a request that names its flow and its place
// in it, or a backend's answer, which repeats that and says who asked and who
// answers. Over UDP a frame is a datagram.
//
//	magic 2 · flow 4 · seq 8 · backend 2 · from 16+2 · length 2 · body · crc32 4
//
// A request has backend 0.
type Frame struct {
	Flow    uint32
	Seq     uint64
	Backend uint16
	From    netip.AddrPort // the source address that the backend saw
	Body    []byte
}

const (
	frameMagic = 0x5748
	headLen    = 2 + 4 + 8 + 2 + 16 + 2 + 2
	crcLen     = 4
)

// Errors of ParseFrame.
var (
	errShort    = errors.New("frame is cut off")
	errNotFrame = errors.New("no frame begins here")
	errDamaged  = errors.New("frame is damaged")
)

// Append adds the frame to b.
func (f *Frame) Append(b []byte) []byte {
	start := len(b)
	b = binary.BigEndian.AppendUint16(b, frameMagic)
	b = binary.BigEndian.AppendUint32(b, f.Flow)
	b = binary.BigEndian.AppendUint64(b, f.Seq)
	b = binary.BigEndian.AppendUint16(b, f.Backend)
	var addr [16]byte
	if f.From.IsValid() {
		addr = f.From.Addr().As16()
	}
	b = append(b, addr[:]...)
	b = binary.BigEndian.AppendUint16(b, f.From.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(len(f.Body)))
	b = append(b, f.Body...)
	return binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b[start:]))
}

// ParseFrame reads a frame at the beginning of b and tells its length. The
// body is a part of b.
func ParseFrame(b []byte) (f Frame, n int, err error) {
	if len(b) < headLen {
		return f, 0, errShort
	}
	if binary.BigEndian.Uint16(b) != frameMagic {
		return f, 0, errNotFrame
	}
	n = headLen + int(binary.BigEndian.Uint16(b[headLen-2:])) + crcLen
	if len(b) < n {
		return f, 0, errShort
	}
	if crc32.ChecksumIEEE(b[:n-crcLen]) != binary.BigEndian.Uint32(b[n-crcLen:]) {
		return f, 0, errDamaged
	}
	f.Flow = binary.BigEndian.Uint32(b[2:])
	f.Seq = binary.BigEndian.Uint64(b[6:])
	f.Backend = binary.BigEndian.Uint16(b[14:])
	f.From = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[16:32])).Unmap(), binary.BigEndian.Uint16(b[32:]))
	f.Body = b[headLen : n-crcLen]
	return f, n, nil
}

// ReadFrame reads one frame from a stream into buf, which it makes larger when
// it must and returns.
func ReadFrame(r io.Reader, buf []byte) (Frame, []byte, error) {
	if cap(buf) < headLen {
		buf = make([]byte, headLen, 256)
	}
	buf = buf[:headLen]
	if _, err := io.ReadFull(r, buf); err != nil {
		return Frame{}, buf, err
	}
	rest := int(binary.BigEndian.Uint16(buf[headLen-2:])) + crcLen
	buf = append(buf, make([]byte, rest)...)
	if _, err := io.ReadFull(r, buf[headLen:]); err != nil {
		return Frame{}, buf, fmt.Errorf("inside a frame: %w", err)
	}
	f, _, err := ParseFrame(buf)
	return f, buf, err
}
