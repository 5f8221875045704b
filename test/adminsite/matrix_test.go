package adminsite

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/adminapi"
)

// call is what a method at a path needs and answers when it has no body.
type call struct {
	role    string // the least: none, read, operate or admin
	status  int
	changes bool   // it is not refused without a body, and changes something
	undone  string // path to which a POST undoes that
}

// route is a path that stands for a pattern, and its calls by method.
type route struct {
	path  string
	calls map[string]call
}

// table are all routes of the API. A route that is not here fails the test.
var table = map[string]route{
	"/healthz":               {"/healthz", map[string]call{"GET": {role: "none", status: 200}}},
	"/readyz":                {"/readyz", map[string]call{"GET": {role: "none", status: 200}}},
	"/pools":                 {"/pools", map[string]call{"GET": {role: "read", status: 200}}},
	"/pools/{pool}":          {"/pools/lobby", map[string]call{"GET": {role: "read", status: 200}}},
	"/listeners":             {"/listeners", map[string]call{"GET": {role: "read", status: 200}}},
	"/sessions":              {"/sessions", map[string]call{"GET": {role: "read", status: 200}}},
	"/sessions/{id}":         {"/sessions/t-ffffff", map[string]call{"GET": {role: "read", status: 404}, "DELETE": {role: "operate", status: 404}}},
	"/sessions/resolve":      {"/sessions/resolve", map[string]call{"GET": {role: "read", status: 400}}},
	"/pools/{pool}/backends": {"/pools/lobby/backends", map[string]call{"POST": {role: "operate", status: 400}}},
	"/pools/{pool}/backends/{addr}": {"/pools/lobby/backends/192.0.2.1:1",
		map[string]call{"PATCH": {role: "operate", status: 400}, "DELETE": {role: "operate", status: 404}}},
	"/overlay":               {"/overlay", map[string]call{"GET": {role: "read", status: 200}, "DELETE": {role: "admin", status: 200, changes: true}}},
	"/admin/drain":           {"/admin/drain", map[string]call{"POST": {role: "operate", status: 204, changes: true, undone: "/admin/undrain"}}},
	"/admin/undrain":         {"/admin/undrain", map[string]call{"POST": {role: "operate", status: 204, changes: true}}},
	"/explain":               {"/explain", map[string]call{"POST": {role: "operate", status: 400}}},
	"/route-hint":            {"/route-hint", map[string]call{"POST": {role: "operate", status: 400}}},
	"/route-hints":           {"/route-hints", map[string]call{"GET": {role: "read", status: 200}}},
	"/admin/overload":        {"/admin/overload", map[string]call{"GET": {role: "read", status: 200}, "POST": {role: "admin", status: 400}}},
	"/admin/reload":          {"/admin/reload", map[string]call{"POST": {role: "admin", status: 204, changes: true}}},
	"/admin/sniffers":        {"/admin/sniffers", map[string]call{"GET": {role: "read", status: 200}, "POST": {role: "admin", status: 400}}},
	"/admin/sniffers/{name}": {"/admin/sniffers/nobody", map[string]call{"DELETE": {role: "admin", status: 404}}},
	"/admin/sniffers/{name}/rollback": {"/admin/sniffers/nobody/rollback",
		map[string]call{"POST": {role: "admin", status: 404}}},
	"/web": {"/web", map[string]call{"GET": {role: "read", status: 404}}},
	"/wayhouse/config/last-rejected": {"/wayhouse/config/last-rejected",
		map[string]call{"GET": {role: "read", status: 404}}},
	"/route-hints/{src_ip}": {"/route-hints/192.0.2.1", map[string]call{"DELETE": {role: "operate", status: 404}}},
}

// metricsRoute is on a site alone; at the other door it is Caddy's.
var metricsRoute = route{"/metrics", map[string]call{"GET": {role: "read", status: 200}}}

var methods = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get"}

