package wayhouse_test

import (
	"bytes"
	"encoding/json"
	"flag"
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

// pages are the documents with examples in them.
func pages(t *testing.T) []string {
	t.Helper()
	list := []string{"README.md", "examples/third-party/README.md"}
	err := filepath.WalkDir("docs", func(path string, _ os.DirEntry, err error) error {
		if filepath.Ext(path) == ".md" {
			list = append(list, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

var fence = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")

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

// TestDocs adapts and validates every example of the documents.
func TestDocs(t *testing.T) {
	for _, name := range []string{"WAYHOUSE_ADMIN_TOKEN", "WAYHOUSE_SCRAPE_TOKEN"} {
		t.Setenv(name, "the-value-of-"+name)
	}
	t.Setenv("CREDENTIALS_DIRECTORY", credentials(t))
	blocks := 0
	for _, page := range pages(t) {
		for _, m := range fence.FindAllSubmatch(read(t, page), -1) {
			kind, text := string(m[1]), m[2]
			t.Run(page, func(t *testing.T) {
				switch kind {
				case "caddyfile":
					if tidy := caddyfile.Format(text); !bytes.Equal(tidy, text) {
						t.Errorf("caddy fmt would write\n%s", tidy)
					}
					validate(t, adapt(t, text))
				case "yaml":
					out, _, err := caddyconfig.GetAdapter("wayhouse").Adapt(text, nil)
					if err != nil {
						t.Fatal(err)
					}
					validate(t, out)
				case "json":
					var part map[string]json.RawMessage
					if err := json.Unmarshal(text, &part); err != nil {
						t.Fatal(err)
					}
					if _, whole := part["apps"]; whole {
						validate(t, text)
					}
				case "":
					return
				default:
					t.Errorf("a block of %s, which nothing checks", kind)
				}
				blocks++
				if t.Failed() {
					t.Logf("%s", text)
				}
			})
		}
	}
	if blocks == 0 {
		t.Error("no examples were found")
	}
}

var link = regexp.MustCompile(`\]\(([^)#]+)`)

func TestLinks(t *testing.T) {
	linked := map[string]bool{"README.md": true, filepath.Join("docs", "README.md"): true}
	all := pages(t)
	for _, page := range all {
		for _, m := range link.FindAllSubmatch(read(t, page), -1) {
			to := string(m[1])
			if strings.HasPrefix(to, "https://") {
				continue
			}
			file := filepath.Join(filepath.Dir(page), to)
			if _, err := os.Stat(file); err != nil {
				t.Errorf("%s links to %s: %v", page, to, err)
			}
			linked[file] = true
		}
	}
	for _, page := range all {
		if !linked[page] && !strings.HasPrefix(page, filepath.Join("docs", "decisions")) {
			t.Errorf("no page links to %s", page)
		}
	}
}

// TestEveryModuleHasAPage looks for the IDs of the modules of this repository.
func TestEveryModuleHasAPage(t *testing.T) {
	var docs bytes.Buffer
	for _, page := range pages(t) {
		docs.Write(read(t, page))
	}
	root := reflect.TypeFor[nothing]().PkgPath()
	root = strings.TrimSuffix(root, "_test")
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
		if !strings.HasPrefix(typ.PkgPath(), root+"/") {
			continue
		}
		ours++
		if !bytes.Contains(docs.Bytes(), []byte(id)) {
			t.Errorf("no page names the module %s", id)
		}
	}
	if ours == 0 {
		t.Errorf("no module is below %s", root)
	}
}

type nothing struct{}
