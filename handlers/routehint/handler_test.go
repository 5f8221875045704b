package routehint_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	_ "github.com/wayhouse-proxy/wayhouse/handlers/pool"
	"github.com/wayhouse-proxy/wayhouse/handlers/routehint"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	_ "github.com/wayhouse-proxy/wayhouse/modules/adminapi"
	"github.com/wayhouse-proxy/wayhouse/modules/intent"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func TestMain(m *testing.M) { kit.Main(m) }

// load runs a config until the test ends and returns the URL of its admin API.
func load(t *testing.T, config kit.M) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	admin := ln.Addr().String()
	ln.Close()
	config["admin"] = kit.M{"listen": admin, "config": kit.M{"persist": false}}
	b, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(b, true); err != nil {
		t.Fatalf("loading %s: %v", b, err)
	}
	t.Cleanup(func() {
		// Caddy keeps the admin endpoint of the last config after Stop.
		if err := caddy.Load([]byte(`{"admin": {"disabled": true, "config": {"persist": false}}}`), true); err != nil {
			t.Error(err)
		}
		if err := caddy.Stop(); err != nil {
			t.Errorf("stopping: %v", err)
		}
		http.DefaultClient.CloseIdleConnections()
	})
	return "http://" + admin
}

func call(t *testing.T, method, url, body string) (status int, answer string) {
	t.Helper()
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

// named is a UDP backend that answers with its name.
func named(t *testing.T, name string) string {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			_, from, err := pc.ReadFrom(make([]byte, 2048))
			if err != nil {
				return
			}
			pc.WriteTo([]byte(name), from)
		}
	})
	t.Cleanup(func() { pc.Close(); wg.Wait() })
	return pc.LocalAddr().String()
}

// goes wants a new client's datagram answered by a backend.
func goes(t *testing.T, from, listener, want string) {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("udp", proxy.Running().Listening(listener)[0].Addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(kit.Long))
	io.WriteString(c, "x")
	b := make([]byte, 64)
	n, err := c.Read(b)
	if string(b[:n]) != want {
		t.Fatalf("%s at %s reached %q, %v; want %q", from, listener, b[:n], err, want)
	}
}

func TestRouteHint(t *testing.T) {
	toLobby := kit.Route(kit.M{"handler": "pool", "pool": "lobby"})
	config := func() kit.M {
		return kit.App(kit.M{
			"option":  kit.With(kit.Listener([]string{"udp/127.0.0.1:0"}, toLobby), kit.M{"route_hint": true}),
			"handler": kit.Listener([]string{"udp/127.0.0.1:0"}, kit.Route(kit.M{"handler": "route_hint"}), toLobby),
			"none":    kit.Listener([]string{"udp/127.0.0.1:0"}, toLobby),
		}, kit.M{"lobby": kit.Pool(named(t, "lobby")), "survival": kit.Pool(named(t, "survival"))})
	}
	api := load(t, config())
	defer intent.RouteHints.Delete(netip.MustParseAddr("127.0.0.9"))
	push := func(body string) (int, string) { t.Helper(); return call(t, "POST", api+"/route-hint", body) }
	if status, answer := push(`{"src_ip": "::ffff:127.0.0.9", "pool": "survival", "ttl_sec": 3600}`); status != 204 {
		t.Fatalf("%d %s", status, answer)
	}
	check := func() {
		t.Helper()
		for _, listener := range []string{"option", "handler"} {
			goes(t, "127.0.0.9", listener, "survival")
			goes(t, "127.0.0.8", listener, "lobby")
		}
		goes(t, "127.0.0.9", "none", "lobby")
	}
	check()
	api = load(t, config()) // the table outlives it
	check()

	if status, answer := call(t, "GET", api+"/route-hints", ""); status != 200 || !strings.Contains(answer, `{"src_ip":"127.0.0.9","pool":"survival","ttl_sec":3`) || !json.Valid([]byte(answer)) {
		t.Errorf("%d %s", status, answer)
	}
	if status, answer := call(t, "GET", api+"/route-hints?format=text", ""); status != 200 || !strings.HasPrefix(answer, "src_ip=127.0.0.9 pool=survival ttl_sec=3") {
		t.Errorf("%d %s", status, answer)
	}
	for body, want := range map[string]int{
		`{"src_ip": "127.0.0.7", "pool": "survival", "ttl_sec": 1}`:    204,
		`{"src_ip": "127.0.0.7", "pool": "survival"}`:                  204,
		`{"src_ip": "127.0.0.7", "pool": "survival", "ttl_sec": 0}`:    400,
		`{"src_ip": "127.0.0.7", "pool": "survival", "ttl_sec": 3601}`: 400,
		`{"src_ip": "127.0.0.7", "pool": "survival", "ttl_sec": 1.5}`:  400,
		`{"src_ip": "127.0.0.7", "pool": "survivel"}`:                  404,
		`{"src_ip": "127.0.0.7"}`:                                      400,
		`{"pool": "survival"}`:                                         400,
		`{"src_ip": "127.0.0.0/8", "pool": "survival"}`:                400,
		`{"src_ip": "fe80::1%lo", "pool": "survival"}`:                 400,
		`{"src_ip": "127.0.0.7", "pool": "survival", "ttl": 5}`:        400,
		`{"src_ip": "127.0.0.7", "pool": "survival"} {}`:               400,
		`[]`: 400,
		``:   400,
		`{"src_ip": "127.0.0.7", "pool": "` + string(bytes.Repeat([]byte("x"), 5000)) + `"}`: 413,
	} {
		if status, answer := push(body); status != want {
			t.Errorf("%.80s: %d %s, want %d", body, status, answer, want)
		}
	}
	for path, want := range map[string]int{"127.0.0.9": 204, "127.0.0.10": 404, "nobody": 400, "127.0.0.7": 204} {
		if status, answer := call(t, "DELETE", api+"/route-hints/"+path, ""); status != want {
			t.Errorf("DELETE %s: %d %s, want %d", path, status, answer, want)
		}
	}
	goes(t, "127.0.0.9", "option", "lobby")
}

