package docs

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"go.yaml.in/yaml/v3"

	_ "github.com/wayhouse-proxy/wayhouse"
)

// kinds are what may stand behind a fence. Commands are another test's.
var kinds = map[string]func(*testing.T, []byte){
	"caddyfile": checkCaddyfile,
	"yaml":      checkYAML,
	"json":      checkJSON,
	"sh":        nil,
	"console":   nil,
	"text":      nil,
	"none":      nil,
	"indented":  nil,
}

// written are the Caddyfiles that commands of a page write.
var written = regexp.MustCompile(`(?ms)^cat >\S*\.?[cC]addyfile <<'EOF'\n(.*?)^EOF$`)

// TestExamples adapts and validates every example of the documents.
func TestExamples(t *testing.T) {
	for _, name := range []string{"WAYHOUSE_ADMIN_TOKEN", "WAYHOUSE_SCRAPE_TOKEN"} {
		t.Setenv(name, "the-value-of-"+name)
	}
	t.Setenv("CREDENTIALS_DIRECTORY", credentials(t))
	t.Setenv("WAYHOUSE_TICKET_KEY", "hex:30313233343536373839616263646566")
	checked := 0
	for _, p := range pages(t) {
		for _, b := range p.blocks {
			check, ok := kinds[b.kind]
			switch {
			case !ok:
				t.Errorf("%s:%d: a block of %s, which nothing checks", p.path, b.line, b.kind)
			case b.kind == "sh":
				for _, m := range written.FindAllStringSubmatch(b.text, -1) {
					checkCaddyfile(t, []byte(m[1]))
				}
			case check != nil:
				checked++
				t.Run(fmt.Sprintf("%s:%d", p.path, b.line), func(t *testing.T) {
					check(t, []byte(b.text))
					if t.Failed() {
						t.Logf("%s", b.text)
					}
				})
			}
		}
	}
	if checked < 70 {
		t.Errorf("only %d examples were found", checked)
	}
}

func checkCaddyfile(t *testing.T, text []byte) {
	if tidy := caddyfile.Format(text); !bytes.Equal(tidy, text) {
		t.Errorf("caddy fmt would write\n%s", tidy)
	}
	validate(t, adapt(t, "caddyfile", text))
}

// checkYAML takes a document of Wayhouse, or one of Kubernetes, Compose or
// Prometheus, of which it only wants to be read.
func checkYAML(t *testing.T, text []byte) {
	var first map[string]any
	if err := yaml.NewDecoder(bytes.NewReader(text)).Decode(&first); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"apiVersion", "services", "scrape_configs", "groups"} {
		if _, other := first[key]; other {
			return
		}
	}
	validate(t, adapt(t, "wayhouse", text))
}

// checkJSON takes a whole config, or a part of one, of which it only wants to
// be read.
func checkJSON(t *testing.T, text []byte) {
	var part map[string]json.RawMessage
	if err := json.Unmarshal(text, &part); err != nil {
		t.Fatal(err)
	}
	if _, whole := part["apps"]; whole {
		validate(t, text)
	}
}

// adapt turns a document into JSON.
func adapt(t *testing.T, adapter string, source []byte) []byte {
	t.Helper()
	out, warnings, err := caddyconfig.GetAdapter(adapter).Adapt(source, nil)
	if err != nil {
		t.Fatal(err)
	}
	if adapter == "caddyfile" {
		for _, w := range warnings {
			t.Errorf("line %d: %s", w.Line, w.Message)
		}
	}
	return out
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

// credentials is a directory with the files that examples have secrets in.
func credentials(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range map[string]string{
		"consul-token": "a-token\n",
		"kubeconfig": `{current-context: a, contexts: [{name: a, context: {cluster: b, user: c}}],
			clusters: [{name: b, cluster: {server: "https://192.0.2.1:6443"}}], users: [{name: c, user: {token: a-token}}]}`,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(strings.ReplaceAll(content, "\t", "")), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestEveryModuleHasAPage looks for the IDs of the modules of this repository.
func TestEveryModuleHasAPage(t *testing.T) {
	var all strings.Builder
	for _, p := range pages(t) {
		all.WriteString(p.text)
	}
	module := strings.TrimSuffix(reflect.TypeFor[page]().PkgPath(), "/test/docs")
	ours := 0
	for _, id := range caddy.Modules() {
		info, err := caddy.GetModule(id)
		if err != nil {
			t.Fatal(err)
		}
		typ := reflect.TypeOf(info.New())
		if typ.Kind() == reflect.Pointer {
			typ = typ.Elem()
		}
		if !strings.HasPrefix(typ.PkgPath(), module+"/") {
			continue
		}
		ours++
		if !strings.Contains(all.String(), id) {
			t.Errorf("no page names the module %s", id)
		}
	}
	if ours == 0 {
		t.Errorf("no module is below %s", module)
	}
}
