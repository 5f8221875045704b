package serve

import (
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// guest is a module of the test guests of the WASM host.
func guest(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "modules", "sniff", "wasm", "testdata", "guests", name+".wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// files are the names in a directory, with what is in them.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	m := make(map[string]string)
	for _, e := range entries {
		b, _ := os.ReadFile(filepath.Join(dir, e.Name()))
		m[e.Name()] = string(b)
	}
	return m
}

type snifferInfo struct {
	Name, SHA256     string
	SizeBytes        int64 `json:"size_bytes"`
	Loaded, Fallback bool
	HasPrevious      bool `json:"has_previous"`
}

func (i snifferInfo) is(b []byte, loaded, previous bool) bool {
	sum := sha256.Sum256(b)
	return i.SHA256 == hex.EncodeToString(sum[:]) && i.SizeBytes == int64(len(b)) && i.Loaded == loaded && i.HasPrevious == previous && !i.Fallback
}

// TestSniffersByAPI uploads, replaces, rolls back and removes modules while
// flows are routed by them. What is refused leaves neither file nor config
// changed.
func TestSniffersByAPI(t *testing.T) {
	one, two := guest(t, "key-only"), guest(t, "ok-host")
	b := newBackends(t)
	dir := filepath.Join(t.TempDir(), "not", "yet")
	bind := kit.Local(kit.Port(t))
	config := func(host kit.M, routes ...kit.M) kit.M {
		routes = append(routes, kit.Route(kit.M{"handler": "pool", "pool": "udp"}))
		return kit.App(kit.M{"u": kit.Listener([]string{"udp/" + bind}, routes...)}, b.pools(),
			kit.M{"sniffers": kit.M{"wasm": kit.With(kit.M{"dir": dir, "call_timeout": "10s"}, host)}})
	}
	p := kit.Start(t, config(nil), kit.Options{})
	list := func() map[string]snifferInfo {
		var all []snifferInfo
		p.JSON("/admin/sniffers", &all)
		m := make(map[string]snifferInfo)
		for _, i := range all {
			m[i.Name] = i
		}
		return m
	}
	// Each change loads a config, which replaces Caddy's admin server: the old one
	// closes a connection that it has accepted and not read yet.
	call := func(method, path string, body []byte) (status int, answer string) {
		for range 10 {
			status, answer = p.Do(method, path, body)
			if status != 0 || !strings.HasSuffix(answer, "EOF") && !strings.HasSuffix(answer, "connection reset by peer") {
				break
			}
		}
		return status, answer
	}
	do := func(method, path string, body []byte, want int, text string) {
		t.Helper()
		status, answer := call(method, path, body)
		if status != want || !strings.Contains(answer, text) || want >= 400 && !strings.HasPrefix(answer, `{"error":"`) || want == 204 && answer != "" {
			t.Errorf("%s %s: %d %.300s, want %d with %q", method, path, status, answer, want, text)
		}
	}
	if len(list()) != 0 {
		t.Errorf("there are sniffers already: %v", list())
	}

	// A new module is on disk, and loaded, when the answer comes.
	do("POST", "/admin/sniffers?name=game", one, 204, "")
	if i := list()["game"]; !i.is(one, true, false) {
		t.Errorf("uploaded: %+v", i)
	}
	// Its route can be loaded now, and flows are counted.
	route := kit.Match(kit.M{"sniffer": kit.M{"name": "game"}}, kit.M{"handler": "pool", "pool": "udp"})
	p.MustLoad(config(nil, route))
	load := kit.StartLoad(t, kit.LoadOptions{UDP: bind, Flows: 5, Rate: 50})
	load.Round(t)
	if n := p.Metric("sniffer_calls_total", "name", "game", "result", "ok"); n < 5 {
		t.Errorf("%v calls were counted", n)
	}
	do("POST", "/admin/sniffers?name=game", two, 204, "")
	if i := list()["game"]; !i.is(two, true, true) {
		t.Errorf("replaced: %+v", i)
	}
	do("POST", "/admin/sniffers/game/rollback", nil, 204, "")
	if i := list()["game"]; !i.is(one, true, true) {
		t.Errorf("rolled back: %+v", i)
	}
	if status, text := p.Get("/admin/sniffers?format=text"); status != 200 || !strings.HasPrefix(text, "name=game sha256=") || strings.Count(text, "\n") != 1 {
		t.Errorf("as text: %d %s", status, text)
	}

	before := files(t, dir)
	big := make([]byte, 8<<20+1)
	for _, tc := range []struct {
		method, path string
		body         []byte
		status       int
		text         string
	}{
		{"POST", "/admin/sniffers", one, 400, "name: missing"},
		{"POST", "/admin/sniffers?name=", one, 400, "name is empty"},
		{"POST", "/admin/sniffers?name=..%2Fgame", one, 400, "letters, digits"},
		{"POST", "/admin/sniffers?name=a%00", one, 400, "letters, digits"},
		{"POST", "/admin/sniffers?name=game&nmae=x", one, 400, "no such parameter"},
		{"POST", "/admin/sniffers?name=game", nil, 400, "empty: "},
		{"POST", "/admin/sniffers?name=game", guest(t, "abi-0-2"), 400, "abi_incompatible: "},
		{"POST", "/admin/sniffers?name=other", guest(t, "imports-func"), 400, "unexpected_import: "},
		{"POST", "/admin/sniffers?name=game", one[:len(one)-9], 400, ""},
		{"POST", "/admin/sniffers?name=game", big, 413, "8388608"},
		{"POST", "/admin/sniffers?name=minecraft", one, 422, "two sniffers are named"}, // by the load
		{"DELETE", "/admin/sniffers/game", nil, 422, `no sniffer is named`},            // a route asks it
		{"DELETE", "/admin/sniffers/nobody", nil, 404, "no module nobody"},
		{"DELETE", "/admin/sniffers/..%2Fgame", nil, 400, "letters, digits"},
		{"POST", "/admin/sniffers/nobody/rollback", nil, 404, "no version of nobody is kept"},
		{"GET", "/admin/sniffers/game", nil, 405, "GET is not allowed"},
		{"PUT", "/admin/sniffers", one, 405, "PUT is not allowed"},
		{"GET", "/admin/sniffers/game/rollback", nil, 405, "GET is not allowed"},
		{"GET", "/admin/reload", nil, 405, "GET is not allowed"},
		{"GET", "/admin/sniffers?limit=1", nil, 400, "no such parameter"},
	} {
		do(tc.method, tc.path, tc.body, tc.status, tc.text)
		if now := files(t, dir); len(now) != len(before) {
			t.Fatalf("%s %s has left %d files, there were %d", tc.method, tc.path, len(now), len(before))
		}
	}
	for name, b := range files(t, dir) {
		if before[name] != b {
			t.Errorf("%s has changed", name)
		}
	}
	if i := list()["game"]; !i.is(one, true, true) {
		t.Errorf("after what was refused: %+v", i)
	}

	// Many at once: each is whole, and all are there.
	p.MustLoad(config(nil))
	var wg sync.WaitGroup
	names := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	for _, name := range names {
		wg.Go(func() {
			for range 2 {
				if status, answer := call("POST", "/admin/sniffers?name="+name, two); status != 204 {
					t.Errorf("%s: %d %s", name, status, answer)
				}
			}
		})
	}
	wg.Wait()
	for _, name := range names {
		if i := list()[name]; !i.is(two, true, false) {
			t.Errorf("%s: %+v", name, i)
		}
		do("DELETE", "/admin/sniffers/"+name, nil, 204, "")
	}
	do("DELETE", "/admin/sniffers/game", nil, 204, "")
	if now := files(t, dir); len(now) != 0 {
		t.Errorf("%d files are left", len(now))
	}

	sum := sha256.Sum256(one)
	pin := kit.M{"modules": kit.M{"game": kit.M{"sha256": hex.EncodeToString(sum[:])}}}
	p.MustLoad(config(pin))
	do("POST", "/admin/sniffers?name=game", two, 409, "pinned: ")
	do("POST", "/admin/sniffers?name=other", one, 409, "pinned: ")
	do("POST", "/admin/sniffers?name=game", one, 204, "")

	p.MustLoad(kit.App(kit.M{"u": kit.ToPool("udp", "udp/"+bind)}, b.pools()))
	for _, call := range []string{"GET /admin/sniffers", "POST /admin/sniffers?name=x", "DELETE /admin/sniffers/game", "POST /admin/sniffers/game/rollback"} {
		method, path, _ := strings.Cut(call, " ")
		do(method, path, one, 409, "sniffers.wasm.dir")
	}
	load.Round(t)
	perfect(t, load)
}

// TestReloadByAPI re-reads the config file, whatever was pushed since, also
// where its text is the same and only a module has changed.
func TestReloadByAPI(t *testing.T) {
	b := newBackends(t)
	dir := t.TempDir()
	drop := func(name string, module []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name+".wasm"), module, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	drop("game", guest(t, "key-only"))
	config := kit.App(kit.M{"u": kit.ToPool("udp", "udp/"+kit.Local(kit.Port(t)))}, b.pools(), kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": dir}}})
	p := kit.Start(t, config, kit.Options{})
	loaded := func(name string) bool {
		var all []snifferInfo
		p.JSON("/admin/sniffers", &all)
		for _, i := range all {
			if i.Name == name {
				return i.Loaded
			}
		}
		return false
	}
	reload := func(want int, text string) {
		t.Helper()
		if status, answer := p.Do(http.MethodPost, "/admin/reload", nil); status != want || !strings.Contains(answer, text) {
			t.Errorf("POST /admin/reload: %d %s, want %d with %q", status, answer, want, text)
		}
	}
	drop("game", guest(t, "ok-host"))
	p.MustLoad(config) // Caddy does nothing: the text is the same
	if loaded("game") {
		t.Error("a load of the same config has looked at the directory")
	}
	reload(204, "")
	if !loaded("game") {
		t.Error("a reload has not looked at the directory")
	}
	// What was pushed meanwhile is gone, and the file is known to SIGHUP again.
	p.MustLoad(kit.With(config, kit.M{"storage": kit.M{"module": "file_system", "root": dir + "/storage"}}))
	reload(204, "")
	if _, now := p.Get("/config/storage"); strings.TrimSpace(now) != "null" {
		t.Errorf("the config is not the file's: storage is %s", now)
	}
	drop("game", guest(t, "key-only"))
	p.Signal(syscall.SIGHUP)
	kit.Eventually(t, "SIGHUP reloads", func() bool { return loaded("game") })

	good, err := os.ReadFile(p.Config)
	if err != nil {
		t.Fatal(err)
	}
	for text, file := range map[string]string{
		"no pool is named":    strings.Replace(string(good), `"handler":"pool","pool":"udp"`, `"handler":"pool","pool":"nobody"`, 1),
		"not valid JSON":      `{"apps":`,
		"reading config from": "",
	} {
		err := os.WriteFile(p.Config, []byte(file), 0o600)
		if file == "" {
			err = os.Remove(p.Config)
		}
		if err != nil {
			t.Fatal(err)
		}
		reload(422, text)
	}
	if status, _ := p.Get("/readyz"); status != 200 || !loaded("game") {
		t.Error("a refused reload has changed what runs")
	}
}
