package native

import "strings"

// isTeamSpeak3 reports whether b is the first packet of a client:
//
//	"TS3INIT1" · packet 0x0065 · client 0 · flags 0x88 · version 4 · step 0 ·
//	time 4 · random 4 · zeros 8
func isTeamSpeak3(b []byte) bool {
	const head, stepAt, size = "TS3INIT1\x00\x65\x00\x00\x88", 17, 34
	return len(b) >= size && b[stepAt] == 0 && strings.HasPrefix(string(b[:len(head)]), head)
}
