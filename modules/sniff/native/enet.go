package native

import "encoding/binary"

// isENet reports whether b opens with a CONNECT, alone or behind a checksum:
//
//	flags and peer 2 · sent time 2 · [checksum 4] · command 1 · channel 1 ·
//	sequence 2 · peer 2 · sessions 2 · MTU 4 · window 4 · channels 4 · …
func isENet(b []byte) bool {
	const sentTime, noPeer = 0x8000, 0x0fff
	return len(b) >= 4 && binary.BigEndian.Uint16(b) == sentTime|noPeer && (isConnect(b[4:]) || len(b) >= 8 && isConnect(b[8:]))
}

func isConnect(b []byte) bool {
	const size, connect, wantsACK, wholePeer = 48, 2, 0x80, 0xff
	if len(b) < size || b[0] != connect|wantsACK || b[1] != wholePeer || binary.BigEndian.Uint16(b[2:]) != 1 {
		return false
	}
	mtu, channels := binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[16:])
	return mtu >= 576 && mtu <= 4096 && channels >= 1 && channels <= 255
}
