package lint_test

import (
	"fmt"
	"strings"
	"testing"

	_ "github.com/wayhouse-proxy/wayhouse"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/lint"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const (
	poolA = `"a": {"targets": ["10.0.0.1:1"], "health": {"check": "none"}}`
	poolB = `"b": {"targets": ["10.0.0.2:1"], "health": {"check": "none"}}`
	toA   = `"handle": [{"handler": "pool", "pool": "a"}]`
	toB   = `"handle": [{"handler": "pool", "pool": "b"}]`
	all   = `{` + toA + `}`
	m     = `{"resolver": "http", "endpoint": "http://127.0.0.1:1/"`
	ask   = `"handle": [{"handler": "resolve", "resolver": "m"}]`
	net10 = `{"client_cidr": {"cidrs": ["10.0.0.0/8"]}}`
	hello = `{"first_bytes": {"prefix": "ascii:HELLO"}}`
)

// app is a wayhouse app with both pools and a listener game.
func app(network, options string, routes ...string) string {
	if options != "" {
		options = ", " + options
	}
	return fmt.Sprintf(`"pools": {%s, %s}, "listeners": {"game": {"bind": ["%s/127.0.0.1:7777"], "routes": [%s] %s}}`,
		poolA, poolB, network, strings.Join(routes, ", "), options)
}

// pools is an app with other pools, all of them used.
func pools(pools string, options string) string {
	if options != "" {
		options = ", " + options
	}
	return fmt.Sprintf(`"pools": {%s}, "listeners": {"game": {"bind": ["tcp/127.0.0.1:7777"], "routes": [%s] %s}}`, pools, all, options)
}

func pool(name, options string) string {
	return fmt.Sprintf(`%q: {"targets": ["10.0.0.1:1"], "health": {"check": "none"}, %s}`, name, options)
}

func match(set, handle string) string { return fmt.Sprintf(`{"match": [%s], %s}`, set, handle) }

func sniffer(name, handle string) string {
	return match(fmt.Sprintf(`{"sniffer": {"name": %q}}`, name), handle)
}

const (
	game   = "apps.wayhouse.listeners.game"
	routes = game + ".routes"
)

