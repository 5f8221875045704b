package yamlconfig_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/wayhouse-proxy/wayhouse"
)

// scenario is a document with something of everything. Tests change one thing in
// it.
func scenario(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile("testdata/everything.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func adapt(doc string) ([]byte, []caddyconfig.Warning, error) {
	return caddyconfig.GetAdapter("wayhouse").Adapt([]byte(doc), map[string]any{"filename": "game.yaml"})
}

// validate loads a config as "wayhouse validate" would.
func validate(config []byte) error {
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(config, &cfg); err != nil {
		return err
	}
	return caddy.Validate(&cfg)
}

// tidy is JSON with sorted keys and two spaces.
func tidy(t testing.TB, b []byte) string {
	t.Helper()
	var v any
	if err := json.Unmarshal(b, &v); err != nil {
		t.Fatalf("%v in %s", err, b)
	}
	out, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// changed is the scenario with one thing changed.
func changed(t testing.TB, doc, old, by string) string {
	t.Helper()
	if strings.Count(doc, old) != 1 {
		t.Fatalf("%q is %d times in the scenario, want once", old, strings.Count(doc, old))
	}
	return strings.Replace(doc, old, by, 1)
}
