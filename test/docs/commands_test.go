package docs

import (
	"fmt"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
	"mvdan.cc/sh/v3/syntax"

	"github.com/wayhouse-proxy/wayhouse/modules/adminapi"
)

// others are commands of which nothing is known but that there are such. One
// that is missing here is either a typing error or to be added.
var others = strings.Fields(`
	[ apt apt-get awk base64 cat cd chmod chown cp cut date dd docker dpkg dpkg-deb echo ethtool exec export false getent git grep gunzip gzip
	head helm hostname id install ip iptables journalctl jq kill kubectl ln ls mkdir mktemp mv nc nft nproc nstat openssl ping pgrep printf promtool
	prlimit ps pwd pgrep read rm sed seq sh sha256sum sleep sort ss sudo sysctl systemctl systemd-analyze systemd-cgls tail tar tc tcpdump tee test time
	timeout touch tr true ulimit umask uname useradd watch wc wget xargs xcaddy`)

// wrappers are commands whose arguments are a command.
var wrappers = []string{"exec", "nohup", "sudo", "time", "timeout", "watch"}

// checker knows what the commands of the documents may name.
type checker struct {
	t       *testing.T
	root    *cobra.Command
	routes  map[string][]string // of the admin API: pattern → methods
	targets map[string]bool     // of make
	dirs    []string            // of the repository
}

