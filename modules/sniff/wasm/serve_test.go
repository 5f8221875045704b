package wasm_test

import (
	"crypto/sha256"
	"encoding/hex"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// named answers every datagram with a name.
func named(t *testing.T, name string) string {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			_, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			c.WriteTo([]byte(name), from)
		}
	}()
	return c.LocalAddr().String()
}

// ask sends one datagram from a socket of its own and tells who has answered. The
// socket stays, so that no other has its port, and with that its session.
func ask(t *testing.T, addr, text string) string {
	t.Helper()
	c, err := net.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(kit.Long)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	n, err := c.Read(b)
	if err != nil {
		t.Fatalf("no answer to %q: %v", text, err)
	}
	return string(b[:n])
}

func guestFile(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "guests", name+".wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A module that somebody drops into the directory routes after a reload, and
// one that is bad changes nothing and says why.
func TestRoutes(t *testing.T) {
	dir := t.TempDir()
	drop := func(name, guest string) {
		if err := os.WriteFile(filepath.Join(dir, name+".wasm"), guestFile(t, guest), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	pools := kit.M{}
	for _, name := range []string{"survival", "demo", "late", "rest"} {
		pools[name] = kit.Pool(named(t, name))
	}
	to := func(pool string) kit.M { return kit.M{"handler": "pool", "pool": pool} }
	bind := kit.Local(kit.Port(t))
	config := func(host kit.M, routes ...kit.M) kit.M {
		return kit.App(kit.M{"l": kit.Listener([]string{"udp/" + bind}, append(routes, kit.Route(to("rest")))...)}, pools,
			kit.M{"sniffers": kit.M{"wasm": kit.With(kit.M{"dir": dir, "call_timeout": "10s"}, host)}})
	}
	survival := kit.Match(kit.M{"sniffer": kit.M{"name": "game", "host": kit.A{"survival.example.com"}}}, to("survival"))
	demo := kit.Match(kit.M{"sniffer": kit.M{"name": "game"}}, to("demo"))
	late := kit.Match(kit.M{"sniffer": kit.M{"name": "late"}}, to("late"))

	drop("game", "ok-host")
	drop("broken", "abi-0-2") // skipped
	p := kit.Start(t, config(nil, survival, demo), kit.Options{})
	check := func(want map[string]string) {
		t.Helper()
		for text, pool := range want {
			if got := ask(t, bind, text); got != pool {
				t.Errorf("%q went to %s, want %s", text, got, pool)
			}
		}
	}
	check(map[string]string{"HOST:survival.example.com": "survival", "HOST:Survival.Example.COM.": "survival", "HOST:x": "demo", "hello": "rest"})

	if err := p.Load(config(nil, survival, demo, late)); err == nil || !strings.Contains(err.Error(), `no sniffer is named \"late\"`) {
		t.Errorf("a route with a sniffer that is not there: %v", err)
	}
	broken := kit.Match(kit.M{"sniffer": kit.M{"name": "broken"}}, to("demo"))
	if err := p.Load(config(nil, survival, broken)); err == nil || !strings.Contains(err.Error(), "broken.wasm cannot be used: abi_incompatible") {
		t.Errorf("a route with a sniffer that does not load: %v", err)
	}
	drop("late", "key-only")
	p.MustLoad(config(nil, survival, demo, late))
	check(map[string]string{"HOST:survival.example.com": "survival", "hello": "late"})

	sum := sha256.Sum256(guestFile(t, "ok-host"))
	pinned := config(kit.M{"modules": kit.M{"game": kit.M{"sha256": hex.EncodeToString(sum[:])}}}, survival)
	if err := p.Load(pinned); err == nil || !strings.Contains(err.Error(), "broken.wasm is not among the modules") {
		t.Errorf("a file that is not pinned: %v", err)
	}
	check(map[string]string{"HOST:x": "demo", "hello": "late"})
	if n := p.Metric("sniffer_calls_total", "name", "game", "result", "ok"); n < 5 {
		t.Errorf("%v calls were counted", n)
	}
}

// A connection that has sent nothing yet when a config is loaded is judged by
// the sniffer that has the name then, and not cut off.
func TestReloadBeforeTheBytes(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "game.wasm"), guestFile(t, "ok-host"), 0o644); err != nil {
		t.Fatal(err)
	}
	backend := kit.NewTCPBackend(t, 7, kit.Local(kit.Port(t)))
	bind := kit.Local(kit.Port(t))
	config := func(timeout string) kit.M {
		l := kit.Listener([]string{"tcp/" + bind}, kit.Match(kit.M{"sniffer": kit.M{"name": "game"}}, kit.M{"handler": "pool", "pool": "game"}))
		return kit.App(kit.M{"l": kit.With(l, kit.M{"peek": kit.M{"timeout": kit.Long.String()}})}, kit.M{"game": kit.Pool(backend.Addr)},
			kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": dir, "call_timeout": timeout}}})
	}
	p := kit.Start(t, config("10s"), kit.Options{})
	c, err := net.Dial("tcp", bind)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	kit.Settles(t, "connections that are looked at", 1, func() float64 { return p.Metric("active_connections", "listener", "l") })
	p.MustLoad(config("11s"))
	if _, err := c.Write([]byte("HOST:survival.example.com")); err != nil {
		t.Fatal(err)
	}
	kit.Settles(t, "connections at the backend", 1, func() float64 { return float64(backend.Conns()) })
}
