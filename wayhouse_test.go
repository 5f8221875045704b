package wayhouse_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/wayhouse-proxy/wayhouse"
)

var update = flag.Bool("update", false, "rewrite caddy.json.example")

// adapt turns a Caddyfile into JSON as "caddy adapt --pretty" prints it.
func adapt(t *testing.T, source []byte) []byte {
	t.Helper()
	out, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt(source, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range warnings {
		t.Errorf("line %d: %s", w.Line, w.Message)
	}
	var b bytes.Buffer
	if err := json.Indent(&b, out, "", "\t"); err != nil {
		t.Fatal(err)
	}
	b.WriteByte('\n')
	return b.Bytes()
}

func validate(t *testing.T, config []byte) {
	t.Helper()
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(config, &cfg); err != nil {
		t.Fatal(err)
	}
	if err := caddy.Validate(&cfg); err != nil {
		t.Error(err)
	}
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestExample(t *testing.T) {
	for _, file := range []string{"Caddyfile.example", "examples/third-party/Caddyfile"} {
		if source := read(t, file); !bytes.Equal(caddyfile.Format(source), source) {
			t.Errorf("%s is not as caddy fmt would write it", file)
		}
	}
	got := adapt(t, read(t, "Caddyfile.example"))
	if *update {
		if err := os.WriteFile("caddy.json.example", got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want := read(t, "caddy.json.example"); !bytes.Equal(got, want) {
		t.Errorf("Caddyfile.example adapts to\n%s\nnot to caddy.json.example", got)
	}
	validate(t, got)
}
