package adminapi

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"
	"unicode"
)

// doorKey finds what is known of who asks in the context of a request.
type doorKey struct{}

// caller is who asks through a door that looks.
type caller struct {
	name     string // of the token; "anonymous" where none is needed
	believed bool   // what they say of themselves counts
}

// from tells the calls who asks.
func (c caller) from(r *http.Request) *http.Request {
	return r.WithContext(context.WithValue(r.Context(), doorKey{}, c))
}

// localActor is who asks at Caddy's admin endpoint and does not say.
const localActor = "admin-api"

// maxActor is how many characters of an actor are kept.
const maxActor = 100

// actor is who is behind a request, for what is kept and logged. X-Actor tells
// it where whoever asks is trusted: behind a token, and at Caddy's admin
// endpoint, which only those reach who may do everything.
func actor(r *http.Request) string {
	c, ok := r.Context().Value(doorKey{}).(caller)
	if !ok {
		c = caller{localActor, true}
	}
	if !c.believed {
		return c.name
	}
	return cmp.Or(printable(r.Header.Get("X-Actor")), c.name)
}

// printable is s cut to what is kept of it, with everything escaped that could
// change the line it is printed in.
func printable(s string) string {
	var b strings.Builder
	n := 0
	for _, r := range strings.TrimSpace(s) {
		if n++; n > maxActor {
			b.WriteString("…")
			break
		}
		if unicode.IsPrint(r) && r != unicode.ReplacementChar {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}
