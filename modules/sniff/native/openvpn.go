package native

import "encoding/binary"

// How long a client's hard reset may be: without any wrapping, and with a
// client key of tls-crypt-v2 and what it carries.
const (
	openVPNMin = 14
	openVPNMax = 2047
)

// isOpenVPN reports whether b is a client's hard reset with key 0, of version 2
// or 3. Version 1 is of key method 1, which is gone.
func isOpenVPN(b []byte) bool {
	const hardResetV2, hardResetV3 = 7 << 3, 10 << 3
	return len(b) >= openVPNMin && len(b) <= openVPNMax && (b[0] == hardResetV2 || b[0] == hardResetV3)
}

// openVPNStream looks for a hard reset behind its length. Nothing follows it:
// a client waits for the server.
func openVPNStream(b []byte) answer {
	if len(b) < 3 {
		if len(b) > 0 && int(b[0])<<8 > openVPNMax || len(b) > 1 && binary.BigEndian.Uint16(b) < openVPNMin {
			return no
		}
		return more
	}
	n := int(binary.BigEndian.Uint16(b))
	switch {
	case n < openVPNMin || n > openVPNMax || len(b) > 2+n:
		return no
	case b[2] != 7<<3 && b[2] != 10<<3:
		return no
	case len(b) < 2+n:
		return more
	}
	return yes
}
