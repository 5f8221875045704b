// Package sessionlog holds the tests of the session log: every way in which a
// session of a real process may end, and what its records say of it.
package sessionlog

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// logged is a config with its session log in a file of its own.
func logged(config kit.M, file string) kit.M {
	return kit.With(config, kit.M{"logging": kit.M{"logs": kit.M{
		"default": kit.M{"level": "INFO", "exclude": kit.A{"admin.api", "wayhouse.log.sessions"}},
		"sessions": kit.M{
			"include": kit.A{"wayhouse.log.sessions"},
			"writer":  kit.M{"output": "file", "filename": file},
			"encoder": kit.M{"format": "json", "time_format": "rfc3339_nano"},
		},
	}}})
}

// record is a line of the session log.
type record map[string]any

// is reports whether the record has those fields.
func (r record) is(want record) bool {
	for k, v := range want {
		if n, ok := v.(int); ok {
			v = float64(n)
		}
		if r[k] != v {
			return false
		}
	}
	return true
}

// records reads a session log.
func records(t *testing.T, file string) (list []record) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if !strings.HasSuffix(line, "\n") {
			break // it is being written
		}
		var r record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("a line that is no JSON: %v: %s", err, line)
		}
		list = append(list, r)
	}
	return list
}

// find waits for the one record that has those fields.
func find(t *testing.T, file string, want record) (found record) {
	t.Helper()
	n := 0
	kit.Poll(8*time.Second, func() bool {
		n = 0
		for _, r := range records(t, file) {
			if r.is(want) {
				found = r
				n++
			}
		}
		return n > 0
	})
	if n != 1 {
		var seen []string
		for _, r := range records(t, file) {
			if r["listener"] == want["listener"] {
				b, _ := json.Marshal(r)
				seen = append(seen, string(b))
			}
		}
		t.Fatalf("%d records have %v; those of the listener:\n%s", n, want, strings.Join(seen, "\n"))
	}
	return found
}

func logFile(t *testing.T) string { return filepath.Join(t.TempDir(), "sessions.log") }
