package reload

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// mistake is one way to write a config that cannot run. make changes a good
// config, want is in the error.
type mistake struct {
	name string
	want string
	make func(app kit.M)
}

// mistakes are changes to the config of TestRejected.
func mistakes(other int) []mistake {
	listener := func(f func(l kit.M)) func(kit.M) {
		return func(app kit.M) { f(app["listeners"].(kit.M)["game"].(kit.M)) }
	}
	pool := func(key string, v any) func(kit.M) {
		return func(app kit.M) { app["pools"].(kit.M)["p"].(kit.M)[key] = v }
	}
	bind := func(addrs ...string) func(kit.M) { return listener(func(l kit.M) { l["bind"] = addrs }) }
	route := func(routes ...any) func(kit.M) { return listener(func(l kit.M) { l["routes"] = routes }) }
	free := fmt.Sprintf("tcp/127.0.0.1:%d", other)
	return []mistake{
		{"unknown app option", "wrokers", func(a kit.M) { a["wrokers"] = 2 }},
		{"workers below zero", "workers", func(a kit.M) { a["workers"] = -1 }},
		{"workers beyond the most", "workers", func(a kit.M) { a["workers"] = 1000 }},
		{"workers of the wrong type", "workers", func(a kit.M) { a["workers"] = "two" }},
		{"grace below zero", "shutdown_grace", func(a kit.M) { a["shutdown_grace"] = "-1s" }},
		{"grace that is no duration", "bananas", func(a kit.M) { a["shutdown_grace"] = "bananas" }},
		{"limit of zero connections", "limits.max_connections", func(a kit.M) { a["limits"] = kit.M{"max_connections": 0} }},
		{"limit of zero sessions", "limits.max_udp_sessions", func(a kit.M) { a["limits"] = kit.M{"max_udp_sessions": 0} }},
		{"limit of zero new", "limits.max_new_sessions_per_sec", func(a kit.M) { a["limits"] = kit.M{"max_new_sessions_per_sec": 0} }},
		{"unknown limit", "max_players", func(a kit.M) { a["limits"] = kit.M{"max_players": 1} }},

		{"no bind", "listeners.game.bind", bind()},
		{"bind without protocol", "127.0.0.1:1", bind("127.0.0.1:1")},
		{"bind of an unknown protocol", "sctp", bind("sctp/127.0.0.1:1")},
		{"bind without port", "has no port", bind("tcp/127.0.0.1")},
		{"bind to a name", "is not an IP address", bind("tcp/localhost:1")},
		{"bind to a port too high", "70000", bind("tcp/127.0.0.1:70000")},
		{"bind to a range backwards", "backwards", bind("udp/127.0.0.1:200-100")},
		{"bind to a range too large", "1024", bind("udp/127.0.0.1:1000-3000")},
		{"bind to a range from zero", "begins at port 1", bind("udp/127.0.0.1:0-5")},
		{"bind to bare IPv6", "brackets", bind("tcp/::1:80")},
		{"bind twice in a listener", "already", bind(free, free)},
		{"bind overlapping a range", "already", bind(free, fmt.Sprintf("tcp/127.0.0.1:%d-%d", other-1, other+1))},
		{"bind of another listener", "listeners.other", func(a kit.M) {
			a["listeners"].(kit.M)["other"] = kit.ToPool("p", free)
			a["listeners"].(kit.M)["zother"] = kit.ToPool("p", free)
		}},
		{"bind to an address that is not ours", "192.0.2.1", bind("tcp/192.0.2.1:9")},
		{"listener with a bad name", "the name has", func(a kit.M) { a["listeners"].(kit.M)["a b"] = kit.ToPool("p", free) }},
		{"listener that is null", "null", func(a kit.M) { a["listeners"].(kit.M)["n"] = nil }},
		{"unknown listener option", "bnid", listener(func(l kit.M) { l["bnid"] = 1 })},
		{"peek timeout below zero", "listeners.game.peek.timeout", listener(func(l kit.M) { l["peek"] = kit.M{"timeout": "-1s"} })},
		{"peek of too many bytes", "listeners.game.peek.max_bytes", listener(func(l kit.M) { l["peek"] = kit.M{"max_bytes": 1 << 20} })},
		{"unknown on_undecided", "listeners.game.peek.on_undecided", listener(func(l kit.M) { l["peek"] = kit.M{"on_undecided": "maybe"} })},

		{"route without handler", "listeners.game.routes[0]", route(kit.M{"match": kit.A{}})},
		{"unknown handler", "layer4.handlers.teleport", route(kit.Route(kit.M{"handler": "teleport"}))},
		{"handler without a name", "handler", route(kit.Route(kit.M{"pool": "p"}))},
		{"unknown matcher", "layer4.matchers.telepathy", route(kit.Match(kit.M{"telepathy": kit.M{}}, kit.M{"handler": "echo"}))},
		{"matcher that is no regexp", "regexp", route(kit.Match(kit.M{"regexp": kit.M{"pattern": "("}}, kit.M{"handler": "echo"}))},
		{"unknown pool", "no pool is named", route(kit.Route(kit.M{"handler": "pool", "pool": "q"}))},
		{"no pool", "pool", route(kit.Route(kit.M{"handler": "pool"}))},
		{"pool by name and inline", "pool", route(kit.Route(kit.M{"handler": "pool", "pool": "p", "targets": kit.A{"127.0.0.1:1"}}))},
		{"inline pool without targets", "targets", route(kit.Route(kit.M{"handler": "pool", "max_tries": 3}))},
		{"unknown option of a handler", "polo", route(kit.Route(kit.M{"handler": "pool", "polo": "p"}))},

		{"pool without targets", "pools.p.targets", pool("targets", kit.A{})},
		{"pool that is null", "pools.n", func(a kit.M) { a["pools"].(kit.M)["n"] = nil }},
		{"target without port", "pools.p.targets", pool("targets", kit.A{"10.0.0.1"})},
		{"target with port zero", "pools.p.targets", pool("targets", kit.A{"10.0.0.1:0"})},
		{"target twice", "twice", pool("targets", kit.A{"10.0.0.1:7", "10.0.0.1:7"})},
		{"target that is nowhere", "pools.p.targets", pool("targets", kit.A{"0.0.0.0:7"})},
		{"target that is no name", "pools.p.targets", pool("targets", kit.A{"not a host:7"})},
		{"unknown balancer", "coin", pool("balancer", kit.M{"policy": "coin"})},
		{"option of another balancer", "hash_on", pool("balancer", kit.M{"policy": "round_robin", "hash_on": "src_ip"})},
		{"weight of zero", "weight", pool("balancer", kit.M{"policy": "weighted", "weights": kit.M{"127.0.0.1:1": 0}})},
		{"unknown check", "prayer", pool("health", kit.M{"check": "prayer"})},
		{"probe without anything to send", "send", pool("health", kit.M{"check": "udp_probe"})},
		{"check with interval zero", "interval", pool("health", kit.M{"check": "tcp_connect", "interval": "0s"})},
		{"check with rise zero", "rise", pool("health", kit.M{"check": "tcp_connect", "rise": 0})},
		{"connect timeout zero", "pools.p.connect_timeout", pool("connect_timeout", 0)},
		{"idle timeout zero", "pools.p.idle_timeout", pool("idle_timeout", 0)},
		{"lifetime below zero", "pools.p.max_lifetime", pool("max_lifetime", "-1s")},
		{"no tries", "pools.p.max_tries", pool("max_tries", 0)},
		{"keepalive that is none", "keepalive", pool("keepalive", "often")},
		{"unknown on_all_down", "pools.p.on_all_down", pool("on_all_down", "cry")},
		{"unknown on_backend_down", "pools.p.on_backend_down", pool("on_backend_down", "cry")},
		{"unknown on_backend_removed", "pools.p.on_backend_removed", pool("on_backend_removed", "cry")},
		{"no sessions of a backend", "pools.p.per_backend.max_sessions", pool("per_backend", kit.M{"max_sessions": 0})},
		{"source that is no address", "pools.p.source_addresses", pool("source_addresses", kit.A{"home"})},
		{"unknown pool option", "targtes", pool("targtes", kit.A{})},
		{"filter without a kind", "filter", listener(func(l kit.M) { l["filters"] = kit.A{kit.M{}} })},
		{"unknown filter", "moat", listener(func(l kit.M) { l["filters"] = kit.A{kit.M{"filter": "moat"}} })},
		{"filter of a network that is none", "10.0.0.0/33", listener(func(l kit.M) {
			l["filters"] = kit.A{kit.M{"filter": "acl", "deny": kit.A{"10.0.0.0/33"}}}
		})},
		{"filter of a country without a database", "geo_db", listener(func(l kit.M) {
			l["filters"] = kit.A{kit.M{"filter": "geo", "allow": kit.A{"DE"}}}
		})},
		{"rate of nothing", "rate_limit", listener(func(l kit.M) { l["filters"] = kit.A{kit.M{"filter": "rate_limit"}} })},
		{"database that is not there", "geo_db", func(a kit.M) { a["geo_db"] = "/nowhere/countries.mmdb" }},
		{"PROXY headers from nobody", "accept_proxy", listener(func(l kit.M) { l["accept_proxy"] = kit.M{} })},
		{"PROXY headers from what is no network", "everyone", listener(func(l kit.M) { l["accept_proxy"] = kit.M{"from": kit.A{"everyone"}} })},
		{"prefix that is none", "prefix", listener(func(l kit.M) { l["prefix"] = "home" })},
		{"gate of TCP", "first_packet_gate", listener(func(l kit.M) { l["first_packet_gate"] = true })},
		{"PROXY header that there is not", "v3", pool("proxy_protocol", "v3")},
		{"PROXY header for datagrams to TCP", "v2-udp", pool("proxy_protocol", "v2-udp")},
		{"unknown resolver", "wayhouse.resolvers.oracle", func(a kit.M) { a["resolvers"] = kit.M{"r": kit.M{"resolver": "oracle"}} }},
		{"resolver without an endpoint", "endpoint", func(a kit.M) { a["resolvers"] = kit.M{"r": kit.M{"resolver": "http"}} }},
		{"resolver that is not named", "no resolver", route(kit.Route(kit.M{"handler": "resolve", "resolver": "r"}))},
		{"unknown host of sniffers", "wayhouse.sniffer_hosts.lua", func(a kit.M) { a["sniffers"] = kit.M{"lua": kit.M{}} }},
		{"unknown sniffer", "quake", route(kit.Match(kit.M{"sniffer": kit.M{"name": "quake"}}, kit.M{"handler": "echo"}))},
		{"bytes that are no hexadecimal digits", "first_bytes", route(kit.Match(kit.M{"first_bytes": kit.M{"prefix": "hex:xyz"}}, kit.M{"handler": "echo"}))},
		{"unknown help of the kernel", "ebpf", func(a kit.M) { a["offload"] = "ebpf" }},
		{"pool of UDP alone without a check", "pools.p", func(a kit.M) {
			a["listeners"].(kit.M)["game"].(kit.M)["bind"] = kit.A{fmt.Sprintf("udp/127.0.0.1:%d", other)}
			delete(a["pools"].(kit.M)["p"].(kit.M), "health")
		}},
	}
}

