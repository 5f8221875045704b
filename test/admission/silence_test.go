package admission

import (
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// refusal is something that keeps a flow out.
type refusal struct {
	listener kit.M // options
	limits   kit.M
	app      kit.M // options
	match    kit.M // of the route
	handler  kit.M // of the route; nil: the pool
	pool     kit.M // options
	before   int   // flows that get in first, and stay
	from     string
	provoke  func(*testing.T, *kit.Process)
	only     string // protocol
	routes   bool   // it is a matter of routes, which a server of another app has of its own
	counted  func(kit.Metrics) float64
	unlogged bool
	wild     bool // it is about an address that a wildcard has

	target func(addr string) string // what a resolver names, by the listener's address
}

func set(level string) func(*testing.T, *kit.Process) {
	return func(t *testing.T, p *kit.Process) {
		if status, body := p.Do(http.MethodPost, "/admin/overload", []byte(`{"level": `+level+`}`)); status != 200 {
			t.Fatal(status, body)
		}
	}
}

// end tells a process to end, which it does not while it has flows.
func end(t *testing.T, p *kit.Process) {
	p.Signal(syscall.SIGTERM)
	kit.Eventually(t, "the process says that it ends", func() bool { status, _ := p.Get("/readyz"); return status == http.StatusServiceUnavailable })
}

func refusalsOf(t *testing.T) map[string]refusal {
	filters := func(list ...any) kit.M { return kit.M{"filters": list} }
	hello := kit.M{"first_bytes": kit.M{"prefix": "ascii:HELLO"}}
	sniffers, modules := t.TempDir(), filepath.Join("..", "..", "modules", "sniff", "wasm", "testdata", "guests")
	if b, err := os.ReadFile(filepath.Join(modules, "reject.wasm")); err != nil {
		t.Fatal(err)
	} else if err := os.WriteFile(filepath.Join(sniffers, "ban.wasm"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	return map[string]refusal{
		"acl":                         {listener: filters(kit.M{"filter": "acl", "deny": []string{"127.0.0.0/8"}})},
		"geo":                         {listener: filters(kit.M{"filter": "geo", "deny": []string{"DE"}}), app: kit.M{"geo_db": countries(t, "127.0.0.0/8", "DE")}},
		"rate_ip":                     {listener: filters(kit.M{"filter": "rate_limit", "per_ip": kit.M{"rate": 1, "burst": 2}}), before: 2},
		"rate_net":                    {listener: filters(kit.M{"filter": "rate_limit", "per_net": kit.M{"rate": 1, "burst": 2}}), before: 2},
		"src_conn_ip":                 {listener: filters(kit.M{"filter": "source_limit", "max_per_ip": 2}), before: 2},
		"src_conn_net":                {listener: filters(kit.M{"filter": "source_limit", "max_per_net": 2}), before: 2},
		"max_conn":                    {limits: kit.M{"max_connections": 2}, before: 2, only: "tcp"},
		"max_udp":                     {limits: kit.M{"max_udp_sessions": 2}, before: 2, only: "udp"},
		"max_new_rate":                {limits: kit.M{"max_new_sessions_per_sec": 1}, before: 1},
		"first_packet_gate":           {listener: kit.M{"first_packet_gate": true}, match: hello, only: "udp", routes: true},
		"overload":                    {provoke: set("2")},
		"overload, no gate":           {provoke: set("1")},
		"overload, a gate":            {provoke: set("1"), match: hello, listener: kit.M{"peek": kit.M{"timeout": "50ms"}}, routes: true},
		"draining":                    {before: 1, from: "127.0.0.2", app: kit.M{"shutdown_grace": "10m"}, provoke: end, routes: true}, // a server may have stopped before
		"no_route":                    {match: kit.M{"client_cidr": kit.M{"cidrs": []string{"192.0.2.0/24"}}}, routes: true},
		"sniffer_reject":              {match: kit.M{"sniffer": kit.M{"name": "ban"}}, app: kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": sniffers, "call_timeout": "10s"}}}, routes: true},
		"reject":                      {handler: kit.M{"handler": "reject"}, routes: true},
		"reject, by bytes":            {match: kit.M{"first_bytes": kit.M{"prefix": "ascii:WH"}}, handler: kit.M{"handler": "reject"}, routes: true},
		"proxy_header":                {listener: kit.M{"accept_proxy": kit.M{"from": kit.A{"192.0.2.1"}, "require": true}}},
		"proxy_header, of a balancer": {listener: kit.M{"accept_proxy": kit.M{"from": kit.A{"127.0.0.0/8"}, "require": true}}},
		"loop":                        {target: func(addr string) string { return addr }, routes: true, unlogged: true},
		"loop, by another form":       {target: func(addr string) string { return "[::ffff:127.0.0.1]" + addr[strings.LastIndexByte(addr, ':'):] }, routes: true, unlogged: true},
		"upstream_bind":               {pool: kit.M{"source_addresses": kit.A{"192.0.2.9"}, "health": kit.M{"check": "none"}}, only: "udp", routes: true, unlogged: true},
		"outside_prefix":              {listener: kit.M{"prefix": "127.1.0.0/16"}, wild: true, unlogged: true},
		"no_backend": {routes: true, unlogged: true,
			pool: kit.M{"targets": []string{"127.0.0.1:1"}, "health": kit.M{"check": "tcp_connect", "interval": "50ms", "fall": 1}},
			provoke: func(t *testing.T, p *kit.Process) {
				kit.Settles(t, "backends that are down", 1.0, func() float64 { return p.Metric("pool_backends", "pool", "p", "state", "unhealthy") })
			},
			counted: func(m kit.Metrics) float64 { return m.Sum("lb_selections_total", "pool", "p", "result", "no_backend") },
		},
	}
}

// TestSilence is D29: whatever keeps a client out, it hears nothing, and the
// refusal is counted once under its rule and logged. That holds for a listener
// with routes and for one that has a server of another app behind it.
func TestSilence(t *testing.T) {
	for rule, tc := range refusalsOf(t) {
		for _, network := range networks {
			for _, behind := range []string{"routes", "a server"} {
				if tc.only != "" && tc.only != network || tc.routes && behind != "routes" {
					continue
				}
				t.Run(rule+" "+network+" "+behind, func(t *testing.T) {
					rule, _, _ := strings.Cut(rule, ",")
					tc.holds(t, rule, network, behind == "routes")
				})
			}
		}
	}
}

func (r *refusal) holds(t *testing.T, rule, network string, routes bool) {
	pools := kit.M{"p": game(t)[network]}
	if r.pool != nil {
		pools["p"] = kit.With(pools["p"].(kit.M), r.pool)
	}
	route := kit.Route(kit.M{"handler": "pool", "pool": "p"})
	if r.handler != nil {
		route = kit.Route(r.handler)
	}
	if r.match != nil {
		route["match"] = kit.A{r.match}
	}
	addr := kit.Local(kit.Port(t))
	options := kit.With(kit.M{}, r.app)
	if r.limits != nil {
		options["limits"] = r.limits
	}
	bind := network + "/" + addr
	if r.wild {
		bind = strings.Replace(bind, "127.0.0.1", "0.0.0.0", 1)
	}
	if r.target != nil {
		answer, err := json.Marshal(kit.M{"target": r.target(addr)})
		if err != nil {
			t.Fatal(err)
		}
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(answer) }))
		t.Cleanup(s.Close)
		route = kit.Route(kit.M{"handler": "resolve", "resolver": "m"})
		options["resolvers"] = kit.M{"m": kit.M{"resolver": "http", "endpoint": s.URL, "timeout": "20s"}}
	}
	config := kit.App(kit.M{"l": kit.With(kit.Listener([]string{bind}, route), r.listener)}, pools, options)
	if !routes {
		config = served(config, "l", route)
	}
	p := kit.Start(t, config, kit.Options{})
	from := r.from
	if from == "" {
		from = "127.0.0.1"
	}
	for range r.before {
		dial(t, network, from, addr).served()
	}
	if r.provoke != nil {
		r.provoke(t, p)
	}
	c := dial(t, network, "127.0.0.1", addr)
	c.ask()
	kit.Settles(t, "the count of "+rule, 1.0, func() float64 {
		if r.counted != nil {
			return r.counted(p.Metrics())
		}
		return refusals(p, "l", rule)
	})
	c.silence()
	if !r.unlogged && !strings.Contains(p.Log(), `"rule":"`+rule+`"`) {
		t.Errorf("the log has no refused record of %s", rule)
	}
	kit.Settles(t, "the flows there are", float64(r.before), func() float64 {
		m := p.Metrics()
		return m.Sum("active_connections", "listener", "l") + m.Sum("active_udp_sessions", "listener", "l")
	})
}

// served has a layer4 server listen on the network of a listener instead of
// routes of its own.
func served(config kit.M, listener string, route kit.M) kit.M {
	apps := config["apps"].(kit.M)
	delete(apps["wayhouse"].(kit.M)["listeners"].(kit.M)[listener].(kit.M), "routes")
	apps["layer4"] = kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{"wayhouse/" + listener}, "routes": kit.A{route}}}}
	return config
}