// forms are ways to write a path. Only the first is the path itself.
var forms = []struct {
	name    string
	of      func(string) string
	headers []string
	same    bool // it is the same call
	cleaned bool // Go's mux knows what is meant, and says so
}{
	{name: "plain", of: func(p string) string { return p }, same: true},
	{name: "with a query", of: func(p string) string { return p + "?format=json" }, same: true},
	{name: "method override", of: func(p string) string { return p }, same: true,
		headers: []string{"X-HTTP-Method-Override", "DELETE", "X-Method-Override", "POST", "X-HTTP-Method", "PATCH"}},
	{name: "rewritten URL", of: func(p string) string { return p }, same: true,
		headers: []string{"X-Original-URL", "/healthz", "X-Rewrite-URL", "/healthz", "X-Forwarded-Prefix", "/healthz"}},
	{name: "trailing slash", of: func(p string) string { return p + "/" }},
	{name: "double slash", of: func(p string) string { return "/" + p }, cleaned: true},
	{name: "double slash inside", of: func(p string) string { return path.Dir(p) + "//" + path.Base(p) }, cleaned: true},
	{name: "dot", of: func(p string) string { return "/." + p }, cleaned: true},
	{name: "dots", of: func(p string) string { return "/healthz/.." + p }, cleaned: true},
	{name: "encoded dot", of: func(p string) string { return "/%2e" + p }},
	{name: "encoded dots", of: func(p string) string { return "/healthz/%2E%2e" + p }},
	{name: "encoded slash", of: func(p string) string { return "/%2f" + strings.ReplaceAll(p[1:], "/", "%2f") }},
	{name: "encoded slash inside", of: func(p string) string { return "/" + strings.ReplaceAll(p[1:], "/", "%2F") + "%2f" }},
	{name: "upper case", of: strings.ToUpper},
	{name: "back slash", of: func(p string) string { return "/healthz\\.." + p }},
	{name: "semicolon", of: func(p string) string { return "/healthz;" + p }},
	{name: "NUL", of: func(p string) string { return "/%00" + p }},
}

// methodsOf are the methods that a form is tried with. With the race detector,
// which is slow, ways to write another path are tried with fewer.
func methodsOf(same bool) []string {
	if kit.Race && !same {
		return []string{"GET", "POST", "DELETE"}
	}
	return methods
}

// rank orders roles.
func rank(role string) int { return slices.Index([]string{"none", "read", "operate", "admin"}, role) }

