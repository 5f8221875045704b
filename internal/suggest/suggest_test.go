package suggest

import (
	"testing"

	"github.com/caddyserver/caddy/v2"
)

func init() { caddy.RegisterModule(guest{}) }

// guest is the only module of its namespace.
type guest struct{}

func (guest) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "suggest_test.guests.first", New: func() caddy.Module { return new(guest) }}
}

func TestModule(t *testing.T) {
	for _, tc := range []struct{ namespace, name, want string }{
		{"suggest_test.guests", "frist", "did you mean first?"},
		{"suggest_test.guests", "other", "there are first"},
		{"suggest_test.nobody", "first", "there are none"},
	} {
		if got := Module(tc.namespace, tc.name); got != tc.want {
			t.Errorf("Module(%q, %q) = %q, want %q", tc.namespace, tc.name, got, tc.want)
		}
	}
}

func TestHint(t *testing.T) {
	known := []string{"timeout", "interval", "rise", "fall", "idle_timeout"}
	for name, want := range map[string]string{
		"timout":       "did you mean timeout?",
		"tiemout":      "did you mean timeout?",
		"idel_timeout": "did you mean idle_timeout?",
		"raise":        "did you mean rise?",
		"time":         "did you mean timeout?",
		"send":         "there are fall, idle_timeout, interval, rise, timeout",
		"x":            "there are fall, idle_timeout, interval, rise, timeout",
		"":             "there are fall, idle_timeout, interval, rise, timeout",
	} {
		if got := Hint(name, known); got != want {
			t.Errorf("Hint(%q) = %q, want %q", name, got, want)
		}
	}
	if got := Hint("x", nil); got != "there are none" {
		t.Errorf("without names: %q", got)
	}
}

func TestDistance(t *testing.T) {
	for _, tc := range []struct {
		a, b string
		want int
	}{
		{"", "", 0}, {"", "abc", 3}, {"abc", "", 3}, {"abc", "abc", 0},
		{"abc", "abd", 1}, {"abc", "acb", 1}, {"abc", "ab", 1}, {"kitten", "sitting", 3},
	} {
		if got := distance(tc.a, tc.b); got != tc.want {
			t.Errorf("distance(%q, %q) = %d, want %d", tc.a, tc.b, got, tc.want)
		}
	}
}
