package wasm

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// Modules that mean harm cost their call, and little memory. Sources and
// testdata/assemble.sh are beside them.
func TestHostile(t *testing.T) {
	e, err := takeEngine()
	if err != nil {
		t.Fatal(err)
	}
	defer e.give()
	for name, want := range map[string]string{
		"call-tree":       "timeout",
		"fills":           "timeout",
		"grow-loop":       "timeout",
		"imports-table":   "unexpected_import",
		"imports-wasi":    "unexpected_import",
		"leftovers":       "unrecognised",
		"mutual":          "trap",
		"start-recursion": "instantiate",
		"table-loop":      "timeout",
		"table-min":       "compile",
		"table-recursion": "trap",
		"wide-recursion":  "trap",
	} {
		t.Run(name, func(t *testing.T) {
			l := limits{timeout: time.Duration(slow), memory: defaultMemory}
			if want == "timeout" {
				l.timeout = defaultTimeout
			}
			m, err := e.load(hostile(t, name), l)
			if err != nil {
				if got := reasonOf(err); string(got) != want {
					t.Errorf("refused: %v, want %s", err, want)
				}
				return
			}
			s := e.newSniffer(name, "", m, l, caddy.Log())
			defer s.close()
			before, shortest := peak(t), time.Hour
			for range 3 {
				e.quiet()
				start := time.Now()
				if got := sniffBytes(s, "x"); got != want {
					t.Errorf("%s, want %s", got, want)
				}
				took := time.Since(start)
				t.Logf("took %v", took)
				shortest = min(shortest, took)
			}
			// The machine may be somebody else's too: one of them has to be in time.
			if testkit.Soak() && !testkit.Race && want == "timeout" && shortest > 2*l.timeout {
				t.Errorf("no call was over before %v", shortest)
			}
			// The stack, the table and the memory at their most, and as much again.
			if grown := peak(t) - before; grown > 64<<10 && !testkit.Race {
				t.Errorf("the process has grown by %d KiB", grown)
			}
		})
	}
}

// peak is the most memory that the process has had, in KiB.
func peak(t *testing.T) (kib int) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			for _, c := range rest {
				if '0' <= c && c <= '9' {
					kib = 10*kib + int(c-'0')
				}
			}
		}
	}
	return kib
}
