package console

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// game is a config of one listener, of TCP and UDP, and a pool without checks.
func game(addr string, targets ...string) kit.M {
	return kit.App(kit.M{"game": kit.ToPool("lobby", "tcp/"+addr, "udp/"+addr)}, kit.M{"lobby": kit.Pool(targets...)})
}

// TestShowAndChange goes through what there is to show and to change.
func TestShowAndChange(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, game(addr, "127.0.0.1:9", "127.0.0.2:9"), kit.Options{})
	sh := shellOf(t, p)

	sh.prints(words("show pools"), "POOL", "BACKEND", "lobby", "127.0.0.1:9", "enabled", "lobby", "127.0.0.2:9", "enabled")
	sh.prints(words("show pools lobby"), "127.0.0.1:9")
	sh.prints(words("show listeners"), "LISTENER", "game", "tcp/"+addr, "udp/"+addr)
	sh.prints(words("show sessions"), "ID", "CLIENT")
	sh.prints(words("show overlay"), "POOL", "CHANGE")
	sh.prints(words("show hints"), "CLIENT", "LEFT")

	sh.prints(words("set backend lobby 127.0.0.1:9 draining"), "pool lobby: 127.0.0.1:9 is draining")
	sh.prints(words("show pools"), "127.0.0.1:9", "draining")
	sh.prints(words("set backend lobby [::ffff:127.0.0.1]:9 disabled"), "127.0.0.1:9 is disabled")
	sh.prints(words("add backend lobby 127.0.0.3:9"), "127.0.0.3:9 is added")
	sh.prints(words("add backend lobby 127.0.0.4:9 --weight 7 --json"), `"addr":"127.0.0.4:9"`)
	sh.prints(words("del backend lobby 127.0.0.2:9"), "127.0.0.2:9 is removed")
	sh.prints(words("show overlay"), "127.0.0.1:9", "disabled", "tester", "127.0.0.2:9", "removed", "tester", "127.0.0.3:9", "added", "127.0.0.4:9", "weight 7")
	if out := sh.must("overlay"); out != sh.must("show", "overlay") {
		t.Errorf("overlay and show overlay are not the same:\n%s", out)
	}
	sh.prints(words("add hint ::ffff:203.0.113.7 lobby --ttl 1h"), "203.0.113.7 goes to pool lobby")
	sh.prints(words("add hint 2001:db8::7 lobby"), "2001:db8::7")
	if out := sh.prints(words("show hints"), "203.0.113.7", "lobby"); !strings.Contains(out, "2001:db8::7") {
		t.Errorf("the hints are\n%s", out)
	}

	for path, args := range map[string]string{"/pools": "show pools", "/pools/lobby": "show pools lobby", "/listeners": "show listeners", "/sessions": "show sessions", "/overlay": "show overlay"} {
		_, want := p.Get(path)
		if out := sh.must(append(words(args), "--json")...); out != want {
			t.Errorf("%s --json prints\n%s, want what the API says\n%s", args, out, want)
		}
	}
	var hints []struct{ Pool string }
	if err := json.Unmarshal([]byte(sh.must("show", "hints", "--json")), &hints); err != nil || len(hints) != 2 {
		t.Errorf("the hints as JSON are %+v, %v", hints, err)
	}

	sh.prints(words("del hint 203.0.113.7"), "gone")
	sh.refuses(1, "no hint", words("del hint 203.0.113.7")...)
	sh.refuses(1, `no pool is named "gone"`, words("show pools gone")...)
	sh.refuses(1, `no pool is named "gone"`, words("set backend gone 127.0.0.1:9 enabled")...)
	sh.refuses(1, "no backend 127.0.0.9:9", words("set backend lobby 127.0.0.9:9 enabled")...)
	sh.refuses(1, "no backend 127.0.0.9:9", words("del backend lobby 127.0.0.9:9")...)
	sh.refuses(1, "already", words("add backend lobby 127.0.0.3:9")...)
	sh.refuses(1, "no pool", words("add hint 203.0.113.7 gone")...)
	sh.refuses(1, "proto", words("show sessions --proto sctp")...)
	sh.refuses(1, "src", words("show sessions --src nowhere")...)

	sh.prints(words("overlay drop --pool another"), "dropped: 0")
	sh.prints(words("overlay drop --pool lobby"), "dropped: 4", "127.0.0.2:9", "removed")
	sh.prints(words("show pools"), "127.0.0.1:9", "enabled", "127.0.0.2:9", "enabled")
	if out := sh.must("overlay", "drop", "--json"); out != "[]\n" {
		t.Errorf("dropping nothing prints %q", out)
	}
}

