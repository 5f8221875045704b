// Package cli tests what a user does first: the commands and the sample.
package cli

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// run runs a command to its end.
func run(t *testing.T, args ...string) (stdout, stderr string, ok bool) {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command(testkit.Binary(t, ""), args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	err := cmd.Run()
	return out.String(), log.String(), err == nil
}

// asks sends text to an address and wants it back.
func asks(t *testing.T, network, addr string) {
	t.Helper()
	testkit.Eventually(t, network+" "+addr+" sends back what it gets", func() bool {
		c, err := net.Dial(network, addr)
		if err != nil {
			return false
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Second))
		if _, err := c.Write([]byte("hello")); err != nil {
			return false
		}
		b := make([]byte, 16)
		n, err := c.Read(b)
		return err == nil && string(b[:n]) == "hello"
	})
}

// echo sends back what TCP and UDP clients of one port send.
func echo(t *testing.T) (addr string) {
	t.Helper()
	for range 20 { // until TCP and UDP get the same port
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		pc, err := net.ListenPacket("udp", l.Addr().String())
		if err != nil {
			l.Close()
			continue
		}
		t.Cleanup(func() {
			l.Close()
			pc.Close()
		})
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					b := make([]byte, 16)
					n, _ := c.Read(b)
					c.Write(b[:n])
				}()
			}
		}()
		go func() {
			b := make([]byte, 16)
			for {
				n, from, err := pc.ReadFrom(b)
				if err != nil {
					return
				}
				pc.WriteTo(b[:n], from)
			}
		}()
		return l.Addr().String()
	}
	t.Fatal("no port is free for both TCP and UDP")
	return ""
}

var bound = regexp.MustCompile(`"local":\["udp/([^"]+)","tcp/([^"]+)"\]`)

func TestQuickRuns(t *testing.T) {
	backend := echo(t)
	p := testkit.Prepare(t, nil, testkit.Options{})
	p.Begin("quick", "--udp", "127.0.0.1:0", "--tcp", "127.0.0.1:0", "--to", backend, "--admin", p.Admin, "--config-out", "kept")
	p.WaitReady()
	m := bound.FindStringSubmatch(p.Log())
	if m == nil {
		t.Fatalf("it does not say where it listens: %s", p.Log())
	}
	asks(t, "udp", m[1])
	asks(t, "tcp", m[2])
	if strings.Contains(p.Log(), "autosaved config") {
		t.Error("it has replaced the config that \"run --resume\" loads")
	}
	var pools []struct {
		Name     string
		Backends []struct{ Addr string }
	}
	p.JSON("/pools", &pools)
	if len(pools) != 1 || pools[0].Name != "game" || len(pools[0].Backends) != 1 || pools[0].Backends[0].Addr != backend {
		t.Errorf("the pools are %+v", pools)
	}
	kept, err := os.ReadFile(filepath.Join(p.Dir, "kept"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(p.Log(), string(kept)) {
		t.Errorf("--config-out has\n%s\nand what was printed begins\n%.300s", kept, p.Log())
	}
	if !strings.Contains(string(kept), "to "+backend) {
		t.Errorf("--config-out does not name the backend:\n%s", kept)
	}
}

// What --print writes has to be a config by itself.
func TestQuickPrints(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		health string
		bind   []string
		to     []string
	}{
		"UDP alone":     {[]string{"--udp", ":7777", "--to", "10.0.0.5:7777"}, "none", []string{"udp/:7777"}, []string{"10.0.0.5:7777"}},
		"TCP alone":     {[]string{"--tcp", "25565", "--to", "game.example.com:25565"}, "tcp_connect", []string{"tcp/:25565"}, []string{"game.example.com:25565"}},
		"both":          {[]string{"--udp", ":7777", "--tcp", ":7777", "--to", "10.0.0.5:7777"}, "tcp_connect", []string{"udp/:7777", "tcp/:7777"}, []string{"10.0.0.5:7777"}},
		"several":       {[]string{"--udp", ":7777", "--udp", "[::1]:30000-30009", "--to", "10.0.0.5:1", "--to", "[2001:db8::5]:1"}, "none", []string{"udp/:7777", "udp/[::1]:30000-30009"}, []string{"10.0.0.5:1", "[2001:db8::5]:1"}},
		"without admin": {[]string{"--udp", ":7777", "--to", "10.0.0.5:7777", "--admin", "off"}, "none", []string{"udp/:7777"}, []string{"10.0.0.5:7777"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, log, ok := run(t, append([]string{"quick", "--print"}, tc.args...)...)
			if !ok {
				t.Fatal(log)
			}
			file := filepath.Join(t.TempDir(), "Caddyfile")
			if err := os.WriteFile(file, []byte(out), 0o600); err != nil {
				t.Fatal(err)
			}
			config, log, ok := run(t, "adapt", "--config", file, "--validate")
			if !ok {
				t.Fatalf("%s\n%s", out, log)
			}
			if strings.Contains(log, "not formatted") {
				t.Errorf("caddy fmt would write it otherwise:\n%s", out)
			}
			var got struct {
				Apps struct {
					Wayhouse struct {
						Pools map[string]struct {
							Targets []string
							Health  struct{ Check string }
						}
						Listeners map[string]struct{ Bind []string }
					}
				}
			}
			if err := json.Unmarshal([]byte(config), &got); err != nil {
				t.Fatal(err)
			}
			pool, bind := got.Apps.Wayhouse.Pools["game"], got.Apps.Wayhouse.Listeners["game"].Bind
			if pool.Health.Check != tc.health || strings.Join(pool.Targets, " ") != strings.Join(tc.to, " ") || strings.Join(bind, " ") != strings.Join(tc.bind, " ") {
				t.Errorf("bind %q, pool %+v", bind, pool)
			}
		})
	}
}

func TestQuickMistakes(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"no address":                    {[]string{"--to", "10.0.0.5:7777"}, `--udp or --tcp: an address to listen on is missing, as in --udp :7777`},
		"no backend":                    {[]string{"--udp", ":7777"}, `--to: a backend is missing, as in --to 10.0.0.5:7777`},
		"a wrong port":                  {[]string{"--udp", ":77777", "--to", "10.0.0.5:7777"}, `--udp: \"udp/:77777\": port \"77777\" is not a number from 0 to 65535`},
		"a wrong address":               {[]string{"--tcp", "tcp/:7777", "--to", "10.0.0.5:7777"}, `--tcp: \"tcp/:7777\" is not an address, as in :7777`},
		"a backend portless":            {[]string{"--udp", ":7777", "--to", "10.0.0.5"}, `--to: \"10.0.0.5\" is neither ip:port nor host:port`},
		"a wrong admin":                 {[]string{"--udp", ":7777", "--to", "10.0.0.5:7777", "--admin", "here"}, `--admin: \"here\" is neither an address`},
		"an unknown flag":               {[]string{"--upd", ":7777"}, `unknown flag: --upd`},
		"an argument":                   {[]string{":7777"}, `unknown command`},
		"a file that cannot be written": {[]string{"--udp", ":7777", "--to", "10.0.0.5:7777", "--config-out", "no/such/folder", "--print"}, `--config-out: open no/such/folder`},
	} {
		t.Run(name, func(t *testing.T) {
			out, log, ok := run(t, append([]string{"quick"}, tc.args...)...)
			if ok || !strings.Contains(log, tc.want) {
				t.Errorf("ended well: %v; printed %q and\n%s\nwant %s", ok, out, log, tc.want)
			}
		})
	}
}