// matrixConfig is a config in which every call of the table answers.
func matrixConfig(t *testing.T) kit.M {
	return kit.App(kit.M{"game": kit.With(kit.ToPool("lobby", "tcp/"+kit.Local(kit.Port(t))), kit.M{"route_hint": true})},
		kit.M{"lobby": kit.Pool("127.0.0.1:9")}, kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": t.TempDir()}}})
}

// inventory fails the test for routes that are not in the table, or are in it
// with other methods than they have.
func inventory(t *testing.T, c *client) {
	t.Helper()
	missing := maps.Clone(table)
	for _, r := range new(adminapi.API).Routes() {
		if r.Pattern == "POST /load" {
			continue // Caddy's own, which is heard there; a site has none
		}
		want, ok := table[r.Pattern]
		if !ok {
			t.Errorf("the route %s is not in the table", r.Pattern)
			continue
		}
		delete(missing, r.Pattern)
		allowed := strings.Join(slices.Sorted(maps.Keys(want.calls)), ", ")
		if got := c.do("PROPFIND", want.path).header.Get("Allow"); got != allowed {
			t.Errorf("%s allows %s, want %s", r.Pattern, got, allowed)
		}
	}
	for pattern := range missing {
		t.Errorf("there is no route %s", pattern)
	}
}

// state is all that calls could change, as the admin endpoint tells it.
func state(c *client) string {
	var b strings.Builder
	for _, p := range slices.Sorted(maps.Keys(table)) {
		if r := table[p]; r.calls["GET"].status == 200 && !strings.Contains(p, "{") {
			b.WriteString(p + ": " + c.do("GET", r.path).body + "\n")
		}
	}
	version := regexp.MustCompile(`(?m)^wayhouse_(config_version|config_reload_total)\b.*$`)
	b.WriteString(strings.Join(version.FindAllString(c.do("GET", "/metrics").body, -1), "\n"))
	return b.String()
}

// TestMatrixOfSite asks for every route with every method, token and way to
// write the path.
func TestMatrixOfSite(t *testing.T) {
	config, addr := both(t, matrixConfig(t), handler())
	p := kit.Start(t, config, kit.Options{})
	local := newClient(t, "unix", socket(p))
	inventory(t, local)

	type holder struct {
		name    string
		rank    int // -1: hears 401
		headers []string
		from    string
	}
	holders := []holder{
		{"none", -1, nil, "127.0.0.2"},
		{"empty", -1, []string{"Authorization", "Bearer "}, "127.0.0.2"},
		{"basic", -1, []string{"Authorization", "Basic " + tokens["admin"]}, "127.0.0.2"},
		{"actor alone", -1, []string{"X-Actor", "admin"}, "127.0.0.2"},
		{"wrong", -1, []string{"Authorization", "Bearer wrong-token-01234567"}, ""},
		{"two", -1, append(bearer("admin"), bearer("admin")...), ""},
		{"read", 1, bearer("read"), "127.0.0.2"},
		{"operate", 2, bearer("operate"), "127.0.0.2"},
		{"admin", 3, bearer("admin"), "127.0.0.2"},
	}
	steady := newClient(t, "tcp", addr)
	steady.from = "127.0.0.2"
	// Whoever guesses is kept waiting, so each address of these guesses little.
	guesses := 0
	var guesser *client
	clientOf := func(h holder) *client {
		if h.from != "" {
			return steady
		}
		if guesses%15 == 0 {
			if guesser != nil {
				guesser.close()
			}
			guesser = newClient(t, "tcp", addr)
			guesser.from = fmt.Sprintf("127.1.%d.%d", guesses/15/250, 1+guesses/15%250)
		}
		guesses++
		return guesser
	}
	routes := slices.Collect(maps.Values(table))
	routes = append(routes, metricsRoute, route{"/nowhere", nil}, route{"/", nil}, route{"/config/", nil}, route{"/config/apps", nil}, route{"/load", nil},
		route{"/stop", nil}, route{"/adapt", nil}, route{"/id/x", nil}, route{"/debug/pprof/", nil}, route{"/debug/vars", nil}, route{"/reverse_proxy/upstreams", nil})
	before := state(local)
	asked := 0
	denied := "" // the one answer of those who may not ask
	for _, r := range routes {
		for _, f := range forms {
			target := f.of(r.path)
			for _, method := range methodsOf(f.same) {
				known := r.calls[method]
				if method == "HEAD" {
					known = r.calls["GET"]
				}
				if !f.same {
					known = call{}
				}
				for _, h := range holders {
					var want int
					switch {
					case known.role == "none":
						want = known.status
					case h.rank < 0:
						want = 401
					case known.role != "" && h.rank < rank(known.role):
						want = 403
					case known.role != "":
						want = known.status
					case f.same && len(r.calls) > 0:
						want = 405
					default:
						want = 404
					}
					if known.changes && want == known.status {
						continue
					}
					a := clientOf(h).do(method, target, append(slices.Clone(h.headers), f.headers...)...)
					asked++
					if a.status != want {
						t.Errorf("%s %s (%s) with the token %s: %d %.200s, want %d", method, target, f.name, h.name, a.status, a.body, want)
					}
					if want == 401 {
						if a.header.Get("WWW-Authenticate") == "" {
							t.Errorf("%s %s with the token %s: 401 without WWW-Authenticate", method, target, h.name)
						}
						if h.name == "none" && method != "HEAD" {
							a.header.Del("Date")
							shape := fmt.Sprint(a.header, a.body)
							if denied == "" {
								denied = shape
							}
							if shape != denied {
								t.Errorf("%s %s without a token: %s; elsewhere it is %s", method, target, shape, denied)
							}
						}
					}
					if got := a.header.Get("Location"); got != "" {
						t.Errorf("%s %s sends to %s", method, target, got)
					}
					if t.Failed() && asked > 5000 {
						t.FailNow()
					}
				}
			}
		}
	}
	if after := state(local); after != before {
		t.Errorf("what was refused has changed\n%s\nto\n%s", before, after)
	}
	for _, r := range routes {
		for method, c := range r.calls {
			if c.changes {
				if a := steady.do(method, r.path, bearer(c.role)...); a.status != c.status {
					t.Errorf("%s %s as %s: %d %s, want %d", method, r.path, c.role, a.status, a.body, c.status)
				}
				if c.undone != "" {
					if a := steady.do("POST", c.undone, bearer(c.role)...); a.status != 204 {
						t.Errorf("POST %s as %s: %d %s, want 204", c.undone, c.role, a.status, a.body)
					}
				}
				p.WaitReady()
			}
		}
	}
	t.Logf("%d requests", asked)
}

// TestMatrixOfEndpoint does the same at Caddy's admin endpoint, where tokens say
// nothing.
func TestMatrixOfEndpoint(t *testing.T) {
	p := kit.Start(t, matrixConfig(t), kit.Options{})
	c := newClient(t, "unix", socket(p))
	inventory(t, c)
	before := state(c)
	asked := 0
	for _, r := range table {
		for _, f := range forms {
			target := f.of(r.path)
			for _, method := range methodsOf(f.same) {
				known := r.calls[method]
				if method == "HEAD" {
					known = r.calls["GET"]
				}
				want := 404
				switch {
				case f.same && known.changes:
					continue
				case f.same && known.role != "":
					want = known.status
				case f.same:
					want = 405
				case f.cleaned:
					want = 307
				}
				for _, headers := range [][]string{nil, bearer("read"), {"Authorization", "Bearer wrong-token-01234567"}} {
					a := c.do(method, target, append(slices.Clone(headers), f.headers...)...)
					asked++
					if a.status != want {
						t.Errorf("%s %s (%s): %d %.200s, want %d", method, target, f.name, a.status, a.body, want)
					}
				}
			}
		}
	}
	if after := state(c); after != before {
		t.Errorf("what was refused has changed\n%s\nto\n%s", before, after)
	}
	t.Logf("%d requests", asked)
}