// TestNobodyServes has no server on the network of a listener.
func TestNobodyServes(t *testing.T) {
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			addr := kit.Local(kit.Port(t))
			p := kit.Start(t, kit.App(kit.M{"l": kit.Listener([]string{network + "/" + addr})}, nil), kit.Options{})
			c := dial(t, network, "127.0.0.1", addr)
			c.ask()
			kit.Settles(t, "the count of no_route", 1.0, func() float64 { return refusals(p, "l", "no_route") })
			c.silence()
			if !strings.Contains(p.Log(), `"rule":"no_route"`) {
				t.Error("the log has no refused record")
			}
			kit.Settles(t, "the flows there are", 0.0, func() float64 { return p.Metric("active_connections") + p.Metric("active_udp_sessions") })
		})
	}
}

// TestPendingIsSilent overflows what waits for a route.
func TestPendingIsSilent(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"l": kit.With(
		kit.Listener([]string{"udp/" + addr}, kit.Match(kit.M{"regexp": kit.M{"pattern": "^x", "count": 4096}}, kit.M{"handler": "pool", "pool": "udp"})),
		kit.M{"peek": kit.M{"timeout": "10m"}})}, game(t), kit.M{"workers": 1}), kit.Options{})
	c := dial(t, "udp", "127.0.0.1", addr)
	big := make([]byte, 1000) // four of which are still undecided
	for range 6 {             // four are kept for a session
		c.Write([]byte("x"))
	}
	kit.Settles(t, "the count of pending_full", 2.0, func() float64 { return refusals(p, "l", "pending_full") })
	c.silence()
	for range 300 { // and a mebibyte for a worker
		s := dial(t, "udp", "127.0.0.1", addr)
		for range 4 {
			s.Write(big)
		}
	}
	kit.Eventually(t, "a refused record of pending_full", func() bool { return strings.Contains(p.Log(), `"rule":"pending_full"`) })
	c.silence()
}

