package discovery

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestParseFile(t *testing.T) {
	const all = "10.0.0.1:7 w0 p0 m0, [2001:db8::1]:7 w3 p2 m64, 10.0.0.2:7 w0 p0 m0"
	for name, tc := range map[string]struct{ path, in, want string }{
		"JSON":               {"b.json", `["10.0.0.1:7", {"addr": "[2001:db8::1]:7", "weight": 3, "priority": 2, "max_sessions": 64}, {"addr": "[::ffff:10.0.0.2]:7"}]`, all},
		"YAML":               {"b.yaml", "- 10.0.0.1:7\n- addr: '[2001:db8::1]:7'\n  weight: 3\n  priority: 2\n  max_sessions: 64\n- addr: '[::ffff:10.0.0.2]:7'\n", all},
		"JSON as YAML":       {"b.yml", `["10.0.0.1:7", {"addr": "10.0.0.2:7"}]`, "10.0.0.1:7 w0 p0 m0, 10.0.0.2:7 w0 p0 m0"},
		"JSON by look":       {"backends", "[\t\"10.0.0.1:7\"\n]", "10.0.0.1:7 w0 p0 m0"},
		"YAML by look":       {"backends", "# ours\n- 10.0.0.1:7\n", "10.0.0.1:7 w0 p0 m0"},
		"an empty list":      {"b.json", "[]", ""},
		"an empty YAML":      {"b.yaml", "", ""},
		"a comment":          {"b.yaml", "# nobody\n", ""},
		"an empty JSON":      {"b.json", "", "error: b.json:1: unexpected end"},
		"cut short":          {"b.json", "[\n\"10.0.0.1:7\",\n\"10.0", "error: b.json:3: unexpected end"},
		"a stray comma":      {"b.json", "[\n\"10.0.0.1:7\",\n]", "error: b.json:3: invalid character ']'"},
		"null":               {"b.json", "null", "error: b.json: this is not a list"},
		"an object":          {"b.json", "{}", "error: b.json: this is not a list"},
		"a mapping":          {"b.yaml", "backends:\n- 10.0.0.1:7\n", "error: b.yaml: this is not a list"},
		"two documents":      {"b.yaml", "- 10.0.0.1:7\n---\n- 10.0.0.2:7\n", "error: b.yaml: there is more than one document"},
		"no YAML":            {"b.yaml", "- 10.0.0.1:7\n- 'x\n", "error: b.yaml: yaml: "},
		"a bad line":         {"b.json", "[\n\"10.0.0.1:7\",\n\n{\"addr\": \"10.0.0:7\"}]", `error: b.json:4: addr: "10.0.0:7" is not ip:port`},
		"a bad YAML line":    {"b.yaml", "- 10.0.0.1:7\n\n- addr: 10.0.0.2:0\n", "error: b.yaml:3: addr: 10.0.0.2:0 is not the address of one host and a port"},
		"a host name":        {"b.yaml", "- game.example.com:7\n", `error: b.yaml:1: addr: "game.example.com:7" is not ip:port`},
		"of no host":         {"b.json", `["224.0.0.1:7"]`, "error: b.json:1: addr: 224.0.0.1:7 is not the address of one host"},
		"a zone":             {"b.json", `["[fe80::1%eth0]:7"]`, "is not the address of one host"},
		"a number":           {"b.json", `[7]`, "error: b.json:1: an entry is neither"},
		"null inside":        {"b.json", `[null]`, "error: b.json:1: "},
		"a list inside":      {"b.json", `[["10.0.0.1:7"]]`, "error: b.json:1: an entry is neither"},
		"IPv6 unquoted":      {"b.yaml", "- [2001:db8::1]:7\n", "error: b.yaml"},
		"an unknown key":     {"b.json", `[{"addr": "10.0.0.1:7", "wieght": 2}]`, `an entry has no "wieght"; did you mean weight?`},
		"no addr":            {"b.yaml", "- weight: 2\n", "error: b.yaml:1: addr: missing"},
		"twice":              {"b.json", `[{"addr": "10.0.0.1:7", "addr": "10.0.0.2:7"}]`, `"addr" is given twice`},
		"twice in YAML":      {"b.yaml", "- addr: 10.0.0.1:7\n  addr: 10.0.0.2:7\n", "error: b.yaml"},
		"a weight of 0":      {"b.json", `[{"addr": "10.0.0.1:7", "weight": 0}]`, "weight: 0 is not a number from 1 to 1000000"},
		"a quoted weight":    {"b.json", `[{"addr": "10.0.0.1:7", "weight": "2"}]`, `weight: "2" is not a number`},
		"half a weight":      {"b.json", `[{"addr": "10.0.0.1:7", "weight": 1.5}]`, "weight: 1.5 is not a number"},
		"a high priority":    {"b.json", `[{"addr": "10.0.0.1:7", "priority": 65536}]`, "priority: 65536 is not a number from 0 to 65535"},
		"negative flows":     {"b.json", `[{"addr": "10.0.0.1:7", "max_sessions": -1}]`, "max_sessions: -1 is not a number from 1"},
		"an alias":           {"b.yaml", "- &a 10.0.0.1:7\n- *a\n", "error: b.yaml:2: an entry is neither"},
		"aliases of aliases": {"b.yaml", "- &a [x, x]\n- &b [*a, *a]\n- [*b, *b]\n", "error: b.yaml:1: an entry is neither"},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := parseFile(tc.path, []byte(tc.in))
			var s []string
			for _, e := range list {
				s = append(s, fmt.Sprintf("%s w%d p%d m%d", e.Addr, e.Weight, e.Priority, e.MaxSessions))
			}
			got := strings.Join(s, ", ")
			if err != nil {
				got = "error: " + err.Error()
			}
			if strings.Contains(tc.want, "error: ") || strings.Contains(got, "error: ") {
				if !strings.Contains(got, tc.want) || !strings.HasPrefix(got, "error: ") {
					t.Errorf("got %s, want %s", got, tc.want)
				}
			} else if got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
}

// fileSource runs a file source and returns what the pool knows.
func fileSource(t *testing.T, path string) *Use {
	t.Helper()
	rarely := caddy.Duration(time.Hour) // that it changes is for Watch to see
	f := &File{Path: path, Settings: Settings{RefreshInterval: &rarely}}
	if err := f.Provision(ctxOf(t)); err != nil {
		t.Fatal(err)
	}
	k := newTask(taskKey{"file", path}, f)
	u := &Use{name: "file", task: k, changed: make(chan struct{}, 1)}
	u.Start(t.Name(), zap.NewNop())
	t.Cleanup(func() {
		u.Stop()
		<-k.ended
	})
	return u
}

func TestFileIsFollowed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "backends.yaml")
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	u := fileSource(t, path) // there is none yet
	testkit.Eventually(t, "the file is looked for", func() bool { _, asked := u.Known(); return asked })
	write("- 10.0.0.2:7\n- 10.0.0.1:7\n")
	testkit.Settles(t, "the set", "10.0.0.2:7 10.0.0.1:7", func() string { return shown(u) })

	other := path + ".new"
	if err := os.WriteFile(other, []byte("- 10.0.0.3:7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	testkit.Settles(t, "the set after a rename", "10.0.0.3:7", func() string { return shown(u) })

	failures := func() float64 { return testutil.ToFloat64(refreshTotal.WithLabelValues(t.Name(), "file", "error")) }
	before := failures()
	write("- 10.0.0.4:7\n- nonsense\n")
	testkit.Eventually(t, "the mistake is seen", func() bool { return failures() > before })
	if got := shown(u); got != "10.0.0.3:7" {
		t.Errorf("after a mistake: %s", got)
	}
	before = failures()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "it is seen that the file is gone", func() bool { return failures() > before })
	if got := shown(u); got != "10.0.0.3:7" {
		t.Errorf("without the file: %s", got)
	}
	write("- 10.0.0.5:7\n")
	testkit.Settles(t, "the set of the new file", "10.0.0.5:7", func() string { return shown(u) })
}

