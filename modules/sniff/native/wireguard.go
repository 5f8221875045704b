package native

// isWireGuard reports whether b is a handshake initiation: type 1, three
// reserved bytes of zero, and its one length.
func isWireGuard(b []byte) bool {
	return len(b) == 148 && b[0] == 1 && b[1] == 0 && b[2] == 0 && b[3] == 0
}