// TestRules wants each rule to find what it is for, and nothing else to be
// found: want has rule and path of the one finding.
func TestRules(t *testing.T) {
	for name, tc := range map[string]struct{ app, others, want string }{
		"clean": {app: app("tcp", "", match(net10, toB), all)},

		"unreachable: behind a catch-all":            {app: app("tcp", "", all, match(net10, toB)), want: "unreachable_route " + routes + "[1]"},
		"unreachable: the same matchers":             {app: app("tcp", "", match(net10, toB), match(net10, toA), all), want: "unreachable_route " + routes + "[1]"},
		"unreachable: keys in another order":         {app: app("tcp", "", match(`{"first_bytes": {"prefix": "ascii:H", "offset": 1}}`, toB), match(`{"first_bytes": {"offset": 1, "prefix": "ascii:H"}}`, toA), all), want: "unreachable_route " + routes + "[1]"},
		"unreachable: narrower":                      {app: app("tcp", "", match(net10, toB), match(`{"client_cidr": {"cidrs": ["10.0.0.0/8"]}, "port": {"ports": [7777]}}`, toA), all), want: "unreachable_route " + routes + "[1]"},
		"unreachable: one of two sets is not":        {app: app("tcp", "", match(net10, toB), match(net10+","+hello, toA), all)},
		"unreachable: wider":                         {app: app("tcp", "", match(`{"client_cidr": {"cidrs": ["10.0.0.0/8"]}, "port": {"ports": [7777]}}`, toA), match(net10, toB), all)},
		"unreachable: every address":                 {app: app("tcp", "", match(`{"client_cidr": {"cidrs": ["0.0.0.0/0", "::/0"]}}`, toB), all), want: "unreachable_route " + routes + "[1]"},
		"unreachable: every IPv4 address is less":    {app: app("tcp", "", match(`{"client_cidr": {"cidrs": ["0.0.0.0/0"]}}`, toB), all)},
		"unreachable: the flow goes on":              {app: app("tcp", "", `{"handle": [{"handler": "route_hint"}]}`, match(net10, toB), all)},
		"unreachable: other bytes come between":      {app: app("tcp", "", match(hello, toB), match(net10, `"handle": [{"handler": "throttle"}]`), match(hello, toA), all)},
		"unreachable: a resolver that rejects":       {app: `"resolvers": {"m": ` + m + `}}, ` + app("tcp", "", `{`+ask+`}`, all), want: "unreachable_route " + routes + "[1]"},
		"unreachable: a resolver that falls back":    {app: `"resolvers": {"m": ` + m + `, "on_error": "fallback_route"}}, ` + app("tcp", "", `{`+ask+`}`, all)},
		"missing catch-all":                          {app: app("tcp", "", match(hello, toA), match(net10, toB)), want: "missing_catch_all " + routes},
		"missing catch-all: an empty set is one":     {app: app("tcp", "", match(net10, toB), match(`{}`, toA))},
		"handshake leak":                             {app: app("udp", "", sniffer("wireguard", toB), all), want: "handshake_leak " + routes + "[1]"},
		"handshake leak: dtls":                       {app: app("udp", "", sniffer("dtls", toB), all), want: "handshake_leak " + routes + "[1]"},
		"handshake leak: enet":                       {app: app("udp", "", sniffer("enet", toB), all), want: "handshake_leak " + routes + "[1]"},
		"handshake leak: sni, which is that of QUIC": {app: app("udp", "", match(`{"sni": {"host": ["a.example.com"]}}`, toB), all), want: "handshake_leak " + routes + "[1]"},
		"handshake leak: sni over TCP":               {app: app("tcp", "", match(`{"sni": {"host": ["a.example.com"]}}`, toB), all)},
		"handshake leak: into nothing":               {app: app("udp", "", match(net10, toA), sniffer("wireguard", toB), `{"handle": [{"handler": "reject"}]}`)},
		"undecided next: into nothing":               {app: app("tcp", `"peek": {"on_undecided": "next"}`, match(net10, toA), match(hello, toB), `{"handle": [{"handler": "reject"}]}`)},
		"handshake leak: to the same pool":           {app: app("udp", "", sniffer("quic", toB), match(net10, toA), `{`+toB+`}`)},
		"handshake leak: no handshake":               {app: app("udp", "", sniffer("a2s", toB), all)},
		"handshake leak: over TCP there is none":     {app: app("tcp", "", sniffer("openvpn", toB), all)},
		"handshake leak: under another name":         {app: `"sniffers": {"native": {"vpn": {"sniffer": "openvpn"}}}, ` + app("udp", "", sniffer("vpn", toB), all), want: "handshake_leak " + routes + "[1]"},
		"undecided next":                             {app: app("tcp", `"peek": {"on_undecided": "next"}`, match(hello, toB), all), want: "undecided_next " + game + ".peek.on_undecided"},
		"undecided next: inside not":                 {app: app("tcp", `"peek": {"on_undecided": "next"}`, match(`{"not": [`+hello+`]}`, toB), all), want: "undecided_next " + game + ".peek.on_undecided"},
		"undecided next: nothing needs bytes":        {app: app("tcp", `"peek": {"on_undecided": "next"}`, match(net10, toB), match(`{"not": [`+net10+`], "port": {"ports": [1]}}`, toA), `{`+toB+`}`)},
		"undecided next: to the same pool":           {app: app("tcp", `"peek": {"on_undecided": "next"}`, match(net10, toB), match(hello, toA), all)},
		"undecided refuse":                           {app: app("tcp", `"peek": {"on_undecided": "refuse"}`, match(hello, toB), all)},
		"nested":                                     {app: app("tcp", "", match(`{"client_cidr": {"cidrs": ["10.0.0.0/8", "10.1.0.0/16"]}}`, toB), all), want: "nested_cidr " + routes + "[0].match[0].client_cidr.cidrs[1]"},
		"nested: the wider one comes later":          {app: app("tcp", "", match(`{"dst": {"cidrs": ["2001:db8::1", "2001:db8::/32"]}}`, toB), all), want: "nested_cidr " + routes + "[0].match[0].dst.cidrs[0]"},
		"nested: twice":                              {app: app("tcp", "", match(`{"client_cidr": {"cidrs": ["192.0.2.1", "::ffff:192.0.2.1"]}}`, toB), all), want: "nested_cidr " + routes + "[0].match[0].client_cidr.cidrs[1]"},
		"nested: inside not":                         {app: app("tcp", "", match(`{"not": [{"client_cidr": {"cidrs": ["10.0.0.0/8", "10.1.0.0/16"]}}]}`, toB), all), want: "nested_cidr " + routes + "[0].match[0].not[0].client_cidr.cidrs[1]"},
		"nested: side by side":                       {app: app("tcp", "", match(`{"client_cidr": {"cidrs": ["10.0.0.0/9", "10.128.0.0/9", "::/0"]}}`, toB), all)},
		"nested: in a resolver":                      {app: `"resolvers": {"m": ` + m + `, "allow_targets": ["10.0.0.0/8", "10.0.0.1"]}}, ` + app("tcp", "", match(net10, ask), all), want: "nested_cidr apps.wayhouse.resolvers.m.allow_targets[1]"},
		"nested: in a filter":                        {app: app("tcp", `"filters": [{"filter": "acl", "deny": ["10.0.0.0/8"], "allow": ["10.0.0.0/7", "192.0.2.0/24", "192.0.2.7"]}]`, match(net10, toB), all), want: "nested_cidr " + game + ".filters[0].allow[2]"},
		"open gate: by length":                       {app: app("udp", `"first_packet_gate": true`, match(`{"first_bytes": {"length": {"min": 1}}}`, toB), all), want: "open_gate " + routes + "[0].match[0].first_bytes"},
		"open gate: by one byte":                     {app: app("udp", `"first_packet_gate": true`, match(net10+`, {"first_bytes": {"prefix": "hex:ff"}}`, toB), all), want: "open_gate " + routes + "[0].match[1].first_bytes"},
		"open gate: by OpenVPN":                      {app: `"sniffers": {"native": {"vpn": {"sniffer": "openvpn"}}}, ` + app("udp", `"first_packet_gate": true`, sniffer("vpn", toB), all), want: "open_gate " + routes + "[0].match[0].sniffer"},
		"open gate: none is asked for":               {app: app("udp", "", match(`{"first_bytes": {"length": {"min": 1}}}`, toB), all)},
		"open gate: by enough bytes":                 {app: app("udp", `"first_packet_gate": true`, match(`{"first_bytes": {"prefix": "hex:ffff"}}`, toB), sniffer("a2s", toB), all)},
		"unseen bytes":                               {app: app("tcp", `"peek": {"max_bytes": 4}`, match(hello, toB), all), want: "unseen_bytes " + routes + "[0].match[0].first_bytes"},
		"unseen bytes: of a ticket":                  {app: app("tcp", "", match(`{"ticket": {"keys": ["hex:00112233445566778899aabbccddeeff"], "pool": "b", "offset": 4096}}`, toB), all), want: "unseen_bytes " + routes + "[0].match[0].ticket"},
		"unseen bytes: just enough":                  {app: app("tcp", `"peek": {"max_bytes": 5}`, match(hello, toB), all)},
		"unseen bytes: a datagram is seen whole":     {app: app("udp", `"peek": {"max_bytes": 4}`, match(hello, toB), match(`{"ticket": {"keys": ["hex:00112233445566778899aabbccddeeff"], "pool": "b", "offset": 4096}}`, toB), all)},
		"unused pool":                                {app: app("tcp", "", all), want: "unused_pool apps.wayhouse.pools.b"},
		"unused pool: a hint may name it":            {app: app("tcp", `"route_hint": true`, all)},
		"unused pool: another app uses it":           {app: app("tcp", "", all), others: `, "layer4": {"servers": {"s": {"listen": ["tcp/127.0.0.1:7778"], "routes": [{` + toB + `}]}}}`},
		"unused resolver":                            {app: `"resolvers": {"m": ` + m + `}}, ` + pools(poolA, ""), want: "unused_resolver apps.wayhouse.resolvers.m"},
		"timeouts: connecting":                       {app: pools(pool("a", `"connect_timeout": "2s", "idle_timeout": "1s"`), ""), want: "timeout_order apps.wayhouse.pools.a.connect_timeout"},
		"timeouts: lifetime":                         {app: pools(pool("a", `"max_lifetime": "90s"`), ""), want: "timeout_order apps.wayhouse.pools.a.max_lifetime"},
		"timeouts: in order":                         {app: pools(pool("a", `"max_lifetime": "91s", "connect_timeout": "89s"`), `"peek": {"timeout": "89s"}`)},
		"timeouts: of a pool that is given inline":   {app: app("tcp", "", match(net10, toB), match(hello, toA), `{"handle": [{"handler": "pool", "targets": ["10.0.0.3:1"], "health": {"check": "none"}, "connect_timeout": "2s", "idle_timeout": "1s"}]}`), want: "timeout_order " + routes + "[2].handle[0].connect_timeout"},
		"timeouts: peeking":                          {app: pools(pool("a", `"idle_timeout": "1s"`), `"peek": {"timeout": "1s"}`), want: "timeout_order " + game + ".peek.timeout"},
		"timeouts: resolving":                        {app: `"resolvers": {"m": ` + m + `, "timeout": "251ms"}}, ` + app("tcp", "", match(net10, ask), all), want: "timeout_order " + routes + "[0].handle[0]"},
		"timeouts: resolving in time":                {app: `"resolvers": {"m": ` + m + `, "timeout": "251ms"}}, ` + app("tcp", `"peek": {"timeout": "251ms"}`, match(net10, ask), all)},
		"silent listener":                            {app: `"listeners": {"web": {"bind": ["tcp/127.0.0.1:7777"]}}`, want: "silent_listener apps.wayhouse.listeners.web"},
		"silent listener: a server is there":         {app: `"listeners": {"web": {"bind": ["tcp/127.0.0.1:7777"]}}`, others: `, "layer4": {"servers": {"s": {"listen": ["wayhouse/web"], "routes": [{"handle": [{"handler": "echo"}]}]}}}`},

		"handshake idle": {
			app:  fmt.Sprintf(`"pools": {%s}, "listeners": {"game": {"bind": ["udp/127.0.0.1:7777"], "routes": [%s, %s]}}`, pool("a", `"idle_timeout": "59s"`), sniffer("raknet", toA), all),
			want: "handshake_idle apps.wayhouse.pools.a.idle_timeout",
		},
		"handshake idle: long enough": {
			app: fmt.Sprintf(`"pools": {%s}, "listeners": {"game": {"bind": ["udp/127.0.0.1:7777"], "routes": [%s, %s]}}`, pool("a", `"idle_timeout": "60s"`), sniffer("raknet", toA), all),
		},
		"handshake idle: another sniffer": {
			app: fmt.Sprintf(`"pools": {%s}, "listeners": {"game": {"bind": ["udp/127.0.0.1:7777"], "routes": [%s, %s]}}`, pool("a", `"idle_timeout": "59s"`), sniffer("stun", toA), all),
		},
	} {
		t.Run(name, func(t *testing.T) {
			found, err := lint.Load([]byte(`{"admin": {"disabled": true, "config": {"persist": false}}, "apps": {"wayhouse": {` + tc.app + `}` + tc.others + `}}`))
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			for _, f := range found {
				got += f.Rule + " " + f.Path
			}
			if got != tc.want {
				t.Errorf("found %v, want %q", found, tc.want)
			}
		})
	}
}

// TestGate has a catch-all that nothing unrecognised comes to.
func TestGate(t *testing.T) {
	config := `{"apps": {"wayhouse": {` + app("udp", `"first_packet_gate": %v`, sniffer("wireguard", toB), all) + `}}}`
	for gate, want := range map[bool]int{true: 0, false: 1} {
		if found, err := lint.Check(fmt.Appendf(nil, config, gate)); err != nil || len(found) != want {
			t.Errorf("with the gate %v: found %v, %v, want %d", gate, found, err, want)
		}
	}
}

func TestLoadRefuses(t *testing.T) {
	for name, config := range map[string]string{
		"no JSON":     `{`,
		"no app":      `{"apps": {}}`,
		"a bad one":   `{"apps": {"wayhouse": {"listeners": {"game": {"bind": ["7777"]}}}}}`,
		"unknown key": `{"apps": {"wayhouse": {"listener": {}}}}`,
	} {
		if found, err := lint.Load([]byte(config)); err == nil {
			t.Errorf("%s: found %v", name, found)
		}
	}
}
