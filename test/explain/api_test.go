package explain

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// about is a request to /explain.
func about(listener string, more kit.M) kit.M {
	return kit.With(kit.M{"listener": listener, "src": "203.0.113.7:50000"}, more)
}

// TestAPI asks a process, and wants nothing to be counted there.
func TestAPI(t *testing.T) {
	ports := kit.Ports(t, 6)
	at := func(network string, i int) string { return network + "/" + kit.Local(ports+i) }
	toGame, hello := kit.M{"handler": "pool", "pool": "game"}, kit.M{"first_bytes": kit.M{"prefix": "ascii:HELLO"}}
	p := kit.Start(t, kit.App(kit.M{
		"tcp":  kit.With(kit.Listener([]string{at("tcp", 0)}, kit.Match(hello, toGame)), kit.M{"route_hint": true}),
		"both": kit.ToPool("game", at("tcp", 1), at("udp", 1)),
		"udp":  kit.Listener([]string{at("udp", 2)}, kit.Match(kit.M{"sniffer": kit.M{"name": "a2s"}}, toGame), kit.Route(kit.M{"handler": "resolve", "resolver": "m"})),
		"two":  kit.ToPool("none", at("tcp", 3), at("tcp", 4)),
		"web":  kit.Listener([]string{at("tcp", 5)}),
	}, kit.M{
		"game": kit.Pool("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"),
		"none": kit.With(kit.Pool("10.0.0.1:1"), kit.M{"balancer": kit.M{"policy": "least_conn"}}),
	}, kit.M{
		"limits":    kit.M{"max_connections": 10, "max_new_sessions_per_sec": 5},
		"resolvers": kit.M{"m": kit.M{"resolver": "http", "endpoint": "http://127.0.0.1:1/"}},
	}), kit.Options{})
	body, _ := json.Marshal(kit.M{"src_ip": "203.0.113.9", "pool": "game", "ttl_sec": 3600})
	if status, answer := p.Do(http.MethodPost, "/route-hint", body); status != http.StatusNoContent {
		t.Fatalf("pushing a hint: %d %s", status, answer)
	}
	counted := []string{"wayhouse_lb_selections_total", "wayhouse_sniffer_calls_total", "wayhouse_listener_connections_total",
		"wayhouse_route_hints_applied_total", "wayhouse_resolver_requests_total", "wayhouse_active_connections", "wayhouse_active_udp_sessions", "wayhouse_datagrams_dropped_total"}
	before := p.Metrics()

	for name, tc := range map[string]struct {
		ask    kit.M
		status int
		end    string // what, or a part of the error
		has    string // in the text
	}{
		"a match":            {about("tcp", kit.M{"bytes": "ascii:HELLO"}), 200, listener.EndPool, "backend 10.0.0.1:1"},
		"the same again":     {about("tcp", kit.M{"bytes": "ascii:HELLO"}), 200, listener.EndPool, "backend 10.0.0.1:1"},
		"in pieces":          {about("tcp", kit.M{"bytes": []string{"ascii:HE", "hex:4c4c4f"}}), 200, listener.EndPool, "5 seen"},
		"limits":             {about("tcp", kit.M{"bytes": "ascii:HELLO"}), 200, listener.EndPool, "max_connections passes (0 of 10)"},
		"no match":           {about("tcp", kit.M{"bytes": "ascii:help"}), 200, listener.EndNoRoute, "does not match"},
		"too little":         {about("tcp", kit.M{"bytes": "ascii:HE"}), 200, listener.EndCutOff, "cut off, route 0"},
		"too little yet":     {about("tcp", kit.M{"bytes": "ascii:HE", "final": false}), 200, listener.EndWaits, "waits, route 0"},
		"silence":            {about("tcp", nil), 200, listener.EndNoRoute, "passed over"},
		"silence yet":        {about("tcp", kit.M{"final": false}), 200, listener.EndWaits, "waits"},
		"a hint":             {about("tcp", kit.M{"src": "203.0.113.9:1"}), 200, listener.EndPool, "hint     applies"},
		"one of two":         {about("both", kit.M{"network": "tcp"}), 200, listener.EndPool, "route    0 matches"},
		"the other":          {about("both", kit.M{"network": "udp", "bytes": "ascii:"}), 200, listener.EndPool, "route    0 matches"},
		"a sniffer":          {about("udp", kit.M{"bytes": "hex:ffffffff54536f7572636520456e67696e6520517565727900"}), 200, listener.EndPool, `a2s recognised key=`},
		"a resolver":         {about("udp", kit.M{"bytes": "ascii:x"}), 200, listener.EndResolver, "would ask m"},
		"a dst":              {about("two", kit.M{"dst": kit.Local(ports + 4)}), 200, listener.EndPool, "goes to pool none"},
		"for a server":       {about("web", nil), 200, listener.EndNetwork, "wayhouse/web"},
		"no listener":        {about("", nil), 400, "listener: missing", ""},
		"unknown listener":   {about("ucp", nil), 404, `none is named "ucp"`, ""},
		"no src":             {about("tcp", kit.M{"src": ""}), 400, "src: missing", ""},
		"src without a port": {about("tcp", kit.M{"src": "203.0.113.7"}), 400, "src:", ""},
		"bad dst":            {about("tcp", kit.M{"dst": "x"}), 400, "dst:", ""},
		"bad network":        {about("tcp", kit.M{"network": "sctp"}), 400, "network:", ""},
		"bad hex":            {about("tcp", kit.M{"bytes": []string{"ascii:a", "hex:0"}}), 400, "bytes[1]:", ""},
		"bad bytes":          {about("tcp", kit.M{"bytes": "HELLO"}), 400, "bytes[0]:", ""},
		"bytes of no kind":   {about("tcp", kit.M{"bytes": 7}), 400, "bytes:", ""},
		"unknown key":        {about("tcp", kit.M{"byte": "ascii:x"}), 400, "byte", ""},
		"which network":      {about("both", nil), 422, "network:", ""},
		"wrong network":      {about("tcp", kit.M{"network": "udp", "bytes": "ascii:x"}), 422, "does not listen for udp", ""},
		"which dst":          {about("two", nil), 422, "dst:", ""},
		"wrong dst":          {about("two", kit.M{"dst": kit.Local(ports)}), 422, "does not listen on", ""},
		"no datagram":        {about("udp", nil), 422, "bytes:", ""},
		"too large":          {about("tcp", kit.M{"bytes": "ascii:" + strings.Repeat("x", 1<<20)}), 413, "larger than", ""},
	} {
		t.Run(name, func(t *testing.T) {
			ask, _ := json.Marshal(tc.ask)
			status, answer := p.Do(http.MethodPost, "/explain", ask)
			if status != tc.status {
				t.Fatalf("%d %s, want %d", status, answer, tc.status)
			}
			if status != http.StatusOK {
				if !strings.Contains(answer, tc.end) && !strings.Contains(answer, strings.ReplaceAll(tc.end, `"`, `\"`)) {
					t.Errorf("%s, want %q in it", answer, tc.end)
				}
				return
			}
			var e listener.Explanation
			if err := json.Unmarshal([]byte(answer), &e); err != nil || e.End.What != tc.end {
				t.Errorf("ends with %q, %v, want %q: %s", e.End.What, err, tc.end, answer)
			}
			if _, text := p.Do(http.MethodPost, "/explain?format=text", ask); !strings.Contains(text, tc.has) {
				t.Errorf("the text lacks %q:\n%s", tc.has, text)
			}
		})
	}
	after := p.Metrics()
	for _, name := range counted {
		if a, b := before.Sum(name), after.Sum(name); a != b {
			t.Errorf("%s was %v and is %v: somebody who asked was counted", name, a, b)
		}
	}
}
