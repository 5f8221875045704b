// Package recipes runs the configs of docs/recipes as they stand on their pages,
// in a world that has the addresses they name, and sees where players get to.
package recipes

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/wayhouse-proxy/wayhouse"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/lint"
)

func TestMain(m *testing.M) {
	// Most of the time they wait for servers to be found down.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	kit.Main(m)
}

// recipes are what is tried of each page, block by block.
var recipes = map[string][]func(*site){
	"bedrock":                {bedrock},
	"behind-a-scrubber":      {scrubber},
	"blue-green":             {blueGreen, canary},
	"docker-compose":         {compose},
	"factorio-and-terraria":  {worlds},
	"fivem":                  {fivem},
	"from-haproxy-and-nginx": {haproxy, nginx},
	"kubernetes":             {pods, gameServers},
	"match-containers":       {ports, matchmaker, passes},
	"minecraft-network":      {minecraft},
	"quic-game":              {quicGame},
	"regions":                {regions, countries},
	"source-servers":         {source},
	"under-attack":           {attack},
	"voice":                  {shards, follow},
}

// TestRecipes runs every Caddyfile of every page.
func TestRecipes(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(dir, "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".md")
		if name == "README" {
			continue
		}
		p := read(t, name)
		tries := recipes[name]
		if len(tries) == 0 || len(tries) != len(p.blocks) {
			t.Errorf("%s has %d Caddyfiles, of which %d are tried", name, len(p.blocks), len(tries))
			continue
		}
		for i, try := range tries {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				try(newSite(t, p, p.blocks[i]))
			})
		}
	}
	for name := range recipes {
		if _, err := os.Stat(filepath.Join(dir, name+".md")); err != nil {
			t.Errorf("a recipe without a page: %v", err)
		}
	}
}

const dir = "../../docs/recipes"

// page is a page of docs/recipes.
type page struct {
	name, text string
	blocks     []string // its Caddyfiles
	others     []string // other files
}

// fence is a block of the page: a Caddyfile, also where it says no language as
// it needs files to be there, or something else.
var fence = regexp.MustCompile("(?ms)^```[a-z]*\n(.*?)^```$")

func read(t *testing.T, name string) *page {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name+".md"))
	if err != nil {
		t.Fatal(err)
	}
	p := &page{name: name, text: string(b)}
	for _, m := range fence.FindAllStringSubmatch(p.text, -1) {
		if strings.HasPrefix(m[1], "{\n\twayhouse {\n") {
			p.blocks = append(p.blocks, m[1])
		} else {
			p.others = append(p.others, m[1])
		}
	}
	return p
}

// command is the one command of the page that begins with these words.
func (p *page) command(t *testing.T, words string) string {
	t.Helper()
	var found []string
	for line := range strings.Lines(p.text) {
		if line, ok := strings.CutPrefix(line, "    "); ok && strings.HasPrefix(line, words) {
			command, _, _ := strings.Cut(line, " #")
			found = append(found, strings.TrimSpace(command))
		}
	}
	if len(found) != 1 {
		t.Fatalf("%s has the commands %q, want one that begins with %q", p.name, found, words)
	}
	return found[0]
}

// file is the one other file of the page that begins with these words.
func (p *page) file(t *testing.T, words string) string {
	t.Helper()
	var found []string
	for _, f := range p.others {
		if strings.HasPrefix(f, words) {
			found = append(found, f)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%s has %d files that begin with %q, want one", p.name, len(found), words)
	}
	return found[0]
}

// TestLint lets only those likely mistakes pass that a page speaks of.
func TestLint(t *testing.T) {
	t.Setenv("WAYHOUSE_TICKET_KEY", ticketKey)
	for name := range recipes {
		p := read(t, name)
		for _, block := range p.blocks {
			if tidy := caddyfile.Format([]byte(block)); string(tidy) != block {
				t.Errorf("%s: caddy fmt would write\n%s", name, tidy)
			}
			config, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(block), map[string]any{"filename": "Caddyfile"})
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			found, err := lint.Check(config)
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			for _, f := range found {
				if !strings.Contains(p.text, "`"+f.Rule+"`") {
					t.Errorf("%s: %v", name, f)
				}
			}
		}
	}
}
