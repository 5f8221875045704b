package native

import "bytes"

// magic is in every offline message of RakNet.
var magic = []byte("\x00\xff\xff\x00\xfe\xfe\xfe\xfe\xfd\xfd\xfd\xfd\x12\x34\x56\x78")

// isRakNet reports whether b is an offline message of a client: an unconnected
// ping or one of the two open connection requests.
func isRakNet(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	switch b[0] {
	case 0x01, 0x02: // ping: time, magic, client
		return len(b) >= 9+len(magic) && bytes.Equal(b[9:9+len(magic)], magic)
	case 0x05, 0x07: // request: magic, and the protocol or the server's address
		return len(b) > 1+len(magic) && bytes.Equal(b[1:1+len(magic)], magic)
	}
	return false
}
