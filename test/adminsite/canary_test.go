package adminsite

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestSecretsStayInside runs a config whose every secret has a marker, has what
// uses them fail while all is logged, and looks for the markers wherever the
// process writes or answers something, its last words included.
func TestSecretsStayInside(t *testing.T) {
	marker := func(name string) string { return "CANARY-" + name + "-0123456789" }
	dir := t.TempDir()
	var secrets, env []string
	inEnv := func(name, value string) string {
		secrets = append(secrets, value)
		env = append(env, "CANARY_"+name+"="+value)
		return "{env.CANARY_" + name + "}"
	}
	inFile := func(name, value string) string {
		secrets = append(secrets, value)
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(value), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	// A service that serves the list once and fails from then on, telling what
	// it was sent as careless services do.
	var asked atomic.Int32
	seen := make(chan string, 100)
	service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		told := fmt.Sprint(r.URL, r.Header)
		select {
		case seen <- told:
		default:
		}
		if r.URL.Path == "/list" && asked.Add(1) == 1 {
			fmt.Fprintln(w, "192.0.2.0/24")
			return
		}
		http.Error(w, "no: "+told, http.StatusForbidden)
	}))
	t.Cleanup(service.Close)
	key := hex.EncodeToString([]byte(marker("ticket")))
	secrets = append(secrets, marker("ticket"))
	addr, bind := kit.Local(kit.Port(t)), kit.Local(kit.Port(t))
	game := kit.Listener([]string{"tcp/" + bind},
		kit.Match(kit.M{"ticket": kit.M{"keys": kit.A{"{file." + inFile("ticket", "hex:"+key) + "}"}, "pool": "lobby"}}, kit.M{"handler": "pool", "pool": "lobby"}),
		kit.Route(kit.M{"handler": "resolve", "resolver": "web"}))
	game["filters"] = kit.A{kit.M{"filter": "acl", "urls": kit.A{service.URL + "/list?key=" + inEnv("LIST", marker("list"))}, "refresh_interval": "10s"}}
	config := kit.App(kit.M{"game": game},
		kit.M{"lobby": kit.Pool("127.0.0.1:9"), "found": kit.M{"health": kit.M{"check": "none"},
			"source": kit.M{"source": "consul", "service": "game", "addr": service.URL, "token_file": inFile("consul", marker("consul"))}}},
		kit.M{"tracing": kit.M{}, "resolvers": kit.M{"web": kit.M{"resolver": "http", "endpoint": service.URL + "/resolve",
			"headers": kit.M{"Authorization": "Bearer " + inEnv("RESOLVER", marker("resolver")), "X-Key": "{file." + inFile("resolver", marker("resolver-file")) + "}"}}}})
	config["apps"].(kit.M)["http"] = site(addr, kit.M{"handler": "wayhouse_admin", "tokens": kit.A{
		kit.M{"token": inEnv("ADMIN", marker("admin"))}, kit.M{"token": "{file." + inFile("read", marker("read")) + "}", "role": "read"}}})
	config["logging"] = kit.M{"logs": kit.M{"default": kit.M{"level": "DEBUG"}}}
	// The collector refuses the spans and tells what it was sent, too.
	secrets = append(secrets, marker("otlp"))
	env = append(env, "OTEL_EXPORTER_OTLP_ENDPOINT="+service.URL, "OTEL_EXPORTER_OTLP_HEADERS=x-key="+marker("otlp"))
	guess := "CANARY-a-wrong-one-0123456789"
	secrets = append(secrets, guess)

	p := kit.Start(t, config, kit.Options{Env: env, Broken: true})
	var answers strings.Builder
	local, remote := newClient(t, "unix", socket(p)), newClient(t, "tcp", addr)
	look := func(c *client, method, target, body string, headers ...string) {
		a := c.send(method, target, body, headers...)
		fmt.Fprintln(&answers, method, target, a.status, a.header, a.body)
	}
	// Every way to the API, with right and wrong tokens.
	for _, r := range table {
		for method, call := range r.calls {
			if call.changes {
				continue
			}
			look(local, method, r.path, "", "Authorization", "Bearer "+guess)
			look(remote, method, r.path, "", "Authorization", "Bearer "+marker("admin"))
			look(remote, method, r.path, "", "Authorization", "Bearer "+marker("read"))
		}
	}
	look(remote, "GET", "/pools", "", "Authorization", "Bearer "+guess)
	look(remote, "GET", "/pools", "", "Authorization", "Basic "+guess)
	// Flows that the resolver fails for.
	for _, text := range []string{"hello, this is nobody's ticket", ""} {
		c, err := net.Dial("tcp", bind)
		if err != nil {
			t.Fatal(err)
		}
		c.Write([]byte(text))
		c.SetReadDeadline(time.Now().Add(kit.Long))
		c.Read(make([]byte, 1))
		c.Close()
	}
	// Each secret is used, or the test looks for what is nowhere.
	used := make(map[string]bool)
	kit.Eventually(t, "the services are asked with their secrets", func() bool {
		for len(seen) > 0 {
			s, _ := url.QueryUnescape(<-seen)
			for _, name := range []string{"list", "consul", "resolver", "resolver-file", "otlp"} {
				used[name] = used[name] || strings.Contains(s, marker(name))
			}
		}
		return used["list"] && used["consul"] && used["resolver"] && used["resolver-file"] && used["otlp"]
	})
	// Configs that are refused late, with all secrets read.
	broken := kit.With(config, nil)
	broken["apps"] = kit.With(config["apps"].(kit.M), kit.M{"http": kit.M{"servers": kit.M{
		"a": kit.M{"listen": kit.A{addr}}, "b": kit.M{"listen": kit.A{addr}}}}})
	if err := p.Load(broken); err == nil {
		t.Error("the broken config was taken")
	} else {
		answers.WriteString(err.Error())
	}
	p.MustLoad(kit.With(config, kit.M{"storage": kit.M{"module": "file_system"}}))
	for _, target := range []string{"/config/", "/metrics", "/debug/vars", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=2", "/wayhouse/config/last-rejected"} {
		look(local, "GET", target, "")
	}
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	p.Signal(syscall.SIGABRT) // the runtime tells all its stacks
	p.Exit()
	places := map[string]string{"an answer": answers.String(), "the arguments": string(cmdline)}
	filepath.WalkDir(p.Dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			b, _ := os.ReadFile(path)
			places[path] = path + "\n" + string(b)
		}
		return nil
	})
	if log := places[filepath.Join(p.Dir, "log")]; !strings.Contains(log, `"level":"debug"`) || !strings.Contains(log, "SIGABRT") {
		t.Error("the log has no debug lines, or not the last words")
	}
	for place, text := range places {
		for _, s := range secrets {
			if i := strings.Index(text, s); i >= 0 {
				t.Errorf("%s tells %s: …%s…", place, s, text[max(0, i-200):min(len(text), i+80)])
			}
		}
	}
}
