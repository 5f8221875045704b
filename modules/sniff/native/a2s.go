package native

import "strings"

// connectionless begins the packets of Source, GoldSrc and idTech 3 that belong
// to no connection.
const connectionless = "\xff\xff\xff\xff"

// isA2S reports whether b is a query that a client sends: A2S_INFO, A2S_PLAYER,
// A2S_RULES or the request for a challenge.
func isA2S(b []byte) bool {
	rest, ok := strings.CutPrefix(string(b[:min(len(b), 32)]), connectionless)
	if !ok || rest == "" {
		return false
	}
	switch rest[0] {
	case 'T':
		return strings.HasPrefix(rest[1:], "Source Engine Query")
	case 'U', 'V':
		return len(rest) >= 5 // with a challenge
	case 'W':
		return true
	}
	return false
}
