// Package suggest finds what somebody may have meant by a name that does not
// exist.
package suggest

import (
	"fmt"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// Hint ends an error about an unknown name: it asks about the nearest of the
// known ones, or else lists them all.
func Hint(name string, known []string) string {
	if near := Nearest(name, known); near != "" {
		return fmt.Sprintf("did you mean %s?", near)
	}
	if len(known) == 0 {
		return "there are none"
	}
	known = slices.Clone(known)
	slices.Sort(known)
	return "there are " + strings.Join(known, ", ")
}

// Module is Hint about a module that a namespace does not have.
func Module(namespace, name string) string { return Hint(name, Modules(namespace)) }

// Modules are the names of the modules of a namespace.
func Modules(namespace string) (names []string) {
	for _, m := range caddy.GetModules(namespace) {
		names = append(names, m.ID.Name())
	}
	return names
}

// Nearest is the known name that fewest edits turn name into, "" when every
// one is too far. That name is only its beginning counts as one edit. Of
// several the first in the alphabet is taken.
func Nearest(name string, known []string) string {
	if len(name) > maxLen {
		return ""
	}
	best, least := "", len(name)/4+2
	for _, k := range slices.Sorted(slices.Values(known)) {
		n := distance(name, k)
		if len(name) > 2 && strings.HasPrefix(k, name) {
			n = 1
		}
		if n < least && n < len(k) {
			best, least = k, n
		}
	}
	return best
}

// maxLen bounds the work for a name that somebody else has sent.
const maxLen = 64

// distance is how many bytes have to be put in, taken out, replaced or swapped
// with their neighbour to get from a to b.
func distance(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			replace := last[j-1]
			if a[i-1] != b[j-1] {
				replace++
			}
			row[j] = min(replace, last[j]+1, row[j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
