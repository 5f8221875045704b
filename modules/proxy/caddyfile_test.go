package proxy_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
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
	all := fixtures(t)
	withFiles(t)
	for _, f := range all {
		t.Run(f.name, func(t *testing.T) {
			source, want := f.source, f.want
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
				if err := os.WriteFile(f.file, []byte(source+dashes+got), 0o644); err != nil {
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