// TestStatus wants mistakes on the command line and refusals to end differently.
func TestStatus(t *testing.T) {
	sh := &shell{t, []string{"WAYHOUSE_ADDRESS=localhost:1"}} // where nobody is
	sh.refuses(2, "pools, sessions, listeners, overlay or hints", "show")
	sh.refuses(2, "want: wayhouse set backend <pool>", words("set backend lobby")...)
	if r := sh.refuses(2, "--token: there is no such flag", words("show pools --token=abc")...); strings.Contains(r.errs, "abc") {
		t.Errorf("it repeats the token: %s", r.errs)
	}
	sh.refuses(1, "asking localhost:1: dial tcp", "show", "pools")
	sh.refuses(1, "asking localhost:1: dial tcp", "health")
	sh.refuses(1, "no such file", "show", "pools", "--address", "unix//nowhere/x.sock")
	if r := sh.run("top", "--help"); r.status != 0 || !strings.Contains(r.out, "wayhouse top") || !strings.Contains(r.out, "--interval") {
		t.Errorf("top --help ends with %d: %s", r.status, r.out)
	}
}

// TestDoors has one instance with every way to ask it.
func TestDoors(t *testing.T) {
	const token, reader = "operate-token-0123456", "read-token-0123456789"
	port := kit.Ports(t, 2)
	endpoint, site := kit.Local(port), kit.Local(port+1)
	config := game(kit.Local(kit.Port(t)), "127.0.0.1:9")
	config["apps"].(kit.M)["http"] = kit.M{"servers": kit.M{"site": kit.M{
		"listen": kit.A{site}, "automatic_https": kit.M{"disable": true},
		"routes": kit.A{kit.M{"match": kit.A{kit.M{"path": kit.A{"/wayhouse/*"}}}, "handle": kit.A{
			kit.M{"handler": "rewrite", "strip_path_prefix": "/wayhouse"},
			kit.M{"handler": "wayhouse_admin", "tokens": kit.A{
				kit.M{"token": token, "role": "operate", "name": "shift"}, kit.M{"token": reader, "role": "read"},
			}},
		}}},
	}}}
	p := kit.Start(t, config, kit.Options{})
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tokenFile := write("token", token+"\n")

	socket := shellOf(t, p)
	socket.must(words("set backend lobby 127.0.0.1:9 draining")...)
	socket.prints(words("show overlay"), "draining", "tester")

	none := &shell{t, nil}
	none.prints([]string{"show", "pools", "--address", p.Admin}, "draining")
	none.prints([]string{"show", "pools", "--config", p.Config}, "draining")
	none.prints([]string{"show", "pools", "--config", write("Caddyfile", "{\nadmin "+p.Admin+"\n}\n")}, "draining")

	url := "http://" + site + "/wayhouse"
	web := &shell{t, []string{"WAYHOUSE_ADDRESS=" + url}}
	web.refuses(1, "with --token-file, or set WAYHOUSE_TOKEN", "show", "pools")
	web.refuses(2, "is an admin endpoint", "show", "pools", "--address", endpoint, "--token-file", tokenFile)
	web.env = append(web.env, "WAYHOUSE_TOKEN=wrong-token-012345678")
	web.refuses(1, "the token is not one", "show", "pools")
	web.prints([]string{"show", "pools", "--token-file", tokenFile}, "draining")
	web.must("set", "backend", "lobby", "127.0.0.1:9", "enabled", "--token-file", tokenFile)
	web.prints([]string{"show", "pools", "--token-file", tokenFile}, "enabled")
	if out := web.must("show", "pools", "--json", "--token-file", tokenFile); !json.Valid([]byte(out)) {
		t.Errorf("it prints %s", out)
	}
	web.refuses(2, "a site does not tell the config", "overlay", "promote", "--token-file", tokenFile)
	may := &shell{t, []string{"WAYHOUSE_ADDRESS=" + url, "WAYHOUSE_TOKEN=" + reader}}
	may.prints(words("show pools"), "enabled")
	if r := may.run(words("set backend lobby 127.0.0.1:9 draining")...); r.status != 1 || r.errs == "" {
		t.Errorf("a reader changes a backend: %+v", r)
	}
	may.prints(words("show pools"), "enabled")
	if log := p.Log(); strings.Contains(log, token) || strings.Contains(log, reader) {
		t.Error("a token is in the log")
	}

	// Caddy's endpoint on TCP, which looks at Host and Origin.
	doc := p.Document(config)
	doc = []byte(strings.Replace(string(doc), `"listen":"`+p.Admin+`"`, `"enforce_origin":true,"listen":"`+endpoint+`"`, 1))
	if err := p.LoadDocument(doc); err != nil {
		t.Fatal(err)
	}
	tcp := &shell{t, []string{"WAYHOUSE_ADDRESS=" + endpoint}}
	tcp.must(words("set backend lobby 127.0.0.1:9 disabled")...)
	tcp.prints(words("show pools"), "disabled")
	tcp.must(words("overlay drop")...)
	tcp.prints(words("top --once --interval 250ms"), endpoint, "ready", "lobby", "enabled")
}