// TestExample is "make run" and the commands it prints.
func TestExample(t *testing.T) {
	source, err := os.ReadFile("../../Caddyfile.example")
	if err != nil {
		t.Fatal(err)
	}
	p := testkit.Prepare(t, nil, testkit.Options{})
	text := strings.Replace(string(source), "admin localhost:2019", "admin "+p.Admin, 1)
	if err := os.WriteFile(filepath.Join(p.Dir, "Caddyfile.example"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p.Begin("run", "--config", "Caddyfile.example", "--adapter", "caddyfile")
	p.WaitReady()
	asks(t, "tcp", "127.0.0.1:7777")
	asks(t, "udp", "127.0.0.1:7777")
	for _, pool := range []string{"game-tcp", "game-udp"} {
		testkit.Eventually(t, "checks of "+pool+" pass", func() bool {
			m := p.Metrics()
			return m.Sum("healthcheck_total", "pool", pool, "result", "ok") > 1 && m.Sum("healthcheck_total", "pool", pool, "result", "fail") == 0
		})
	}
	if _, text := p.Get("/pools?format=text"); strings.Count(text, " healthy ") != 4 {
		t.Errorf("the pools are\n%s", text)
	}
	if _, text := p.Get("/sessions?format=text"); !strings.Contains(text, "listener=game-udp") {
		t.Errorf("the sessions are\n%s", text)
	}
}

func TestModulesAreListed(t *testing.T) {
	out, log, ok := run(t, "list-modules")
	if !ok {
		t.Fatal(log)
	}
	have := strings.Fields(out)
	for _, id := range []string{
		"wayhouse", "layer4.handlers.pool", "admin.api.wayhouse", "wayhouse.balancers.round_robin", "wayhouse.health_checks.tcp_connect",
		"layer4.matchers.ssh", "layer4.handlers.echo", "http.handlers.reverse_proxy", "layer4",
	} {
		found := false
		for _, h := range have {
			found = found || h == id
		}
		if !found {
			t.Errorf("there is no %s", id)
		}
	}
}

// TestVersion has one version for those who ask the command, and the same one
// in the metrics.
func TestVersion(t *testing.T) {
	out, log, ok := run(t, "version")
	line := regexp.MustCompile(`^(\S+) \((?:commit ([0-9a-f]{12}), )?Caddy (v2\S+), caddy-l4 (v0\S+), go1\S+ linux/\w+\)\n$`)
	m := line.FindStringSubmatch(out)
	if !ok || m == nil {
		t.Fatalf("it prints %q and %s", out, log)
	}
	for _, flag := range []string{"--version", "-v"} {
		if again, _, ok := run(t, flag); !ok || again != out {
			t.Errorf("%s prints %q", flag, again)
		}
	}
	gomod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range []string{"github.com/caddyserver/caddy/v2 " + m[3], "github.com/mholt/caddy-l4 " + m[4]} {
		if !strings.Contains(string(gomod), "\t"+dep+"\n") {
			t.Errorf("go.mod does not have %s", dep)
		}
	}
	p := testkit.Start(t, testkit.App(testkit.M{}, testkit.M{}), testkit.Options{})
	commit := m[2]
	if commit == "" {
		commit = "unknown"
	}
	if n := p.Metrics().Sum("build_info", "component", "wayhouse", "version", m[1], "commit", commit); n != 1 {
		t.Errorf("no series of build_info has version %s and commit %s", m[1], commit)
	}
	info, _, ok := run(t, "build-info")
	if !ok || !strings.Contains(info, "github.com/caddyserver/caddy/v2") {
		t.Errorf("build-info prints %.200s", info)
	}
}
