package adminapi

import (
	"net/http/httptest"
	"strings"
	"testing"
)

func TestActor(t *testing.T) {
	for name, tc := range map[string]struct {
		door   *caller
		header string
		want   string
	}{
		"admin endpoint, says nothing": {want: "admin-api"},
		"admin endpoint":               {header: "alice@ops", want: "alice@ops"},
		"behind a token":               {door: &caller{"panel", true}, header: "alice", want: "alice"},
		"behind a token, says nothing": {door: &caller{"panel", true}, want: "panel"},
		"blanks say nothing":           {door: &caller{"panel", true}, header: " \t ", want: "panel"},
		"without a token":              {door: &caller{"anonymous", false}, header: "alice", want: "anonymous"},
		"line breaks":                  {header: "a\nb\r\x1b[2J\u2028c", want: `a\u000ab\u000d\u001b[2J\u2028c`},
		"turned around":                {header: "a\u202eb", want: `a\u202eb`},
		"no text":                      {header: "a\xff\xfe", want: `a\ufffd\ufffd`},
		"letters of all sorts":         {header: "Zoë Ωmega 東", want: "Zoë Ωmega 東"},
		"long":                         {header: strings.Repeat("é", 5000), want: strings.Repeat("é", maxActor) + "…"},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest("GET", "/", nil)
			r.Header["X-Actor"] = []string{tc.header}
			if tc.door != nil {
				r = tc.door.from(r)
			}
			if got := actor(r); got != tc.want {
				t.Errorf("actor is %q, want %q", got, tc.want)
			}
		})
	}
}