// TestGateUnderFlood is D16: nothing of a flood comes through, and who is
// recognised does.
func TestGateUnderFlood(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	b := kit.NewUDPBackend(t, 1, "127.0.0.1:0")
	p := kit.Start(t, kit.App(kit.M{"l": kit.With(kit.Listener([]string{"udp/" + addr}, kit.Match(kit.M{"first_bytes": kit.M{"prefix": "ascii:WH"}}, kit.M{"handler": "pool", "pool": "udp"})),
		kit.M{"first_packet_gate": true})}, kit.M{"udp": kit.Pool(b.Addr)}), kit.Options{})
	before := p.RSS()
	sent := 0
	for range kit.Scaled(200, 5000) {
		c, err := net.Dial("udp", addr)
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			if _, err := c.Write([]byte("spoofed")); err == nil {
				sent++
			}
		}
		c.Close()
	}
	c := dial(t, "udp", "127.0.0.1", addr)
	c.served()
	if n := p.Metric("active_udp_sessions"); n != 1 {
		t.Errorf("%v sessions", n)
	}
	if seen, damaged := b.Total(); seen.Messages != 1 || damaged != 0 {
		t.Errorf("the backend has %d messages and %d others", seen.Messages, damaged)
	}
	if n := refusals(p, "l", "first_packet_gate"); n == 0 || n > float64(sent) {
		t.Errorf("%v of %d were counted", n, sent)
	}
	t.Logf("%d datagrams, %d KiB before, %d KiB after", sent, before>>10, p.RSS()>>10)
}