// TestRejected alternates configs that cannot run with one that can, under
// load, by the API and by signals. What is wrong is named, nothing of the running
// config changes, and the counters are exact.
func TestRejected(t *testing.T) {
	port, other, web := kit.Port(t), kit.Ports(t, 3)+1, kit.Port(t)
	tcp, udp := kit.NewTCPBackend(t, 1, "127.0.0.1:0"), kit.NewUDPBackend(t, 1, "127.0.0.1:0")
	good := func(variant int) kit.M {
		return kit.App(
			kit.M{"game": kit.ToPool("p", fmt.Sprintf("tcp/127.0.0.1:%d", port)), "dgram": kit.ToPool("u", fmt.Sprintf("udp/127.0.0.1:%d", port))},
			kit.M{"p": kit.Pool(tcp.Addr), "u": kit.Pool(udp.Addr), "unused": kit.With(kit.Pool(tcp.Addr), kit.M{"max_tries": 1 + variant})},
		)
	}
	p := kit.Start(t, good(0), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(port), UDP: kit.Local(port), Conns: 20, Flows: 20, Rate: 400, Body: 10})
	sockets := listening(t, p, port)
	reject := append(mistakes(other),
		mistake{"another app fails to start", "address already in use", func(a kit.M) { a["web"] = true }},
		mistake{name: "no JSON at all"})
	if len(reject) < 80 {
		t.Errorf("%d kinds of mistakes", len(reject))
	}
	taken, err := net.Listen("tcp", kit.Local(web))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	refused, loaded, hash := 0, 0, hashOf(t, good(0))
	config := func() string { _, body := p.Get("/config/apps"); return body }
	signal := func(doc []byte) error {
		p.WriteDocument(doc)
		p.Signal(syscall.SIGHUP)
		kit.Eventually(t, "the load is counted", func() bool { ok, errs := counted(p); return ok+errs == loaded+refused+1 })
		if ok, _ := counted(p); ok > loaded {
			return nil
		}
		var last rejected
		p.JSON(lastRejected, &last)
		return errors.New(last.Error)
	}
	for i := range kit.Scaled(len(reject), 500) {
		m := reject[i%len(reject)]
		bring := []func([]byte) error{p.LoadDocument, signal}[i%7%2]
		before := config()
		doc := p.Document(good(0))
		if m.make != nil {
			var c kit.M
			if err := json.Unmarshal(doc, &c); err != nil {
				t.Fatal(err)
			}
			apps := c["apps"].(kit.M)
			m.make(apps["wayhouse"].(kit.M))
			if apps["wayhouse"].(kit.M)["web"] != nil {
				delete(apps["wayhouse"].(kit.M), "web")
				apps["http"] = kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{kit.Local(web)}}}}
			}
			doc = p.Document(c)
		} else {
			doc = append(doc, '}')
		}
		err := bring(doc)
		switch {
		case err == nil:
			t.Errorf("%s: taken", m.name)
			loaded++
		case !strings.Contains(err.Error(), m.want):
			t.Errorf("%s: the error does not tell %q: %v", m.name, m.want, err)
			fallthrough
		default:
			refused++
			if now := config(); now != before {
				t.Errorf("%s: the running config has changed from %s to %s", m.name, before, now)
			}
			if now, _ := applied(t, p); now != hash {
				t.Errorf("%s: the hash of the running config has changed from %s to %s", m.name, hash, now)
			}
		}
		if i%4 == 0 {
			c := good(1 + i%8/4)
			if err := bring(p.Document(c)); err != nil {
				t.Errorf("after %s: a config that can run is refused: %v", m.name, err)
			}
			loaded, hash = loaded+1, hashOf(t, c)
			if now, _ := applied(t, p); now != hash {
				t.Errorf("after %s: the hash of the running config is %s, want %s", m.name, now, hash)
			}
		}
	}
	load.Round(t)
	if r := load.Stop(); !r.Perfect() {
		t.Errorf("the load noticed: %v", &r)
	}
	if now := listening(t, p, port); now != sockets {
		t.Errorf("the listening sockets were %s and are %s", sockets, now)
	}
	if ok, errs := counted(p); ok != loaded || errs != refused {
		t.Errorf("config_reload_total is %d and %d of errors, want %d and %d", ok, errs, loaded, refused)
	}
	t.Logf("%d kinds of mistakes, %d configs refused, %d taken", len(reject), refused, loaded)
}