// TestHostileNames wants what other people have named to be harmless on a
// terminal.
func TestHostileNames(t *testing.T) {
	const name = "lo\x1b[2Jb\u009b31m\u202ey/a"
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"game": kit.ToPool(name, "tcp/"+addr)}, kit.M{name: kit.Pool("127.0.0.1:9")}), kit.Options{})
	sh := shellOf(t, p)
	const shown = `lo\u001b[2Jb\u009b31m\u202ey/a`
	sh.prints(words("show pools"), shown)
	sh.prints([]string{"show", "pools", name}, shown)
	sh.prints([]string{"set", "backend", name, "127.0.0.1:9", "draining"}, shown)
	sh.prints(words("overlay"), shown)
	sh.prints(words("top --once --interval 250ms"), shown)
	sh.prints([]string{"add", "hint", "10.0.0.1", name}, shown)
	sh.prints(words("show hints"), shown)
	for _, args := range []string{"show pools", "overlay", "overlay promote", "top --once --interval 250ms", "show hints", "__complete set backend "} {
		r := sh.run(words(args)...)
		for _, bad := range []string{"\x1b", "\u009b", "\u202e"} {
			if strings.Contains(r.out+r.errs, bad) {
				t.Errorf("%s prints %q: %q", args, bad, r.out+r.errs)
			}
		}
	}
	if r := sh.refuses(1, `gone`, "show", "pools", "gone\x1b[2J"); strings.Contains(r.errs, "\x1b") {
		t.Errorf("an error has the name as it is: %q", r.errs)
	}
}