// TestOverload goes through the levels with a stranger and one who comes back.
func TestOverload(t *testing.T) {
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			addr := kit.Local(kit.Port(t))
			pools := game(t)
			route := kit.Match(kit.M{"first_bytes": kit.M{"prefix": "ascii:WH"}}, kit.M{"handler": "pool", "pool": network})
			open := kit.Route(kit.M{"handler": "pool", "pool": network})
			gated := kit.Local(kit.Port(t))
			p := kit.Start(t, kit.App(kit.M{"open": kit.Listener([]string{network + "/" + addr}, open), "gated": kit.Listener([]string{network + "/" + gated}, route)}, pools), kit.Options{})
			level := func(body, want string) {
				t.Helper()
				if status, got := p.Do(http.MethodPost, "/admin/overload", []byte(body)); status != 200 || !strings.Contains(got, want) {
					t.Fatalf("%d %s, want %s", status, got, want)
				}
			}
			known := dial(t, network, "127.0.0.2", addr)
			known.served()
			refused := 0.0
			kept := func(listener, from, to string) {
				t.Helper()
				refused++
				c := dial(t, network, from, to)
				c.ask()
				kit.Settles(t, "the count of overload", refused, func() float64 { return p.Metric("filter_blocked_total", "filter", "overload") })
				c.silence()
			}
			level(`{"level": 1}`, `"level":1,"reason":"operator"`)
			dial(t, network, "127.0.0.3", gated).served() // by the gate
			dial(t, network, "127.0.0.2", addr).served()  // has a flow
			known.served()
			kept("open", "127.0.0.4", addr)
			level(`{"level": 2}`, `"level":2`)
			kept("gated", "127.0.0.4", gated)
			dial(t, network, "127.0.0.3", addr).served()
			known.served()
			if n := p.Metric("overload_level"); n != 2 {
				t.Errorf("overload_level is %v", n)
			}
			if n := p.Metric("overload_reason", "reason", "operator"); n != 1 {
				t.Errorf("overload_reason of operator is %v", n)
			}
			level(`{"auto": true}`, `"level":0,"reason":"none"`)
			dial(t, network, "127.0.0.4", addr).served()
			for body, why := range map[string]string{
				`{}`:                         "give one of the two",
				`{"level": 3}`:               "level: 3 is not from 0 to 2",
				`{"level": -1}`:              "level: -1 is not from 0 to 2",
				`{"level": "1"}`:             "level: want int, not string",
				`{"level": 1, "auto": true}`: "give one of the two",
				`{"levels": 1}`:              `unknown field \"levels\"`,
				`[]`:                         "give a JSON object, not array",
			} {
				if status, got := p.Do(http.MethodPost, "/admin/overload", []byte(body)); status != 400 || !strings.Contains(got, why) {
					t.Errorf("%s: %d %s, want %s", body, status, got, why)
				}
			}
		})
	}
}

// TestSourceLimitOverReloads adds, changes and takes away the cap while flows
// live and end.
func TestSourceLimitOverReloads(t *testing.T) {
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			addr := kit.Local(kit.Port(t))
			pools := game(t)
			config := func(most int) kit.M {
				l := kit.Listener([]string{network + "/" + addr}, kit.Route(kit.M{"handler": "pool", "pool": network}))
				if most > 0 {
					l["filters"] = kit.A{kit.M{"filter": "source_limit", "max_per_ip": most}}
				}
				return kit.App(kit.M{"l": l}, pools)
			}
			p := kit.Start(t, config(0), kit.Options{})
			refused := 0.0
			kept := func() {
				t.Helper()
				refused++
				c := dial(t, network, "127.0.0.1", addr)
				c.ask()
				kit.Settles(t, "the count", refused, func() float64 { return refusals(p, "l", "src_conn_ip") })
				c.silence()
			}
			var clients []*client
			for range 3 {
				c := dial(t, network, "127.0.0.1", addr)
				c.served()
				clients = append(clients, c)
			}
			p.MustLoad(config(3))
			kept()
			dial(t, network, "127.0.0.2", addr).served()
			p.MustLoad(config(2))
			kept()
			for _, c := range clients {
				c.served() // those there are live on
			}
			p.MustLoad(config(4))
			dial(t, network, "127.0.0.1", addr).served()
			kept()
			if network == "tcp" {
				clients[0].Close()
				kit.Settles(t, "active_connections", 4.0, func() float64 { return p.Metric("active_connections") })
				dial(t, network, "127.0.0.1", addr).served()
				kept()
			}
			p.MustLoad(config(0))
			for range 3 {
				dial(t, network, "127.0.0.1", addr).served()
			}
		})
	}
}
