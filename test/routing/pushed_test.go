package routing

import (
	"encoding/hex"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// push pushes a route hint and wants it taken.
func push(t *testing.T, p *kit.Process, src, pool string, ttl int) {
	t.Helper()
	body := fmt.Sprintf(`{"src_ip": %q, "pool": %q, "ttl_sec": %d}`, src, pool, ttl)
	if status, answer := p.Do(http.MethodPost, "/route-hint", []byte(body)); status != http.StatusNoContent {
		t.Fatalf("POST /route-hint %s: %d %s", body, status, answer)
	}
}

// TestHints has a launcher push where its client is to go. The hint wins over
// every route, for that client alone, until it expires or is taken back.
func TestHints(t *testing.T) {
	town := newTown(t, "survival", "lobby")
	addr, btcp, budp := bind(t)
	plain, ptcp, _ := bind(t)
	sni := kit.Match(kit.M{"sni": kit.M{"host": kit.A{"a.example.com"}}}, tcp("lobby"))
	config := kit.App(kit.M{
		"tcp":   kit.With(kit.Listener([]string{btcp}, sni, kit.Route(tcp("lobby"))), kit.M{"route_hint": true}),
		"udp":   kit.With(kit.Listener([]string{budp}, kit.Route(udp("lobby"))), kit.M{"route_hint": true}),
		"plain": kit.Listener([]string{ptcp}, kit.Route(tcp("lobby"))),
	}, town.pools())
	p := kit.Start(t, config, kit.Options{})
	const pushed, other = "127.0.0.7", "127.0.0.8"
	push(t, p, pushed, "survival", 600)
	goesFrom(t, "pushed", pushed, addr, "survival", []byte("raw"))
	goesFrom(t, "pushed, and silent", pushed, addr, "survival")
	goesFrom(t, "pushed, with a name for a route", pushed, addr, "survival", []byte{22, 3, 1})
	goesFrom(t, "another client", other, addr, "lobby", []byte("raw"))
	goesFrom(t, "pushed, where hints are not asked for", pushed, plain, "lobby", []byte("raw"))
	if n := p.Metric("route_hints_applied_total", "listener", "tcp"); n != 3 {
		t.Errorf("%v hints were applied, want 3", n)
	}
	// The pool of the hint is one for TCP; over UDP another is pushed.
	push(t, p, pushed, "survival-udp", 600)
	reachesFrom(t, "pushed", pushed, addr, "survival", []byte("raw"), []byte("again"))
	reachesFrom(t, "another client", other, addr, "lobby", []byte("raw"))
	p.MustLoad(config)
	reachesFrom(t, "pushed before a reload", pushed, addr, "survival", []byte("raw"))

	if status, answer := p.Do(http.MethodDelete, "/route-hints/"+pushed, nil); status != http.StatusNoContent {
		t.Errorf("DELETE: %d %s", status, answer)
	}
	reachesFrom(t, "taken back", pushed, addr, "lobby", []byte("raw"))
	push(t, p, pushed, "survival-udp", 1)
	kit.Eventually(t, "the hint expires", func() bool {
		c := callFrom(t, pushed, addr)
		c.send(t, []byte("raw"))
		name, err := c.where()
		if err != nil {
			t.Fatal(err)
		}
		return name == "lobby"
	})
	body := []byte(`{"src_ip": "127.0.0.7", "pool": "nobody"}`)
	if status, answer := p.Do(http.MethodPost, "/route-hint", body); status != http.StatusNotFound || !strings.Contains(answer, "nobody") {
		t.Errorf("a hint for a pool that there is not: %d %s", status, answer)
	}
}

// mint makes a ticket by the command.
func mint(t *testing.T, key string, args ...string) []byte {
	t.Helper()
	cmd := exec.Command(kit.Binary(t, ""), append([]string{"ticket", "mint", "--key-file", key}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("ticket mint %v: %v: %s", args, err, stderr.String())
	}
	b, err := hex.DecodeString(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatalf("ticket mint %v: %q", args, out)
	}
	return b
}

// TestTickets has somebody with the key send clients to pools.
func TestTickets(t *testing.T) {
	town := newTown(t, "survival", "creative", "lobby")
	addr, btcp, budp := bind(t)
	key, stranger := filepath.Join(t.TempDir(), "key"), filepath.Join(t.TempDir(), "key")
	for file, k := range map[string]string{key: strings.Repeat("5a", 32), stranger: strings.Repeat("a5", 32)} {
		if err := os.WriteFile(file, []byte("hex:"+k+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	routes := func(to func(string) kit.M) []kit.M {
		ticket := func(pool string) kit.M {
			return kit.Match(kit.M{"ticket": kit.M{"keys": kit.A{"{file." + key + "}"}, "pool": pool, "offset": 2}}, to(pool))
		}
		return []kit.M{ticket("survival"), ticket("creative"), kit.Route(to("lobby"))}
	}
	peek := kit.M{"peek": kit.M{"timeout": "20s"}}
	kit.Start(t, kit.App(kit.M{
		"tcp": kit.With(kit.Listener([]string{btcp}, routes(tcp)...), peek),
		"udp": kit.With(kit.Listener([]string{budp}, routes(udp)...), peek),
	}, town.pools()), kit.Options{})
	first := func(ticket []byte) []byte { return append(append([]byte("hi"), ticket...), "more of it"...) }
	damaged := first(mint(t, key, "--pool", "survival"))
	damaged[20] ^= 1
	for name, tc := range map[string]struct {
		first []byte
		want  string
	}{
		"for survival":        {first(mint(t, key, "--pool", "survival")), "survival"},
		"for creative":        {first(mint(t, key, "--pool", "creative")), "creative"},
		"for another pool":    {first(mint(t, key, "--pool", "hardcore")), "lobby"},
		"of a stranger":       {first(mint(t, stranger, "--pool", "survival")), "lobby"},
		"for this address":    {first(mint(t, key, "--pool", "survival", "--ip", "127.0.0.1")), "survival"},
		"for another address": {first(mint(t, key, "--pool", "survival", "--ip", "127.0.0.9")), "lobby"},
		"damaged":             {damaged, "lobby"},
		"without":             {make([]byte, 200), "lobby"},
	} {
		goes(t, name, addr, tc.want, tc.first)
		goes(t, name+", cut in its middle", addr, tc.want, tc.first[:17], tc.first[17:])
		reaches(t, name, addr, tc.want, tc.first, []byte("again"))
	}
	cut := first(mint(t, key, "--pool", "survival"))[:20]
	reaches(t, "a datagram with half of a ticket", addr, "lobby", cut)
	short := first(mint(t, key, "--pool", "survival", "--ttl", "1s"))
	kit.Eventually(t, "the ticket expires", func() bool {
		c := dial(t, addr)
		c.send(short)
		name, err := c.where()
		if err != nil {
			t.Fatal(err)
		}
		return name == "lobby"
	})
}