func TestFileIsBounded(t *testing.T) {
	dir := t.TempDir()
	for name, tc := range map[string]struct {
		make func(path string) error
		want string
	}{
		"too large": {func(path string) error {
			return os.WriteFile(path, bytes.Repeat([]byte("#"), maxFile+1), 0o600)
		}, "has more than 4 MiB"},
		"too many": {func(path string) error {
			return os.WriteFile(path, bytes.Repeat([]byte("- 10.0.0.1:7\n"), maxEndpoints+1), 0o600)
		}, "has 16385 entries; 16384 are the most"},
		"a directory": {func(path string) error { return os.Mkdir(path, 0o700) }, "is not a regular file"},
		"a device":    {func(path string) error { return os.Symlink("/dev/zero", path) }, "is not a regular file"},
	} {
		path := filepath.Join(dir, name)
		if err := tc.make(path); err != nil {
			t.Fatal(err)
		}
		f := &File{Path: path}
		if err := f.Provision(ctxOf(t)); err != nil {
			t.Fatal(err)
		}
		if _, err := f.List(context.Background()); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %s", name, err, tc.want)
		}
	}
}

func FuzzParseFile(f *testing.F) {
	for _, s := range []string{
		`["10.0.0.1:7", {"addr": "[2001:db8::1]:7", "weight": 3, "priority": 2, "max_sessions": 64}]`,
		"- 10.0.0.1:7\n- addr: '[2001:db8::1]:7'\n  weight: 3\n", "- &a x\n- *a\n", "[", "- - - -", "---\n...\n", "%YAML 1.1\n---\n[]",
	} {
		f.Add("b.json", []byte(s))
		f.Add("b.yaml", []byte(s))
		f.Add("b", []byte(s))
	}
	f.Fuzz(func(t *testing.T, path string, b []byte) {
		list, err := parseFile(path, b)
		if err != nil && list != nil {
			t.Error("a list beside an error")
		}
		for _, e := range list {
			if !valid(e.Addr) || e.Addr.Addr().Is4In6() || e.Weight > 1_000_000 || e.MaxSessions < 0 {
				t.Errorf("endpoint %+v", e)
			}
		}
	})
}

func TestFilePath(t *testing.T) {
	t.Setenv("WAYHOUSE_TEST_DIR", "/run/game")
	for path, want := range map[string]string{
		"":                                 "path: missing, as in /run/game/backends.json",
		"{env.WAYHOUSE_NO_SUCH}/list.json": "path: evaluated placeholder {env.WAYHOUSE_NO_SUCH} is empty",
		"{env.WAYHOUSE_TEST_DIR}/l.json":   "",
	} {
		f := &File{Path: path}
		switch err := f.Provision(caddy.Context{}); {
		case want != "" && (err == nil || err.Error() != want):
			t.Errorf("%q: %v, want %s", path, err, want)
		case want == "" && (err != nil || f.Path != "/run/game/l.json"):
			t.Errorf("%q: %q, %v", path, f.Path, err)
		}
	}
}
