// Package forms tests that the three forms of a config say the same.
package forms

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/wayhouse-proxy/wayhouse"
)

var update = flag.Bool("update", false, "write the JSON of testdata anew, from the YAML")

// TestForms adapts each scenario of testdata, which is there as YAML, as
// Caddyfile and as JSON.
func TestForms(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("%v, and %d scenarios, want 5 at least", err, len(files))
	}
	for _, file := range files {
		base := strings.TrimSuffix(file, ".yaml")
		t.Run(filepath.Base(base), func(t *testing.T) {
			fromYAML := adapt(t, "wayhouse", file)
			if *update {
				b, err := json.MarshalIndent(decode(t, fromYAML), "", "\t")
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(base+".json", append(b, '\n'), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			written := read(t, base+".json")
			want := decode(t, written)
			if got := decode(t, fromYAML); !reflect.DeepEqual(got, want) {
				t.Errorf("YAML says\n%s\nand the JSON\n%s", indented(t, got), indented(t, want))
			}
			if got := decode(t, adapt(t, "caddyfile", base+".Caddyfile")); !reflect.DeepEqual(got, want) {
				t.Errorf("the Caddyfile says\n%s\nand the JSON\n%s", indented(t, got), indented(t, want))
			}
			var cfg caddy.Config
			if err := caddy.StrictUnmarshalJSON(written, &cfg); err != nil {
				t.Fatal(err)
			}
			if err := caddy.Validate(&cfg); err != nil {
				t.Error(err)
			}
		})
	}
}

func adapt(t *testing.T, adapter, file string) []byte {
	t.Helper()
	out, _, err := caddyconfig.GetAdapter(adapter).Adapt(read(t, file), map[string]any{"filename": file})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func decode(t *testing.T, b []byte) (v any) {
	t.Helper()
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
	return v
}

func indented(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return b
}
