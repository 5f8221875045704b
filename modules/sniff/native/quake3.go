package native

import "strings"

// isQuake3 reports whether b is a query or a connect of an idTech 3 client.
// rcon is none of them, so that it never reaches a pool for queries.
func isQuake3(b []byte) bool {
	const longest = "getchallenge"
	rest, ok := strings.CutPrefix(string(b[:min(len(b), len(connectionless)+len(longest)+1)]), connectionless)
	if !ok {
		return false
	}
	word, _, _ := strings.Cut(rest, " ")
	if i := strings.IndexAny(word, "\n\r\x00"); i >= 0 {
		word = word[:i]
	}
	switch word {
	case "getstatus", "getinfo", "getchallenge", "connect":
		return true
	}
	return false
}
