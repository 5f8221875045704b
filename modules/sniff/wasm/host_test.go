package wasm

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// guest is the assembled module of that name.
func guest(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "guests", name+ext))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// fill writes modules into a new directory.
func fill(t testing.TB, files map[string][]byte) string {
	t.Helper()
	dir := t.TempDir()
	for name, b := range files {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// slow is a call timeout for tests in which nothing may run out of time.
const slow = caddy.Duration(time.Minute)

// provision starts a host, which is cleaned up at the end of the test.
func provision(t testing.TB, h *Host) error {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	err := h.Provision(ctx)
	t.Cleanup(func() {
		cancel()
		if h.engine == nil {
			return
		}
		if err := h.Cleanup(); err != nil {
			t.Error(err)
		}
	})
	return err
}

// hostOf is a host with these files.
func hostOf(t testing.TB, timeout caddy.Duration, files map[string][]byte) *Host {
	t.Helper()
	h := &Host{Dir: fill(t, files), CallTimeout: &timeout}
	if err := provision(t, h); err != nil {
		t.Fatal(err)
	}
	return h
}

// one is a sniffer made of the guest of that name.
func one(t testing.TB, timeout caddy.Duration, name string) *sniffer {
	t.Helper()
	h := hostOf(t, timeout, map[string][]byte{"x.wasm": guest(t, name)})
	if h.loaded["x"] == nil {
		t.Fatalf("%s was not loaded", name)
	}
	return h.loaded["x"].sniffer
}

func TestConfig(t *testing.T) {
	zeros := strings.Repeat("0", 64)
	for in, want := range map[string]string{
		`{"dir": "."}`: "",
		`{"dir": ".", "call_timeout": "5ms", "max_memory": "1MiB", "modules": {"a": {"sha256": "` + zeros + `", "config": "x"}}}`: "",
		`{"dir": ".", "max_memory": 1}`:                                             "",
		`{}`:                                                                        "dir: ",
		`{"dir": ".", "call_timeout": 5}`:                                           "call_timeout: ",
		`{"dir": ".", "call_timeout": "-5ms"}`:                                      "call_timeout: ",
		`{"dir": ".", "max_memory": "8GiB"}`:                                        "max_memory: ",
		`{"dir": ".", "max_memory": "5 MB"}`:                                        "max_memory: \"5 MB\" is not a size",
		`{"dir": ".", "call_timeout": 0}`:                                           "call_timeout: 0s is less than 1ms; leave it out for 20ms",
		`{"dir": ".", "max_memory": 0}`:                                             "max_memory: 0 is not between 1 byte and 4GiB; leave it out for 16MiB",
		`{"dir": ".", "max_mem": 5}`:                                                "max_mem: unknown key; did you mean max_memory?",
		`{"dir": ".", "modules": {"a": {"sha": "0"}}}`:                              "modules.a.sha: unknown key",
		`{"dir": ".", "modules": {"a": {}}}`:                                        "modules.a.sha256: ",
		`{"dir": ".", "modules": {"a": null}}`:                                      "modules.a: ",
		`{"dir": ".", "modules": {"a": {"sha256": "` + zeros + `0"}}}`:              "modules.a.sha256: ",
		`{"dir": ".", "modules": {"a": {"sha256": "` + zeros + `", "config": ""}}}`: "modules.a.config: ",
		`{"dir": ".", "modules": {"a b": {"sha256": "` + zeros + `"}}}`:             `"a b"`,
		`{"dir": ".", "modules": {"": {"sha256": "` + zeros + `"}}}`:                "empty",
		`{"dir": "host.go"}`:                                                        "dir: ",
	} {
		h := new(Host)
		err := json.Unmarshal([]byte(in), h)
		if err == nil {
			err = provision(t, h)
		}
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", in, err, want)
		}
	}
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"wasm {\n dir /d\n call_timeout 5ms\n max_memory 1MiB\n module a {\n sha256 00\n config \"b c\"\n }\n module d {\n sha256 11\n }\n}": `{"dir":"/d","call_timeout":5000000,"max_memory":1048576,"modules":{"a":{"sha256":"00","config":"b c"},"d":{"sha256":"11"}}}`,
		"wasm /d":                `unexpected argument "/d" of wasm`,
		"wasm {\n module\n}":     "module: a name is missing",
		"wasm {\n module a b\n}": `unexpected argument "b" of module a`,
		"wasm {\n module a {\n}\n module a {\n}\n}":    "module a: given twice",
		"wasm {\n module a {\n hash 00\n}\n}":          `unrecognized option "hash" of module a`,
		"wasm {\n dir a\n dir b\n}":                    "dir: given twice",
		"wasm {\n timeout 5ms\n}":                      `unrecognized option "timeout" of wasm`,
		"wasm {\n module a {\n config a\n config b\n}": "config: given twice",
	} {
		h := new(Host)
		var got string
		if err := h.UnmarshalCaddyfile(caddyfile.NewTestDispenser(in)); err != nil {
			got = err.Error()
		} else {
			b, _ := json.Marshal(h)
			got = string(b)
		}
		if !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

// quiet waits until the memory of earlier calls is clean: a call that may take no
// longer than a machine that is busy takes for that would find no slot.
func (e *engine) quiet() {
	for range cap(e.slots) {
		e.slots <- struct{}{}
	}
	for range cap(e.slots) {
		<-e.slots
	}
}

// listed is a list of guests with what has to become of them.
type listed struct {
	Guests []struct {
		File    string
		Load    string
		Timeout int `json:"call_timeout_ms"`
		Calls   []struct {
			Input     hexBytes `json:"input_hex"`
			Config    string
			Result    string
			Host, Key *string
			Reject    bool
		}
	}
}

func TestGuests(t *testing.T) {
	b, err := os.ReadFile("testdata/guests.json")
	if err != nil {
		t.Fatal(err)
	}
	var list listed
	if err := json.Unmarshal(b, &list); err != nil {
		t.Fatal(err)
	}
	e, err := takeEngine()
	if err != nil {
		t.Fatal(err)
	}
	defer e.give()
	seen := 0
	for _, g := range list.Guests {
		name := strings.TrimSuffix(g.File, ".wat")
		t.Run(name, func(t *testing.T) {
			seen++
			l := limits{timeout: time.Second, memory: defaultMemory}
			for _, c := range g.Calls {
				if c.Result == "timeout" {
					l.timeout = defaultTimeout
				}
			}
			if name == "loop-start" {
				l.timeout = defaultTimeout
			}
			m, err := e.load(guest(t, name), l)
			if got := reasonOf(err); err != nil {
				if !strings.Contains("|"+g.Load+"|", "|"+string(got)+"|") {
					t.Errorf("refused as %s, want %s: %v", got, g.Load, err)
				}
				return
			}
			if g.Load != "ok" {
				t.Errorf("loaded, want %s", g.Load)
			}
			for i, c := range g.Calls {
				m, err := e.load(guest(t, name), l)
				if err != nil {
					t.Fatal(err)
				}
				s := e.newSniffer(name, c.Config, m, l, caddy.Log())
				var h sniff.Hint
				e.quiet()
				v := s.Sniff(&sniff.Input{Bytes: c.Input}, &h)
				if got := result(v, &h); got != c.Result {
					t.Errorf("call %d: %s, want %s", i, got, c.Result)
				}
				if v == sniff.Recognised {
					if got := optional(h.HasHost, h.Host); got != wanted(c.Host) {
						t.Errorf("call %d: host %s, want %s", i, got, wanted(c.Host))
					}
					if got := optional(h.HasKey, h.Key); got != wanted(c.Key) {
						t.Errorf("call %d: key %s, want %s", i, got, wanted(c.Key))
					}
					if h.Reject != c.Reject {
						t.Errorf("call %d: reject %v", i, h.Reject)
					}
				}
				s.close()
			}
			e.unload(m)
		})
	}
	if seen < 49 {
		t.Errorf("%d guests were tried, want 49", seen)
	}
	if len(e.modules) != 0 {
		t.Errorf("%d modules are left", len(e.modules))
	}
}

func result(v sniff.Verdict, h *sniff.Hint) string {
	switch {
	case v == sniff.Recognised:
		return "ok"
	case v == sniff.Unrecognised:
		return "unrecognised"
	}
	return map[sniff.Fault]string{sniff.Timeout: "timeout", sniff.Trap: "trap", sniff.BadOutput: "bad_output", sniff.Busy: "busy", sniff.Broken: "broken"}[h.Fault]
}

func optional(has bool, b []byte) string {
	if !has {
		return "none"
	}
	return `"` + string(b) + `"`
}

func wanted(s *string) string {
	if s == nil {
		return "none"
	}
	return `"` + *s + `"`
}

type hexBytes []byte

func (h *hexBytes) UnmarshalText(b []byte) (err error) {
	*h = make([]byte, hex.DecodedLen(len(b)))
	_, err = hex.Decode(*h, b)
	return err
}