// TestClose ends sessions by their IDs and by what they have in common.
func TestClose(t *testing.T) {
	backend := kit.NewTCPBackend(t, 1, "127.0.0.1:0")
	udp := kit.NewUDPBackend(t, 1, "127.0.0.1:0")
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr), "u": kit.ToPool("udp", "udp/"+addr)},
		kit.M{"tcp": kit.Pool(backend.Addr), "udp": kit.Pool(udp.Addr)}), kit.Options{})
	sh := shellOf(t, p)
	for range 5 {
		c := player(t, "tcp", addr)
		defer c.Close()
		u := player(t, "udp", addr)
		defer u.Close()
	}
	ids := func(args ...string) (ids []string) {
		var list []struct{ ID string }
		if err := json.Unmarshal([]byte(sh.must(append(words("show sessions --json"), args...)...)), &list); err != nil {
			t.Fatal(err)
		}
		for _, s := range list {
			ids = append(ids, s.ID)
		}
		return ids
	}
	if out := sh.must("show", "sessions"); strings.Count(out, "\n") != 11 {
		t.Fatalf("the sessions are\n%s", out)
	}
	for args, want := range map[string]int{"--proto tcp": 5, "--pool udp": 5, "--backend " + backend.Addr: 5, "--listener t": 5, "--src 127.0.0.0/8": 10, "--src 10.0.0.0/8": 0, "--limit 3": 3} {
		if got := ids(words(args)...); len(got) != want {
			t.Errorf("show sessions %s has %d, want %d", args, len(got), want)
		}
	}
	all := ids("--proto", "tcp")
	sh.prints([]string{"close", "session", all[0], all[1], all[0]}, "ended: 2")
	r := sh.run("close", "session", all[0], all[2])
	if r.status != 1 || !strings.Contains(r.out, "ended: 1") || !strings.Contains(r.errs, "no live session has the ID "+all[0]) {
		t.Errorf("one that is gone and one that is not: %+v", r)
	}
	sh.refuses(2, "this would end: 5; say --yes", words("close session --proto udp")...)
	if got := len(ids()); got != 7 {
		t.Errorf("%d sessions are left, want 7", got)
	}
	sh.prints(words("close session --proto udp --yes"), "ended: 5")
	sh.prints(words("close session --pool tcp --src 127.0.0.1 --yes"), "ended: 2")
	sh.prints(words("close session --pool tcp --yes"), "ended: 0")
	sh.refuses(1, "backend", words("close session --backend nowhere --yes")...)
	if got := p.Metric("flows_closed_total", "reason", "admin"); got != 10 {
		t.Errorf("%v flows have ended by an operator, want 10", got)
	}
}

// player is a client that has had an answer.
func player(t testing.TB, network, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	ask(t, c, 1)
	return c
}

// ask asks through c and returns the backend that answers.
func ask(t testing.TB, c net.Conn, seq uint64) (backend uint16) {
	t.Helper()
	a, err := tryAsk(c, seq)
	if err != nil {
		t.Fatalf("message %d of %s: %v", seq, c.LocalAddr(), err)
	}
	return a
}

// TestDrain waits for the last flow, and not longer than it is told to.
func TestDrain(t *testing.T) {
	backend := kit.NewTCPBackend(t, 1, "127.0.0.1:0")
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr)}, kit.M{"tcp": kit.Pool(backend.Addr)}), kit.Options{})
	sh := shellOf(t, p)
	ready := func(want int) {
		t.Helper()
		if status, body := p.Get("/readyz"); status != want {
			t.Errorf("/readyz: %d %s, want %d", status, body, want)
		}
	}
	sh.prints(words("health --ready"), "ready")
	sh.prints(words("drain"), "draining")
	ready(http.StatusServiceUnavailable)
	sh.prints(words("health"), "ok")
	sh.refuses(1, "draining: drained by ", words("health --ready")...)
	sh.prints(words("top --once --interval 250ms"), "not ready")
	sh.prints(words("undrain"), "no longer draining")
	ready(http.StatusOK)
	sh.prints(words("drain --wait"), "no flow is left")
	c := player(t, "tcp", addr)
	defer c.Close()
	sh.refuses(1, "flows left after 300ms: 1", words("drain --wait 300ms")...)
	sh.refuses(1, "flows left after 300ms: 1", words("drain --wait=300ms")...)

	cmd := sh.command("drain", "--wait", "10m")
	var errs strings.Builder
	cmd.Stderr = &errs
	told, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 100)
	if n, err := told.Read(line); err != nil || !strings.HasPrefix(string(line[:n]), "draining") {
		t.Errorf("it begins with %q, %v", line[:n], err)
	}
	if ask(t, c, 2) != 1 {
		t.Error("a player of a drained instance is not served")
	}
	c.Close()
	n, _ := told.Read(line)
	if err := cmd.Wait(); err != nil || string(line[:n]) != "no flow is left\n" {
		t.Errorf("when the last one has left, drain --wait ends with %v: %q %s", err, line[:n], &errs)
	}
	sh.must("undrain")
	ready(http.StatusOK)
}