// TestPoolIsGone has a hint for a pool that a reload takes away.
func TestPoolIsGone(t *testing.T) {
	lobby, gone := kit.Pool(named(t, "lobby")), kit.Pool(named(t, "gone"))
	listeners := kit.M{"l": kit.With(kit.Listener([]string{"udp/127.0.0.1:0"}, kit.Route(kit.M{"handler": "pool", "pool": "lobby"})), kit.M{"route_hint": true})}
	load(t, kit.App(listeners, kit.M{"lobby": lobby, "gone": gone}))
	client := netip.MustParseAddr("127.0.0.19")
	intent.RouteHints.Set(client, "gone", time.Hour)
	defer intent.RouteHints.Delete(client)
	goes(t, "127.0.0.19", "l", "gone")
	load(t, kit.App(listeners, kit.M{"lobby": lobby}))
	goes(t, "127.0.0.19", "l", "lobby")
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"route_hint":          "<nil>",
		"route_hint x":        `unexpected argument "x" of route_hint`,
		"route_hint {\n a\n}": `unrecognized option "a" of route_hint`,
	} {
		var h routehint.Handler
		if err := h.UnmarshalCaddyfile(caddyfile.NewTestDispenser(in)); !strings.HasPrefix(fmt.Sprint(err), want) {
			t.Errorf("%s: %v, want %s", in, err, want)
		}
	}
}

// TestFullTable has as many hints as there may be: the next one is refused with
// the reason, and those that are there still send their clients.
func TestFullTable(t *testing.T) {
	config := kit.App(kit.M{"l": kit.With(kit.Listener([]string{"udp/127.0.0.1:0"}, kit.Route(kit.M{"handler": "pool", "pool": "lobby"})), kit.M{"route_hint": true})},
		kit.M{"lobby": kit.Pool(named(t, "lobby")), "survival": kit.Pool(named(t, "survival"))})
	api := load(t, config)
	push := func(client string) (int, string) {
		t.Helper()
		return call(t, "POST", api+"/route-hint", `{"src_ip": "`+client+`", "pool": "survival", "ttl_sec": 3600}`)
	}
	if status, answer := push("127.0.0.9"); status != 204 {
		t.Fatalf("%d %s", status, answer)
	}
	defer func() {
		for h := range intent.RouteHints.All {
			intent.RouteHints.Delete(h.Client)
		}
	}()
	for i := 0; intent.RouteHints.Set(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), "survival", time.Hour); i++ {
	}
	if n := intent.RouteHints.Len(); n != 200000 {
		t.Fatalf("the table is full with %d hints", n)
	}
	if status, answer := push("127.0.0.8"); status != 503 || !strings.Contains(answer, "there are 200000 hints already") {
		t.Errorf("one more: %d %s", status, answer)
	}
	goes(t, "127.0.0.8", "l", "lobby")
	goes(t, "127.0.0.9", "l", "survival")
	if status, answer := push("127.0.0.9"); status != 204 {
		t.Errorf("a client with a hint: %d %s", status, answer)
	}
	if status, answer := call(t, "DELETE", api+"/route-hints/10.0.0.1", ""); status != 204 {
		t.Fatalf("%d %s", status, answer)
	}
	if status, answer := push("127.0.0.8"); status != 204 {
		t.Errorf("with room again: %d %s", status, answer)
	}
	goes(t, "127.0.0.8", "l", "survival")
}