func newChecker(t *testing.T) *checker {
	t.Helper()
	c := &checker{t: t, root: &cobra.Command{Use: "wayhouse"}, routes: make(map[string][]string), targets: make(map[string]bool)}
	for _, cc := range caddycmd.Commands() {
		cmd := &cobra.Command{Use: strings.TrimSpace(cc.Name + " " + cc.Usage), Run: func(*cobra.Command, []string) {}}
		if cc.CobraFunc != nil {
			cc.CobraFunc(cmd)
		} else {
			cmd.Flags().AddGoFlagSet(cc.Flags)
		}
		c.root.AddCommand(cmd)
	}
	c.root.InitDefaultHelpCmd()
	c.root.InitDefaultCompletionCmd()

	// A route tells its methods to whoever comes with another.
	for _, r := range new(adminapi.API).Routes() {
		w := httptest.NewRecorder()
		r.Handler.ServeHTTP(w, httptest.NewRequest("TRACE", "/", nil))
		if allow := w.Header().Get("Allow"); allow != "" {
			c.routes[r.Pattern] = strings.Split(allow, ", ")
		}
	}
	if len(c.routes) < 20 {
		t.Fatalf("only %d calls of the admin API were found", len(c.routes))
	}
	for pattern, methods := range caddyRoutes {
		c.routes[pattern] = strings.Fields(methods)
	}

	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):( |$)`).FindAllStringSubmatch(string(makefile), -1) {
		c.targets[m[1]] = true
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() && e.Name()[0] != '.' && e.Name() != "bin" && e.Name() != "dist" {
			c.dirs = append(c.dirs, e.Name())
		}
	}
	return c
}

// caddyRoutes are the calls of Caddy's admin endpoint.
var caddyRoutes = map[string]string{
	"/load": "POST", "/adapt": "POST", "/stop": "POST", "/metrics": "GET", "/reverse_proxy/upstreams": "GET",
	"/config/{path...}": "DELETE GET PATCH POST PUT", "/id/{path...}": "DELETE GET PATCH POST PUT",
	"/debug/pprof/{path...}": "GET", "/debug/vars": "GET",
}

// script checks a text that a shell would take. Where strict is false, commands
// that are not known are no mistake.
func (c *checker) script(text string, strict bool) (wrong []string) {
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(text), "")
	if err != nil {
		return []string{fmt.Sprintf("not for a shell: %v", err)}
	}
	functions := make(map[string]bool)
	syntax.Walk(file, func(n syntax.Node) bool {
		switch n := n.(type) {
		case *syntax.FuncDecl:
			functions[n.Name.Value] = true
		case *syntax.CallExpr:
			var words []string
			for _, w := range n.Args {
				words = append(words, wordText(text, w))
			}
			if len(words) > 0 && !functions[words[0]] {
				wrong = append(wrong, c.command(words, strict)...)
			}
		}
		return true
	})
	return wrong
}

// wordText is a word as the command would get it, with expansions as they are
// written.
func wordText(text string, w *syntax.Word) string {
	var b strings.Builder
	var parts func([]syntax.WordPart)
	parts = func(list []syntax.WordPart) {
		for _, part := range list {
			switch part := part.(type) {
			case *syntax.Lit:
				b.WriteString(part.Value)
			case *syntax.SglQuoted:
				b.WriteString(part.Value)
			case *syntax.DblQuoted:
				parts(part.Parts)
			default:
				b.WriteString(text[part.Pos().Offset():part.End().Offset()])
			}
		}
	}
	parts(w.Parts)
	return b.String()
}

// command checks one command with its arguments.
func (c *checker) command(words []string, strict bool) (wrong []string) {
	name := words[0]
	for slices.Contains(wrappers, name) && len(words) > 1 {
		words = words[1:]
		for len(words) > 1 && (strings.HasPrefix(words[0], "-") || regexp.MustCompile(`^[0-9]+[smh]?$`).MatchString(words[0])) {
			if words[0] == "-u" || words[0] == "-n" {
				words = words[1:]
			}
			words = words[1:]
		}
		name = words[0]
	}
	wrong = append(wrong, c.files(words)...)
	switch base := path.Base(name); {
	case base == "wayhouse" || base == "wayhouse-custom" || base == "wayhouse-minimal":
		return append(wrong, c.wayhouse(words[1:])...)
	case name == "curl":
		return append(wrong, c.curl(words[1:])...)
	case name == "make":
		for _, w := range words[1:] {
			if !strings.HasPrefix(w, "-") && !strings.Contains(w, "=") && !c.targets[w] {
				wrong = append(wrong, fmt.Sprintf("make %s: no such target", w))
			}
		}
	case name == "go" || slices.Contains(others, name) || strings.Contains(name, "/") || !strict:
	default:
		wrong = append(wrong, fmt.Sprintf("%s: no command that this test knows (see others)", name))
	}
	return wrong
}

// wayhouse checks arguments of the binary.
func (c *checker) wayhouse(args []string) (wrong []string) {
	var clean []string
	for _, a := range args { // [--flag VALUE] means that it may be left out
		if a = strings.Trim(a, "[]"); a != "" && a != "..." {
			clean = append(clean, a)
		}
	}
	if len(clean) == 0 || clean[0] == "…" {
		return nil
	}
	cmd, rest, err := c.root.Find(clean)
	if err != nil || cmd == c.root && !strings.HasPrefix(clean[0], "-") {
		return []string{fmt.Sprintf("wayhouse %s: no such command", clean[0])}
	}
	cmd.InitDefaultHelpFlag()
	if cmd != c.root && cmd.HasSubCommands() && len(rest) > 0 && regexp.MustCompile(`^[a-z]+$`).MatchString(rest[0]) {
		wrong = append(wrong, fmt.Sprintf("%s %s: no such command", cmd.CommandPath(), rest[0]))
	}
	for _, a := range rest {
		if a == "--" {
			break
		}
		if !strings.HasPrefix(a, "-") || a == "-" || regexp.MustCompile(`^-[0-9]`).MatchString(a) {
			continue
		}
		name, _, _ := strings.Cut(strings.TrimLeft(a, "-"), "=")
		known := cmd.Flag(name) != nil
		if !strings.HasPrefix(a, "--") {
			known = len(name) > 0 && cmd.Flags().ShorthandLookup(name[:1]) != nil
		}
		if !known {
			wrong = append(wrong, fmt.Sprintf("%s has no flag %s", cmd.CommandPath(), a))
		}
	}
	return wrong
}

// endpoint is where the admin API is in the documents.
var endpoint = regexp.MustCompile(`^(?:http://)?(?:localhost|127\.0\.0\.1|\[::1\]|wayhouse|localhost\.):?2019(/.*)?$`)

// curl checks requests to the admin endpoint.
func (c *checker) curl(args []string) (wrong []string) {
	method, url := "", ""
	for i := 0; i < len(args); i++ {
		next := func() string {
			if i++; i < len(args) {
				return args[i]
			}
			return ""
		}
		switch a := args[i]; {
		case a == "-X", a == "--request":
			method = next()
		case a == "-d", a == "-T", strings.HasPrefix(a, "--data"), a == "--json":
			next()
			if method == "" {
				method = "POST"
			}
		case a == "-H", a == "-o", a == "-w", a == "-m", a == "-u", a == "-F", a == "--unix-socket", a == "--cacert", a == "--resolve", a == "--max-time", a == "--retry":
			next()
		case endpoint.MatchString(a):
			url = a
		}
	}
	if url == "" {
		return nil
	}
	if method == "" {
		method = "GET"
	}
	to, _, _ := strings.Cut(endpoint.FindStringSubmatch(url)[1], "?")
	if !c.hasRoute(method, to) {
		wrong = append(wrong, fmt.Sprintf("the admin API has no %s %s", method, to))
	}
	return wrong
}

// hasRoute reports whether the admin endpoint answers a method on a path. A
// part of the path that a page leaves to the reader fits any name.
func (c *checker) hasRoute(method, to string) bool {
	parts := strings.Split(strings.TrimSuffix(to, "/"), "/")
	for pattern, methods := range c.routes {
		if !slices.Contains(methods, method) {
			continue
		}
		want := strings.Split(pattern, "/")
		given := parts
		if last := len(want) - 1; strings.HasSuffix(want[last], "...}") { // any path below
			want = want[:last]
			given = given[:min(len(given), last)]
		}
		if slices.EqualFunc(want, given, func(w, g string) bool { return w == g || strings.HasPrefix(w, "{") }) {
			return true
		}
	}
	return false
}

// files wants what looks like a file of the repository to be there.
func (c *checker) files(words []string, dirs ...string) (wrong []string) {
	for _, w := range words {
		if _, after, ok := strings.Cut(w, "="); ok {
			w = after
		}
		if w = strings.TrimPrefix(w, "@"); !c.ours(w) {
			continue
		}
		there := func(dir string) bool {
			found, err := filepath.Glob(filepath.Join(root, dir, strings.TrimSuffix(w, "...")))
			return err == nil && len(found) > 0
		}
		if !there("") && !slices.ContainsFunc(dirs, there) {
			wrong = append(wrong, fmt.Sprintf("%s: there is no such file", w))
		}
	}
	return wrong
}

// ours reports whether a word is a path in the repository.
func (c *checker) ours(w string) bool {
	first, rest, ok := strings.Cut(strings.TrimPrefix(w, "./"), "/")
	return ok && slices.Contains(c.dirs, first) && !strings.ContainsAny(rest, " {}$<>|:…") && !regexp.MustCompile(`[A-Z]{3}`).MatchString(strings.TrimSuffix(rest, "README.md"))
}

// indented are the commands by which an indented block is known to be one for
// a shell.
var indented = regexp.MustCompile(`^(\$ )?(sudo )?(bin/)?(wayhouse|curl|make|go run|go test|bench/setup\.sh)( |$)`)

// scripts are the commands of a block, each with its line. Of a console it is
// what stands behind a prompt, with the lines that it goes on in.
func (b *block) scripts() map[int]string {
	all := make(map[int]string)
	lines := strings.Split(strings.TrimSuffix(b.text, "\n"), "\n")
	switch {
	case b.kind == "sh":
		all[b.line] = b.text
	case b.kind == "console", b.kind == "indented":
		for i := 0; i < len(lines); i++ {
			line, prompt := strings.CutPrefix(lines[i], "$ ")
			if !prompt && (b.kind == "console" || !indented.MatchString(line)) {
				continue
			}
			at := b.line + i
			for strings.HasSuffix(line, `\`) && i+1 < len(lines) {
				i++
				line += "\n" + strings.TrimPrefix(lines[i], "> ")
			}
			all[at] = line
		}
	}
	return all
}

// TestCommands checks every command line of the documents, and commands, calls
// and files that their text names.
func TestCommands(t *testing.T) {
	c := newChecker(t)
	checked := 0
	for _, p := range pages(t) {
		for _, b := range p.blocks {
			for line, script := range b.scripts() {
				checked++
				for _, wrong := range c.script(script, b.kind != "indented") {
					t.Errorf("%s:%d: %s", p.path, line, wrong)
				}
			}
		}
		for _, span := range codeSpan.FindAllString(p.prose, -1) {
			for _, wrong := range c.span(strings.Trim(span, "`"), filepath.Dir(p.path)) {
				t.Errorf("%s: %s: %s", p.path, span, wrong)
			}
		}
	}
	if checked < 50 {
		t.Errorf("only %d commands were found", checked)
	}
}

var callSpan = regexp.MustCompile(`^(GET|POST|PUT|PATCH|DELETE) (/[^\s?]*)`)

// foreign are paths of other APIs that the documents name.
var foreign = []string{"/_ping"}

// span checks code inside a sentence of a page in dir.
func (c *checker) span(text, dir string) []string {
	if m := callSpan.FindStringSubmatch(text); m != nil && !c.hasRoute(m[1], m[2]) && !slices.Contains(foreign, m[2]) {
		return []string{"the admin API has no such call"}
	}
	if rest, ok := strings.CutPrefix(text, "wayhouse "); ok && regexp.MustCompile(`^[a-z][a-z-]*( |$)`).MatchString(rest) && !strings.ContainsAny(text, "{}|<>") {
		return c.script(text, false)
	}
	if rest, ok := strings.CutPrefix(text, "make "); ok {
		return c.command(append([]string{"make"}, strings.Fields(rest)...), false)
	}
	if !strings.Contains(text, " ") {
		return c.files([]string{text}, dir)
	}
	return nil
}

// TestChecker gives the checker mistakes: it has to find each, and none in what
// is right.
func TestChecker(t *testing.T) {
	c := newChecker(t)
	for script, want := range map[string]string{
		"wayhouse run --config Caddyfile --watch":                   "",
		"wayhouse show pools lobby --json | jq .":                   "",
		"wayhouse doctor [--config FILE [--adapter NAME]] [--json]": "",
		"until bin/wayhouse show pools; do sleep 1; done":           "",
		"curl -X PATCH -d '{}' localhost:2019/pools/a/backends/b:1": "",
		"curl -s 'localhost:2019/sessions?pool=lobby'":              "",
		"curl --data-binary @my.json localhost:2019/load":           "",
		"make build test":                                              "",
		"go run ./bench/cmd/bench -list":                               "",
		"wayhouse rum --config Caddyfile":                              "no such command",
		"sudo -u wayhouse wayhouse show pools --jsno":                  "no flag --jsno",
		"wayhouse overlay promot":                                      "no such command",
		"if x=$(wayhouse show pool --watch --tree); then echo $x; fi":  "no flag --tree",
		"curl -X PUT localhost:2019/pools/a/backends/b:1":              "no PUT /pools",
		"curl localhost:2019/poolz | jq .":                             "no GET /poolz",
		"curl -d '{}' localhost:2019/sessions":                         "no POST /sessions",
		"make biuld":                                                   "no such target",
		"go run ./bench/cmd/bank":                                      "no such file",
		"promtool check rules deploy/prometheus/alarms.yml":            "no such file",
		"wayhose run":                                                  "no command that this test knows",
		"echo 'unfinished":                                             "not for a shell",
		"wayhouse show sessions && wayhouse close session --everybody": "no flag --everybody",
	} {
		got := strings.Join(c.script(script, true), "; ")
		if (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	for text, broken := range map[string]bool{
		"GET /pools/{pool}": false, "GET /pool": true, "GET /config/": false, "GET /config/apps/wayhouse": false, "POST /pools/{pool}/backends": false, "GET /": true, "DELETE /overlay?pool=NAME": false, "wayhouse quick": false, "wayhouse quik": true,
		"wayhouse/NAME": false, "make lint": false, "make lnt": true, "deploy/prometheus/rules.yml": false, "deploy/prometheus/rule.yml": true,
		"modules/listener/prompt.go": false, "listener/": false,
	} {
		if got := c.span(text, "docs"); (len(got) > 0) != broken {
			t.Errorf("%s: %v", text, got)
		}
	}
}