// TestPromote makes the overlay permanent in both forms.
func TestPromote(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	p := kit.Prepare(t, nil, kit.Options{})
	source := fmt.Sprintf("{\nadmin %s\nwayhouse {\nstate_dir off\npool lobby {\nto 127.0.0.1:9 127.0.0.2:9\nhealth none\nidle_timeout 5m\n}\npool other {\nto 127.0.0.8:9\nhealth none\n}\nlistener game udp/%s {\nroute {\npool lobby\n}\n}\n}\n}\n", p.Admin, addr)
	file := filepath.Join(p.Dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	p.Begin("run", "--config", file)
	p.WaitReady()
	sh := shellOf(t, p)
	if out := sh.must("overlay", "promote"); out != "" {
		t.Errorf("without an overlay it prints %q", out)
	}
	sh.must(words("add backend lobby 127.0.0.3:9")...)
	sh.must(words("del backend lobby 127.0.0.1:9")...)
	want := "pool lobby {\n\tto 127.0.0.2:9 127.0.0.3:9\n\thealth none\n\tidle_timeout 5m\n}\n"
	if out := sh.must("overlay", "promote"); out != want {
		t.Errorf("as a Caddyfile it is\n%s, want\n%s", out, want)
	}
	if out := sh.must("overlay", "promote", "--config", file); out != want {
		t.Errorf("of the file it is\n%s, want\n%s", out, want)
	}
	doc := sh.must("overlay", "promote", "--json")
	sh.must(words("set backend other 127.0.0.8:9 draining")...)
	r := sh.run("overlay", "promote")
	if r.status != 1 || r.out != want || !strings.Contains(r.errs, "other: 127.0.0.8:9 is draining") {
		t.Errorf("with a state, which is not for configs: %+v", r)
	}
	if err := p.LoadDocument([]byte(doc)); err != nil {
		t.Fatal(err)
	}
	sh.must("overlay", "drop")
	out := sh.prints(words("show pools lobby"), "127.0.0.2:9", "config", "127.0.0.3:9", "config")
	if strings.Contains(out, "127.0.0.1:9") {
		t.Errorf("with the promoted config the pool is\n%s", out)
	}
}

// TestWatch shows something again until it is told to end.
func TestWatch(t *testing.T) {
	p := kit.Start(t, game(kit.Local(kit.Port(t)), "127.0.0.1:9"), kit.Options{})
	cmd := shellOf(t, p).command("show", "pools", "--watch", "--interval", "100ms")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var seen strings.Builder
	buf := make([]byte, 1<<10)
	for strings.Count(seen.String(), "127.0.0.1:9") < 3 {
		n, err := out.Read(buf)
		if err != nil {
			t.Fatalf("%v after %s", err, &seen)
		}
		seen.Write(buf[:n])
	}
	cmd.Process.Signal(os.Interrupt)
	for err == nil {
		_, err = out.Read(buf)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("it ends with %v", err)
	}
}

// TestCompletion completes the names that an instance has.
func TestCompletion(t *testing.T) {
	p := kit.Start(t, game(kit.Local(kit.Port(t)), "127.0.0.1:9"), kit.Options{})
	sh := shellOf(t, p)
	for args, want := range map[string]string{
		"show pools":                     "lobby\n",
		"set backend":                    "lobby\n",
		"set backend lobby":              "127.0.0.1:9\n",
		"set backend lobby 127.0.0.1:9":  "enabled\ndraining\ndisabled\n",
		"del backend lobby":              "127.0.0.1:9\n",
		"add hint 10.0.0.1":              "lobby\n",
		"show sessions --pool":           "lobby\n",
		"show pools --address nowhere:1": "",
	} {
		out := sh.must(append(append([]string{"__complete"}, words(args)...), "")...)
		if got, _, _ := strings.Cut(out, ":4\n"); got != want {
			t.Errorf("after %q there is %q, want %q", args, got, want)
		}
	}
}
