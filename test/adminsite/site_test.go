package adminsite

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// begin starts a process by a Caddyfile whose site at addr has the admin API,
// and waits for it there, below prefix.
func begin(t *testing.T, caddyfile, addr, prefix string, env ...string) *kit.Process {
	t.Helper()
	p := kit.Prepare(t, nil, kit.Options{Env: env})
	file := filepath.Join(p.Dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(caddyfile), 0o600); err != nil {
		t.Fatal(err)
	}
	p.Begin("run", "--config", file)
	c := newClient(t, "tcp", addr)
	c.host = addr
	kit.Eventually(t, "the site is ready", func() bool {
		if p.Ended() {
			t.Fatalf("the process has ended: %s", p.Log())
		}
		return (c.c != nil || c.dial() == nil) && c.do("GET", prefix+"/readyz").status == http.StatusOK
	})
	return p
}

// TestBelowAPath has the site of the docs: the API below a path, with tokens from
// the environment and a file, and Caddy's endpoint off. Everything of the API
// works, with what loads a config.
func TestBelowAPath(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	dir := t.TempDir()
	file := filepath.Join(dir, "token")
	if err := os.WriteFile(file, []byte("of-the-file-0123456789\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	caddyfile := fmt.Sprintf(`{
	admin off
	persist_config off
	auto_https off
	wayhouse {
		sniffers wasm {
			dir %s
			call_timeout 10s
		}
		pool lobby {
			to 127.0.0.1:9
			health none
		}
		listener game tcp/%s {
			route {
				pool lobby
			}
		}
	}
}
http://%s {
	bind 127.0.0.1
	handle_path /wayhouse/* {
		wayhouse_admin {
			token {env.TEST_ADMIN_TOKEN}
			token {file.%s} read scraper
		}
	}
	respond "the rest" 200
}
`, filepath.Join(dir, "sniffers"), kit.Local(kit.Port(t)), addr, file)
	p := begin(t, caddyfile, addr, "/wayhouse", "TEST_ADMIN_TOKEN="+tokens["admin"])
	c := newClient(t, "tcp", addr)
	c.host = addr
	reader := []string{"Authorization", "Bearer of-the-file-0123456789"}
	for _, tc := range []struct {
		method, path, body string
		headers            []string
		want               int
		text               string
	}{
		{"GET", "/wayhouse/pools", "", bearer("admin"), 200, `"name":"lobby"`},
		{"GET", "/wayhouse/pools/lobby", "", reader, 200, `"name":"lobby"`},
		{"GET", "/wayhouse/metrics", "", reader, 200, "wayhouse_pool_backends{"},
		{"GET", "/wayhouse/healthz", "", nil, 200, "ok"},
		{"GET", "/wayhouse/pools", "", nil, 401, "a token is needed"},
		{"GET", "/wayhouse/", "", bearer("admin"), 404, "no such call"},
		{"GET", "/wayhouse/wayhouse/pools", "", bearer("admin"), 404, "no such call"},
		{"GET", "/wayhouse/config/", "", bearer("admin"), 404, "no such call"},
		{"GET", "/pools", "", bearer("admin"), 200, "the rest"},
		{"GET", "/wayhouse", "", bearer("admin"), 200, "the rest"},
		{"POST", "/wayhouse/route-hint", `{"src_ip": "192.0.2.1", "pool": "lobby"}`, reader, 403, "the token has the role read, and this needs operate"},
		{"POST", "/wayhouse/route-hint", `{"src_ip": "192.0.2.1", "pool": "lobby"}`, bearer("admin"), 204, ""},
		{"GET", "/wayhouse/route-hints", "", reader, 200, "192.0.2.1"},
		{"POST", "/wayhouse/admin/overload", `{"auto": true}`, append(bearer("admin"), "Content-Encoding", "gzip"), 415, "gzip"},
		{"POST", "/wayhouse/admin/reload", "", bearer("admin"), 204, ""},
		{"GET", "/wayhouse/pools", "", bearer("admin"), 200, "lobby"},
	} {
		a := c.send(tc.method, tc.path, tc.body, tc.headers...)
		if a.status != tc.want || !strings.Contains(a.body, tc.text) {
			t.Errorf("%s %s: %d %.300s, want %d with %q", tc.method, tc.path, a.status, a.body, tc.want, tc.text)
		}
	}

	// A module is loaded by the running config, which only this process has.
	module := guest(t, "key-only")
	upload := func(name string) answer {
		return c.send("POST", "/wayhouse/admin/sniffers?name="+name, string(module), append(bearer("admin"), "X-Actor", "alice")...)
	}
	if a := upload("game"); a.status != 204 {
		t.Errorf("uploading a sniffer: %d %s", a.status, a.body)
	}
	if a := upload("minecraft"); a.status != 422 || !strings.Contains(a.body, "two sniffers are named") {
		t.Errorf("uploading a sniffer that the config cannot be loaded with: %d %s, want 422", a.status, a.body)
	}
	var list []struct {
		Name   string
		Loaded bool
	}
	a := c.do("GET", "/wayhouse/admin/sniffers", reader...)
	if err := json.Unmarshal([]byte(a.body), &list); err != nil || len(list) != 1 || list[0].Name != "game" || !list[0].Loaded {
		t.Errorf("GET /admin/sniffers: %s, want game, loaded", a.body)
	}
	if a := c.do("DELETE", "/wayhouse/admin/sniffers/game", bearer("admin")...); a.status != 204 {
		t.Errorf("removing it: %d %s", a.status, a.body)
	}
	log := p.Log()
	for _, want := range []string{`"msg":"sniffer uploaded","sniffer":"game","actor":"alice"`, `"msg":"sniffer removed","sniffer":"game","actor":"admin"`} {
		if !strings.Contains(log, want) {
			t.Errorf("the log has no %s", want)
		}
	}
}

// guest is a module of the tests of the WASM host.
func guest(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "modules", "sniff", "wasm", "testdata", "guests", name+".wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestSiteRefused has configs that do not start, and say why and where.
func TestSiteRefused(t *testing.T) {
	port := kit.Port(t)
	for name, tc := range map[string]struct{ site, want string }{
		"open to all":   {fmt.Sprintf("http://:%d {\n\twayhouse_admin\n}", port), "tokens: none, and the site listens on"},
		"a host's name": {fmt.Sprintf("http://localhost:%d {\n\twayhouse_admin\n}", port), "tokens: none, and the site listens on"},
		"no file":       {fmt.Sprintf("http://:%d {\n\twayhouse_admin {\n\t\ttoken {file./nonexistent/token}\n\t}\n}", port), "tokens[0].token: open /nonexistent/token"},
		"unset":         {fmt.Sprintf("http://:%d {\n\twayhouse_admin {\n\t\ttoken {env.TEST_NOT_SET}\n\t}\n}", port), "tokens[0].token: {env.TEST_NOT_SET} is not set"},
		"short":         {fmt.Sprintf("http://:%d {\n\twayhouse_admin {\n\t\ttoken hunter2\n\t}\n}", port), "tokens[0].token: 7 bytes are fewer than 16"},
		"below a path":  {fmt.Sprintf("http://:%d {\n\thandle_path /x/* {\n\t\twayhouse_admin\n\t}\n}", port), "tokens: none, and the site listens on"},
	} {
		t.Run(name, func(t *testing.T) {
			p := kit.Prepare(t, nil, kit.Options{})
			file := filepath.Join(p.Dir, "Caddyfile")
			if err := os.WriteFile(file, []byte("{\n\tadmin off\n}\n"+tc.site+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			p.Begin("run", "--config", file)
			if code := p.Exit(); code == 0 || !strings.Contains(p.Log(), tc.want) {
				t.Errorf("exit code %d, want one other than 0, and an error with %q; log: %s", code, tc.want, p.Log())
			}
			if strings.Contains(p.Log(), "hunter2") {
				t.Errorf("the log tells the token")
			}
		})
	}
}
