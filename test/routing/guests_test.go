package routing

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// guest is one of the WebAssembly modules that the sniffer host is tested with.
func guest(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "modules", "sniff", "wasm", "testdata", "guests", name+".wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// drop puts a guest into a directory of sniffers, as a copy by hand does.
func drop(t *testing.T, dir, name string, b []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name+".wasm"), b, 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestDroppedSniffer puts a sniffer of somebody else's into the directory:
// after a reload it routes. One that may not be used changes nothing, and the
// operator is told why.
func TestDroppedSniffer(t *testing.T) {
	town := newTown(t, "demo", "rest")
	addr, btcp, budp := bind(t)
	dir := t.TempDir()
	loads := 0
	config := func(sniffer string, pins kit.M) kit.M {
		routes := func(to func(string) kit.M) []kit.M {
			if sniffer == "" {
				return []kit.M{kit.Route(to("rest"))}
			}
			m := kit.M{"sniffer": kit.M{"name": sniffer, "host": kit.A{"*.example.org"}, "key": kit.A{"demo"}}}
			return []kit.M{kit.Match(m, to("demo")), kit.Route(to("rest"))}
		}
		// No two configs are equal, for a load of the one that runs does nothing.
		// The time is for machines that are busy with other tests.
		loads++
		host := kit.M{"dir": dir, "call_timeout": fmt.Sprintf("%dms", 20000+loads)}
		if pins != nil {
			host["modules"] = pins
		}
		return kit.App(kit.M{"tcp": kit.Listener([]string{btcp}, routes(tcp)...), "udp": kit.Listener([]string{budp}, routes(udp)...)},
			town.pools(), kit.M{"sniffers": kit.M{"wasm": host}})
	}
	first := []byte("HOST:Play.Example.ORG")
	p := kit.Start(t, config("", nil), kit.Options{})
	at := func(what, want string) {
		t.Helper()
		goes(t, what, addr, want, first)
		reaches(t, what, addr, want, first, []byte("again"))
		goes(t, what+", another host", addr, "rest", []byte("HOST:play.example.com"))
		goes(t, what+", other bytes", addr, "rest", []byte("hello"))
	}
	at("before there is a sniffer", "rest")
	if err := p.Load(config("demo", nil)); err == nil || !strings.Contains(err.Error(), "demo") {
		t.Errorf("a route that names a sniffer that there is not: %v", err)
	}
	drop(t, dir, "demo", guest(t, "ok-host"))
	at("before the reload", "rest")
	p.MustLoad(config("demo", nil))
	at("after it", "demo")

	// A bad file beside it: skipped, and the log says why.
	drop(t, dir, "bad", guest(t, "imports-func"))
	p.MustLoad(config("demo", nil))
	at("with a bad one beside it", "demo")
	if log := p.Log(); !strings.Contains(log, `"sniffer":"bad"`) || !strings.Contains(log, "unexpected_import") {
		t.Error("the log does not say why the bad one is skipped")
	}
	if err := p.Load(config("bad", nil)); err == nil {
		t.Error("a route may name the bad one")
	}
	at("after that was refused", "demo")

	// A bad file in its place: a config that needs it is refused.
	drop(t, dir, "demo", nil)
	if err := p.Load(config("demo", nil)); err == nil {
		t.Error("a config that names a sniffer that does not load was taken")
	}
	at("after its file was damaged", "demo")

	// With pins the error itself has the reason.
	os.Remove(filepath.Join(dir, "bad.wasm"))
	drop(t, dir, "demo", guest(t, "ok-host"))
	pin := func(name string) kit.M {
		sum := sha256.Sum256(guest(t, name))
		return kit.M{"sha256": hex.EncodeToString(sum[:])}
	}
	p.MustLoad(config("demo", kit.M{"demo": pin("ok-host")}))
	at("pinned", "demo")
	if err := p.Load(config("demo", kit.M{"demo": pin("reject")})); err == nil || !strings.Contains(err.Error(), "sha256") {
		t.Errorf("another file than the pinned one: %v", err)
	}
	drop(t, dir, "bad", guest(t, "no-sniff"))
	if err := p.Load(config("demo", kit.M{"demo": pin("ok-host"), "bad": pin("no-sniff")})); err == nil || !strings.Contains(err.Error(), "sniff") || !strings.Contains(err.Error(), "bad") {
		t.Errorf("a pinned module without what it must have: %v", err)
	}
	at("after two refusals", "demo")
}

// TestRejectingSniffer has a sniffer that wants every flow dropped: that is
// done without a word, before hints and routes are asked, and counted.
func TestRejectingSniffer(t *testing.T) {
	town := newTown(t, "rest", "hinted")
	addr, btcp, budp := bind(t)
	dir := t.TempDir()
	drop(t, dir, "ban", guest(t, "reject"))
	never := kit.M{"sniffer": kit.M{"name": "ban"}}
	p := kit.Start(t, kit.App(kit.M{
		"tcp": kit.With(kit.Listener([]string{btcp}, kit.Match(never, tcp("rest")), kit.Route(tcp("rest"))), kit.M{"route_hint": true}),
		"udp": kit.With(kit.Listener([]string{budp}, kit.Match(never, udp("rest")), kit.Route(udp("rest"))), kit.M{"route_hint": true}),
	}, town.pools(), kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": dir, "call_timeout": "20s"}}}), kit.Options{})
	cutOff(t, p, "a connection", "tcp", addr, "sniffer_reject", []byte("hello"))
	dropped(t, p, "a datagram", "udp", addr, "sniffer_reject", []byte("hello"))
	push(t, p, "127.0.0.7", "hinted-udp", 600)
	droppedFrom(t, p, "a datagram with a hint", "127.0.0.7", "udp", addr, "sniffer_reject", []byte("hello"))
	push(t, p, "127.0.0.7", "hinted", 600)
	before := p.Metric("listener_connections_total", "result", "sniffer_reject")
	goesFrom(t, "a connection with a hint", "127.0.0.7", addr, nowhere, []byte("hello"))
	kit.Settles(t, "connections rejected", before+1, func() float64 { return p.Metric("listener_connections_total", "result", "sniffer_reject") })
	for _, at := range town {
		if n := at.heard(); n != 0 {
			t.Errorf("%s has heard of %d flows", at.name, n)
		}
	}
}

// TestFailingSniffer has sniffers that run for ever, trap, or answer nonsense.
// What they would have said is not known: no flow reaches a route after them.
func TestFailingSniffer(t *testing.T) {
	for name, result := range map[string]string{"loop": "timeout", "trap": "trap", "result-oob": "bad_output"} {
		t.Run(name, func(t *testing.T) {
			town := newTown(t, "lax")
			addr, btcp, budp := bind(t)
			dir := t.TempDir()
			drop(t, dir, "failing", guest(t, name))
			m := kit.M{"sniffer": kit.M{"name": "failing"}}
			peek := kit.M{"peek": kit.M{"timeout": "250ms"}}
			p := kit.Start(t, kit.App(kit.M{
				"tcp": kit.With(kit.Listener([]string{btcp}, kit.Match(m, tcp("lax")), kit.Route(tcp("lax"))), peek),
				"udp": kit.With(kit.Listener([]string{budp}, kit.Match(m, udp("lax")), kit.Route(udp("lax"))), peek),
			}, town.pools(), kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": dir, "call_timeout": "10ms"}}}), kit.Options{})
			for range 2 {
				cutOff(t, p, "a connection", "tcp", addr, "no_route", []byte("hello"))
				cutOff(t, p, "a connection in two segments", "tcp", addr, "no_route", []byte("hel"), []byte("lo"))
				dropped(t, p, "a datagram", "udp", addr, "no_route", []byte("hello"))
			}
			goes(t, "a silent client", addr, "lax") // it has shown nothing that a sniffer could judge
			if n := p.Metric("sniffer_calls_total", "name", "failing", "result", result); n == 0 {
				t.Errorf("no call is counted as %s: %v", result, p.Metrics())
			}
			if n := town["lax"].heard(); n != 1 {
				t.Errorf("the lax route has had %d flows, want that of the silent client", n)
			}
		})
	}
}
