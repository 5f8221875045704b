package admission

import (
	"net"
	"net/http"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestSilence is D29: whatever keeps a client out, it hears nothing, and the
// refusal is counted once under its rule and logged.
func TestSilence(t *testing.T) {
	filters := func(list ...any) kit.M { return kit.M{"filters": list} }
	hello := kit.M{"first_bytes": kit.M{"prefix": "ascii:HELLO"}}
	for rule, tc := range map[string]struct {
		options kit.M // of the listener
		limits  kit.M
		match   kit.M // of its route
		before  int   // flows that get in first, and stay
		level   string
		only    string // protocol
	}{
		"acl":               {options: filters(kit.M{"filter": "acl", "deny": []string{"127.0.0.0/8"}})},
		"rate_ip":           {options: filters(kit.M{"filter": "rate_limit", "per_ip": kit.M{"rate": 1, "burst": 2}}), before: 2},
		"rate_net":          {options: filters(kit.M{"filter": "rate_limit", "per_net": kit.M{"rate": 1, "burst": 2}}), before: 2},
		"src_conn_ip":       {options: filters(kit.M{"filter": "source_limit", "max_per_ip": 2}), before: 2},
		"src_conn_net":      {options: filters(kit.M{"filter": "source_limit", "max_per_net": 2}), before: 2},
		"max_conn":          {limits: kit.M{"max_connections": 2}, before: 2, only: "tcp"},
		"max_udp":           {limits: kit.M{"max_udp_sessions": 2}, before: 2, only: "udp"},
		"max_new_rate":      {limits: kit.M{"max_new_sessions_per_sec": 1}, before: 1},
		"first_packet_gate": {options: kit.M{"first_packet_gate": true}, match: hello, only: "udp"},
		"overload":          {level: "2"},
		"overload, no gate": {level: "1"},
		"overload, a gate":  {level: "1", match: hello, options: kit.M{"peek": kit.M{"timeout": "50ms"}}},
		"no_route":          {match: kit.M{"client_cidr": kit.M{"cidrs": []string{"192.0.2.0/24"}}}},
	} {
		for _, network := range networks {
			if tc.only != "" && tc.only != network {
				continue
			}
			t.Run(rule+" "+network, func(t *testing.T) {
				rule, _, _ := strings.Cut(rule, ",")
				route := kit.Route(kit.M{"handler": "pool", "pool": network})
				if tc.match != nil {
					route = kit.Match(tc.match, kit.M{"handler": "pool", "pool": network})
				}
				addr := kit.Local(kit.Port(t))
				options := kit.M{}
				if tc.limits != nil {
					options["limits"] = tc.limits
				}
				p := kit.Start(t, kit.App(kit.M{"l": kit.With(kit.Listener([]string{network + "/" + addr}, route), tc.options)}, game(t), options), kit.Options{})
				if tc.level != "" {
					if status, body := p.Do(http.MethodPost, "/admin/overload", []byte(`{"level": `+tc.level+`}`)); status != 200 {
						t.Fatal(status, body)
					}
				}
				for range tc.before {
					dial(t, network, "127.0.0.1", addr).served()
				}
				c := dial(t, network, "127.0.0.1", addr)
				c.ask()
				kit.Settles(t, "the count of "+rule, 1.0, func() float64 { return refusals(p, "l", rule) })
				c.silence()
				if rule != "no_route" && !strings.Contains(p.Log(), `"rule":"`+rule+`"`) {
					t.Errorf("the log has no refused record of %s", rule)
				}
				if n := p.Metric("active_connections") + p.Metric("active_udp_sessions"); n != float64(tc.before) {
					t.Errorf("%v flows are there, want %d", n, tc.before)
				}
			})
		}
	}
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
			for _, body := range []string{`{}`, `{"level": 3}`, `{"level": -1}`, `{"level": 1, "auto": true}`, `{"levels": 1}`} {
				if status, got := p.Do(http.MethodPost, "/admin/overload", []byte(body)); status != 400 {
					t.Errorf("%s: %d %s", body, status, got)
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