// TestRejectedWatch is TestRejected by a file that is watched, which takes a
// second for each.
func TestRejectedWatch(t *testing.T) {
	port, other := kit.Port(t), kit.Ports(t, 3)+1
	b := kit.NewTCPBackend(t, 1, "127.0.0.1:0")
	good := func(n int) kit.M {
		return kit.App(kit.M{"game": kit.ToPool("p", fmt.Sprintf("tcp/127.0.0.1:%d", port))},
			kit.M{"p": kit.Pool(b.Addr), fmt.Sprintf("q%d", n): kit.Pool(b.Addr)})
	}
	p := kit.Prepare(t, good(0), kit.Options{})
	start(p, "--watch")
	kit.Eventually(t, "the file is watched", func() bool { return strings.Contains(p.Log(), "watching config file") })
	sockets, reject := listening(t, p, port), mistakes(other)
	refused, loaded := 0, 0
	load := func(c kit.M) {
		t.Helper()
		p.WriteConfig(c)
		kit.Eventually(t, "the load is counted", func() bool { ok, errs := counted(p); return ok+errs == loaded+refused+1 })
	}
	for i := range kit.Scaled(4, 160) {
		m := reject[i*(len(reject)/4+1)%len(reject)]
		var c kit.M
		if err := json.Unmarshal(p.Document(good(i)), &c); err != nil {
			t.Fatal(err)
		}
		m.make(c["apps"].(kit.M)["wayhouse"].(kit.M))
		hash, _ := applied(t, p)
		load(c)
		refused++
		var last rejected
		if p.JSON(lastRejected, &last); last.Source != "watch" || !strings.Contains(last.Error, m.want) {
			t.Errorf("%s: last rejected: %+v", m.name, last)
		}
		if now, _ := applied(t, p); now != hash {
			t.Errorf("%s: the hash of the running config has changed from %s to %s", m.name, hash, now)
		}
		if i%2 == 1 {
			load(good(i + 1))
			loaded++
			if now, _ := applied(t, p); now != hashOf(t, good(i+1)) {
				t.Errorf("after %s: the hash of the running config is %s", m.name, now)
			}
		}
	}
	if ok, errs := counted(p); ok != loaded || errs != refused {
		t.Errorf("config_reload_total is %d and %d of errors, want %d and %d", ok, errs, loaded, refused)
	}
	if now := listening(t, p, port); now != sockets {
		t.Errorf("the listening sockets were %s and are %s", sockets, now)
	}
}
