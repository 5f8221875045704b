package proxy_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	_ "github.com/wayhouse-proxy/wayhouse"
)

var update = flag.Bool("update", false, "rewrite the JSON of the fixtures")

const dashes = "----------\n"

// adapt turns a Caddyfile into indented JSON.
func adapt(source []byte) (string, error) {
	out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(source, nil)
	if err != nil {
		return "", err
	}
	var b bytes.Buffer
	if err := json.Indent(&b, out, "", "\t"); err != nil {
		return "", err
	}
	return b.String() + "\n", nil
}

// TestCaddyfile adapts the fixtures: each is a Caddyfile, a line of dashes,
// and the JSON, which has to be a good config, or a part of the error.
func TestCaddyfile(t *testing.T) {
	files, err := filepath.Glob("testdata/caddyfile/*.caddytest")
	if err != nil || len(files) == 0 {
		t.Fatalf("fixtures: %v, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddytest"), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			source, want, ok := strings.Cut(string(b), dashes)
			if !ok {
				t.Fatalf("%s has no line of ten dashes", file)
			}
			if tidy := string(caddyfile.Format([]byte(source))); tidy != source {
				t.Errorf("caddy fmt would write\n%s", tidy)
			}
			got, err := adapt([]byte(source))
			if err != nil {
				if want = strings.TrimSpace(want); want == "" || strings.HasPrefix(want, "{") || !strings.Contains(err.Error(), want) {
					t.Errorf("error %q, want %q", err, want)
				}
				return
			}
			if *update {
				if err := os.WriteFile(file, []byte(source+dashes+got), 0o644); err != nil {
					t.Fatal(err)
				}
				want = got
			}
			if got != want {
				t.Errorf("got\n%swant\n%s", got, want)
			}
			var cfg caddy.Config
			if err := json.Unmarshal([]byte(got), &cfg); err != nil {
				t.Fatal(err)
			}
			if err := caddy.Validate(&cfg); err != nil {
				t.Errorf("not a good config: %v", err)
			}
		})
	}
}
