package yamlconfig_test

import (
	"bytes"
	"flag"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the JSON of testdata anew")

// TestEverything tells what becomes of each field.
func TestEverything(t *testing.T) {
	got, warnings, err := adapt(scenario(t))
	if err != nil || len(warnings) > 0 {
		t.Fatalf("%v, %v", warnings, err)
	}
	if err := validate(got); err != nil {
		t.Errorf("loading it: %v", err)
	}
	again, _, err := adapt(scenario(t))
	if err != nil || !bytes.Equal(got, again) {
		t.Errorf("the second time %v %s, the first time %s", err, again, got)
	}
	const file = "testdata/everything.json"
	if *update {
		if err := os.WriteFile(file, []byte(tidy(t, got)+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if tidy(t, got) != tidy(t, want) {
		t.Errorf("got %s, want what is in %s", tidy(t, got), file)
	}
}

// TestChanges changes one thing of the scenario at a time. What is accepted must
// load, too.
func TestChanges(t *testing.T) {
	doc := scenario(t)
	for name, tc := range map[string]struct{ old, by, want string }{
		"no version":               {"schema_version: 1\n", "", ""},
		"schema 3":                 {"schema_version: 1", "schema_version: 3", ""},
		"a newer schema":           {"schema_version: 1", "schema_version: 4", "game.yaml:1:17: schema_version: config schema_version 4 is newer than this build supports (max 3)"},
		"a string for a schema":    {"schema_version: 1", `schema_version: "1"`, `schema_version: the string "1" is no schema version: it is a whole number, 1 or higher`},
		"schema 0":                 {"schema_version: 1", "schema_version: 0", "schema_version: 0 is no schema version"},
		"a schema below 0":         {"schema_version: 1", "schema_version: -1", "-1 is no schema version"},
		"a fraction":               {"schema_version: 1", "schema_version: 1.5", "the fraction 1.5 is no schema version"},
		"a huge schema":            {"schema_version: 1", "schema_version: 99999999999999999999999", "schema_version: "},
		"web before its schema":    {"filters:\n  - name: block", "web: {}\nfilters:\n  - name: block", "web: is a field of schema 3, and the document declares 1: write schema_version: 3"},
		"web":                      {"schema_version: 1", "schema_version: 3\nweb: {sites: []}", "web: this build's YAML has no sites"},
		"plugins before schema 2":  {"    pool: mc\n", "    pool: mc\n    plugin_routes: { type: sni }\n", "listeners[4].plugin_routes: is a field of schema 2, and the document declares 1"},
		"plugins":                  {"    pool: mc\n", "    plugin_routes: { type: sni }\n    pool: mc\n", "takes no part in a fleet"},
		"an unknown field":         {"    idle_timeout_sec: 80", "    idle_timeout: 80", "game.yaml:55:5: pools[0].idle_timeout: unknown field; did you mean idle_timeout_sec?"},
		"an unknown top field":     {"filters:\n  - name: block", "poools: []\nfilters:\n  - name: block", "poools: unknown field; did you mean pools?"},
		"a key twice":              {"  workers: 2", "  workers: 2\n  workers: 3", "game.yaml:4:3: settings.workers: is given twice"},
		"a merge key":              {"  - name: short\n", "  - <<: {}\n    name: short\n", "<<: unknown field"},
		"a tab":                    {"  workers: 2", "\tworkers: 2", "game.yaml:"},
		"a second document":        {"filters:\n  - name: block", "---\nfilters:\n  - name: block", "a second document begins"},
		"workers below 0":          {"workers: 2", "workers: -1", "settings.workers: -1 is not from 0 to 127"},
		"workers as a word":        {"workers: 2", "workers: two", `the string "two" stands where a whole number belongs`},
		"a huge number":            {"workers: 2", "workers: 99999999999999999999", "settings.workers: "},
		"a hexadecimal number":     {"workers: 2", "workers: 0x10", `"0x10" is not a whole number of decimal digits`},
		"no grace":                 {"shutdown_grace_sec: 20", "shutdown_grace_sec: 0", ""},
		"grace below 0":            {"shutdown_grace_sec: 20", "shutdown_grace_sec: -1", "is not from 0 to"},
		"metrics elsewhere":        {"path: /metrics", "path: /m", "settings.metrics.path: the metrics are at /metrics"},
		"no connection log":        {"enabled: true, sample: 0.5", "enabled: false", ""},
		"neither of the two":       {"enabled: true, sample: 0.5", "sample: 0.5", "settings.log.connection_log: enabled is missing"},
		"a sample of 0":            {"sample: 0.5", "sample: 0", "sample: 0 logs nothing"},
		"a sample above 1":         {"sample: 0.5", "sample: 1.5", "sample: 1.5 is not from 0 to 1"},
		"a log level":              {"level: info", "level: loud", `settings.log.level: "loud" is none of debug, info, warn, error`},
		"max_connections 0":        {"max_connections: 1000", "max_connections: 0", "max_connections: 0 would let nothing through"},
		"max_udp_sessions 0":       {"max_udp_sessions: 2000", "max_udp_sessions: 0", "max_udp_sessions: 0 would let nothing through"},
		"max_new_sessions 0":       {"max_new_sessions_per_sec: 300", "max_new_sessions_per_sec: 0", "would let nothing through"},
		"a group":                  {"  workers: 2", "  group: eu/a", "settings.group: this build runs alone"},
		"a domain alone":           {"  workers: 2", "  failure_domain: a", "failure_domain and gossip are given both or neither"},
		"gossip alone":             {"  workers: 2", "  gossip: {}", "failure_domain and gossip are given both or neither"},
		"domain and gossip":        {"  workers: 2", "  gossip: {}\n  failure_domain: a", "settings.gossip: this build runs alone"},
		"admin by name":            {"127.0.0.1:9900", "localhost:9900", `settings.admin.listen: "localhost:9900" is not an address and a port`},
		"admin with half of TLS":   {"127.0.0.1:9900 }", "127.0.0.1:9900, tls: {cert: a.pem} }", "settings.admin.tls: key is missing"},
		"admin with bounds":        {"127.0.0.1:9900 }", "127.0.0.1:9900, tls: {cert: a.pem, key: b.pem, max_pending: 5} }", "does not bound handshakes"},
		"admin with a short token": {"127.0.0.1:9900 }", "127.0.0.1:9900, auth_token: short }", "settings.admin.auth_token: the token is not of 16 to 1024"},
		"admin with a token":       {"127.0.0.1:9900 }", "127.0.0.1:9900, auth_token: 0123456789abcdef }", ""},
		"admin with a braced one":  {"127.0.0.1:9900 }", "127.0.0.1:9900, auth_token: '{0123456789abcdef}' }", ""},
		"admin with bearer":        {"127.0.0.1:9900 }", "127.0.0.1:9900, auth: {mode: bearer, token: 0123456789abcdef} }", ""},
		"admin with mtls":          {"127.0.0.1:9900 }", "127.0.0.1:9900, auth: {mode: mtls, token: 0123456789abcdef} }", "auth.mode: this build's YAML has no client certificates"},
		"admin with two tokens":    {"127.0.0.1:9900 }", "127.0.0.1:9900, auth_token: 0123456789abcdef, auth: {mode: bearer, token: 0123456789abcdef} }", "leave one of the two out"},

		"sniffers without a dir":  {"  workers: 2", "  sniffers: {}", "settings.sniffers: dir is missing"},
		"sniffers in nothing":     {"  workers: 2", `  sniffers: {dir: ""}`, "settings.sniffers.dir: is empty"},
		"sniffers without time":   {"  workers: 2", "  sniffers: {dir: /x, call_timeout_ms: 0}", "call_timeout_ms: 0 is not from 1"},
		"sniffers without memory": {"  workers: 2", "  sniffers: {dir: /x, max_memory_bytes: 0}", "max_memory_bytes: 0 is not from 1"},
		"a short hash":            {"  workers: 2", "  sniffers: {dir: /x, modules: [{name: a, sha256: abcd}]}", `"abcd" is not 64 hexadecimal digits`},
		"a module without a name": {"  workers: 2", "  sniffers: {dir: /x, modules: [{sha256: abcd}]}", "settings.sniffers.modules[0]: name is missing"},
		"an empty config":         {"  workers: 2", `  sniffers: {dir: /x, modules: [{name: a, sha256: abcd, config: ""}]}`, "config: is empty"},

		"no network":               {"cidrs: [10.0.0.0/8, 192.168.0.0/16]", "cidrs: [10.0.0.0/8, 192.168/16]", "filters[0].cidrs[1]: "},
		"an unknown filter":        {"[block-bogons, conn-rate]", "[block-bogon]", `listeners[0].filters[0]: there is no filter "block-bogon"; did you mean block-bogons?`},
		"a filter for everybody":   {"scope: src_ip", "scope: global", "settings.limits.max_new_sessions_per_sec"},
		"a network as the scope":   {"scope: src_ip", "scope: src_/24", ""},
		"a source twice":           {"name: srv-us", "name: static-eu", `backend_sources[1].name: "static-eu" is the name of another one, in line`},
		"a source of no kind":      {"    type: dns_srv\n", "    type: srv\n", `backend_sources[1].type: "srv" is none of static, dns_srv`},
		"a tunnel":                 {"    type: dns_srv\n", "    type: tunnel\n    pubkey: x\n", "backend_sources[1].type: this build has no tunnels"},
		"no interval":              {"refresh_interval_sec: 15", "refresh_interval_sec: 0", "refresh_interval_sec: 0 is not from 1"},
		"no record":                {"    record: _game._udp.us.internal.example.com\n", "", "backend_sources[1]: record is missing"},
		"no service":               {"    service: match-server\n    consul_addr", "    consul_addr", "backend_sources[2]: service is missing"},
		"an empty token file":      {"    tag: prod", `    consul_token_file: ""`, "consul_token_file: is empty"},
		"a token in the clear":     {"consul_addr: http://127.0.0.1:8500", "consul_addr: http://10.0.0.1:8500\n    consul_token_file: /x", "where the token would go over the network in the clear"},
		"no token":                 {"consul_addr: http://127.0.0.1:8500", "consul_addr: http://10.0.0.1:8500", ""},
		"a user in the address":    {"consul_addr: http://127.0.0.1:8500", "consul_addr: http://a:b@127.0.0.1:8500", "consul_addr: a user in the URL"},
		"Kubernetes in the clear":  {"api: https://kubernetes.default.svc", "api: http://10.0.0.1", "backend_sources[3].api: "},
		"Kubernetes on loopback":   {"api: https://kubernetes.default.svc", "api: http://127.0.0.1:8001", ""},
		"targets and source":       {"    source: srv-us\n", "    source: srv-us\n    targets: [10.0.0.1:1]\n", "pools[1].source: targets is given too"},
		"neither":                  {"    source: srv-us\n", "", "pools[1]: neither targets nor source is given"},
		"an unknown source":        {"    source: srv-us\n", "    source: srv-uk\n", `pools[1].source: there is no backend source "srv-uk"; did you mean srv-us?`},
		"a target without a port":  {`["10.3.0.1:25565"]`, `["10.3.0.1"]`, "pools[3].targets: "},
		"a target twice":           {`["10.3.0.1:25565"]`, `["10.3.0.1:25565", "10.3.0.1:25565"]`, "is listed twice"},
		"targets as a string":      {`["10.3.0.1:25565"]`, `10.3.0.1:25565`, "stands where a list belongs"},
		"a balancer":               {"balancer: weighted", "balancer: random", `pools[2].balancer: "random" is none of`},
		"hash_on left out":         {"    hash_on: src_ip_port\n", "", ""},
		"hash_on elsewhere":        {"balancer: consistent_hash", "balancer: round_robin", "pools[0].hash_on: only balancer: consistent_hash has it"},
		"hash_on something":        {"hash_on: src_ip_port", "hash_on: sni", `"sni" is none of src_ip, src_ip_port`},
		"weights elsewhere":        {"balancer: weighted", "balancer: round_robin", "pools[2].weights: only balancer: weighted has them"},
		"a weight of 0":            {`"10.2.0.1:7777": 3`, `"10.2.0.1:7777": 0`, "0 is not from 1"},
		"a weight of no address":   {`"10.2.0.1:7777": 3`, `"10.2.0.1": 3`, "pools[2].weights.10.2.0.1: "},
		"a weight of another":      {`"10.2.0.1:7777": 3`, `"10.2.0.9:7777": 3`, "is not one of the targets"},
		"affinity":                 {"balancer: weighted", "affinity: {table_ttl_sec: 120}\n    balancer: weighted", "there is no table of affinity"},
		"a check":                  {"type: udp_probe", "type: ping", `health_check.type: "ping" is none of`},
		"nothing to send":          {"      send_hex: \"01\"\n", "", "health_check: send_hex is missing"},
		"not hexadecimal":          {`send_hex: "01"`, `send_hex: "0g"`, `send_hex: "0g" is not made of pairs`},
		"a number to send":         {`send_hex: "01"`, `send_hex: 01`, `the number 01 stands where a string belongs: write "01"`},
		"no interval of checks":    {"interval_sec: 2\n", "interval_sec: 0\n", "interval_sec: 0 is not from 1"},
		"no timeout of checks":     {"      timeout_ms: 500", "      timeout_ms: 0", "timeout_ms: 0 is not from 1"},
		"rise 0":                   {"rise: 2", "rise: 0", "rise: 0 is not from 1"},
		"fall 0":                   {"fall: 3", "fall: 0", "fall: 0 is not from 1"},
		"a probe of another kind":  {"{ type: none }", "{ type: none, send_hex: \"01\" }", "send_hex: only type: udp_probe has it"},
		"a path":                   {"path: /ready", "path: ready", "health_check.path: "},
		"no sessions":              {"max_sessions: 200", "max_sessions: 0", "max_sessions: 0 is not from 1"},
		"no connect timeout":       {"connect_timeout_ms: 250", "connect_timeout_ms: 0", "connect_timeout_ms: 0 is not from 1"},
		"no idle timeout":          {"idle_timeout_sec: 80", "idle_timeout_sec: 0", "idle_timeout_sec: 0 is not from 1"},
		"UDP and the default":      {"    health_check: { type: none }\n", "", "pools[1]: only UDP listeners use the pool"},
		"UDP and tcp_connect":      {"{ type: none }", "{ type: tcp_connect }", ""},
		"v2 to UDP":                {"    health_check: { type: none }", "    health_check: { type: none }\n    proxy_protocol: v2", "pools[1].proxy_protocol: v2 stands in front of a TCP connection"},
		"v2-udp to UDP":            {"    health_check: { type: none }", "    health_check: { type: none }\n    proxy_protocol: v2-udp", ""},
		"v2-udp to TCP":            {"proxy_protocol: none", "proxy_protocol: v2-udp", "pools[2].proxy_protocol: v2-udp stands in front of datagrams"},
		"a header":                 {"proxy_protocol: none", "proxy_protocol: v3", `"v3" is none of none, v1, v2, v2-udp`},
		"v1 of a resolver on UDP":  {"    timeout_ms: 45", "    proxy_protocol: v1", "resolvers[0].proxy_protocol: v1 stands in front of a TCP connection"},
		"v2-udp of a resolver":     {"    timeout_ms: 45", "    proxy_protocol: v2-udp", ""},
		"no timeout of a resolver": {"timeout_ms: 45", "timeout_ms: 0", "resolvers[0].timeout_ms: 0 is not from 1"},
		"no target connect":        {"target_connect_timeout_ms: 200", "target_connect_timeout_ms: 0", "target_connect_timeout_ms: 0 is not from 1"},
		"no target idle":           {"target_idle_timeout_sec: 60", "target_idle_timeout_sec: 0", "target_idle_timeout_sec: 0 is not from 1"},
		"a TTL below 0":            {"negative_ttl_sec: 0", "negative_ttl_sec: -1", "negative_ttl_sec: -1 is not from 0"},
		"fallback":                 {"on_error: stale_ok", "on_error: fallback", ""},
		"gRPC":                     {"    type: http\n    endpoint: http://127.0.0.1:8080/route", "    type: grpc\n    endpoint: http://127.0.0.1:8080", ""},
		"gRPC and a path":          {"    type: http\n", "    type: grpc\n", "gRPC has no path"},
		"an endpoint":              {"endpoint: http://127.0.0.1:8080/route", "endpoint: 127.0.0.1:8080", "resolvers[0].endpoint: "},
		"no endpoint":              {"    endpoint: http://127.0.0.1:8080/route\n", "", "resolvers[0]: endpoint is missing"},
		"a key of the cache":       {"src_ip]\n      positive", "player]\n      positive", `resolvers[0].cache.key[1]: "player" is none of`},
		"a placeholder":            {"endpoint: http://127.0.0.1:8080/route", "endpoint: 'http://{env.HOME}/'", "braces make a placeholder"},

		"an unknown pool":       {"    pool: mc\n", "    pool: mcc\n", `listeners[4].pool: there is no pool "mcc"; did you mean mc?`},
		"a pool in an action":   {"action: { pool: both }", "action: { pool: bth }", `listeners[1].routes[0].action.pool: there is no pool "bth"; did you mean both?`},
		"an unknown resolver":   {"resolver: matchmaker }", "resolver: matchmake }", `there is no resolver "matchmake"; did you mean matchmaker?`},
		"pool and resolver":     {"resolver: matchmaker }", "resolver: matchmaker, pool: eu }", "an action has exactly one of pool and resolver"},
		"no action":             {"action: { resolver: matchmaker }", "action: {}", "an action has exactly one of"},
		"pool and routes":       {"    pool: mc\n", "    pool: mc\n    routes: []\n", "pool is given too"},
		"no routes":             {"    pool: mc\n", "    routes: []\n", "listeners[4]: neither pool nor routes is given"},
		"no protocol":           {"    bind: 0.0.0.0:443\n    protocol: tcp\n", "    bind: 0.0.0.0:443\n", "listeners[1]: protocol is missing"},
		"no bind":               {"    bind: 0.0.0.0:443\n", "", "listeners[1]: bind is missing"},
		"a name in bind":        {"bind: 0.0.0.0:443", "bind: localhost:443", "listeners[1].bind: "},
		"a listener's name":     {"name: short", "name: a b", "the name has ' ' in it"},
		"the same address":      {"bind: 0.0.0.0:25565", "bind: 0.0.0.0:443", "listeners[4].bind: short: tcp/0.0.0.0:443 is bound by tls already"},
		"the same port of UDP":  {"bind: 0.0.0.0:25565", "bind: 0.0.0.0:7777", ""},
		"a range over another":  {"bind: 0.0.0.0:30000-30009", "bind: 0.0.0.0:7770-7779", "is bound by udp-game already"},
		"a backward range":      {"30000-30009", "30009-30000", "the range runs backwards"},
		"a range of too many":   {"30000-30009", "1-65535", "are more than 1024"},
		"a port matcher":        {`"30002-30003"`, `"30003-30002"`, "listeners[3].routes[0].match.ports"},
		"an allowed network":    {"[203.0.113.0/24]", "[203.0.113/24]", "listeners[0].allow[0]: "},
		"a denied network":      {"[203.0.113.66/32]", "[x]", "listeners[0].deny[0]: "},
		"an empty list":         {"    deny: [203.0.113.66/32]\n", "    deny: []\n", ""},
		"rates of nobody":       {"{ per_ip: { rate: 5, burst: 10 }, per_net: { rate: 50 } }", "{}", "rate_limit: neither per_ip nor per_net is given"},
		"a rate of 0":           {"rate: 50 }", "rate: 0 }", "rate: 0 is not from 1"},
		"a burst of 0":          {"rate: 5, burst: 10", "rate: 5, burst: 0", "burst: 0 is not from 1"},
		"sources of nobody":     {"{ max_per_ip: 4, max_per_net: 40 }", "{}", "per_source: neither max_per_ip nor max_per_net"},
		"nothing per source":    {"max_per_ip: 4", "max_per_ip: 0", "max_per_ip: 0 is not from 1"},
		"geo without a file":    {"    allow: [203.0.113.0/24]\n", "    geo: {deny: [DE]}\n", "geo: needs a database: give its path in settings.geo_db"},
		"geo of nowhere":        {"    allow: [203.0.113.0/24]\n", "    geo: {}\n", "geo: allow and deny are both empty"},
		"geo of no country":     {"    allow: [203.0.113.0/24]\n", "    geo: {allow: [DEU]}\n", `geo.allow[0]: "DEU" is not two letters`},
		"gate on TCP":           {"    freebind: true\n", "    first_packet_gate: true\n", "first_packet_gate: is for protocol: udp"},
		"gate without an eye":   {"    bind: 0.0.0.0:30000-30009\n", "    bind: 0.0.0.0:30000-30009\n    first_packet_gate: true\n", "first_packet_gate: nobody would get in"},
		"handshakes only":       {"    first_packet_gate: true\n", "", "listeners[0].routes[3]: the sniffer raknet knows handshakes only"},
		"freebind on UDP":       {"    prefix: 2001:db8:ace:1::/64\n", "    freebind: true\n", "freebind: is for TCP"},
		"dst on UDP":            {"    prefix: 2001:db8:ace:1::/64\n", "", "match.type dst: a UDP listener knows the address"},
		"dst and transparent":   {"    prefix: 2001:db8:ace:1::/64\n", "    transparent: true\n", ""},
		"prefix, transparent":   {"    prefix: 2001:db8:ace:1::/64\n", "    prefix: 2001:db8:ace:1::/64\n    transparent: true\n", "transparent: the listener has a prefix"},
		"prefix of no network":  {"prefix: 2001:db8:ace:1::/64", "prefix: 2001:db8", "listeners[2].prefix: "},
		"prefix on TCP":         {"    freebind: true\n", "    prefix: 192.0.2.0/24\n", "prefix: is for protocol: udp"},
		"prefix and a range":    {`bind: "[::]:7778"`, `bind: "[::]:7780-7781"`, "which takes one port and no range"},
		"prefix of one address": {`bind: "[::]:7778"`, `bind: "[::1]:7778"`, "bind the wildcard address of its family, [::]:7778"},
		"prefix over another":   {"bind: 0.0.0.0:30000-30009", "bind: \"[2001:db8:ace:1::5]:7778\"", "prefix: 2001:db8:ace:1::/64 covers udp/[2001:db8:ace:1::5]:7778"},
		"no sniffer":            {"sniffer: raknet", "sniffer: racknet", `there is no sniffer "racknet", and settings.sniffers names no directory of others; did you mean raknet?`},
		"bytes of no kind":      {`"hex:ffffffff"`, `"ffffffff"`, "listeners[0].routes[0].match.prefix: "},
		"a length backwards":    {"{ min: 4, max: 64 }", "{ min: 64, max: 4 }", "match.length.max: 4 is less than"},
		"no name":               {`["*.eu.example.com", survival.example.com]`, `[]`, "match.host: none"},
		"a suffix":              {`host: ["*.eu.example.com", survival.example.com]`, `suffix: .eu.example.com`, ""},
		"a bad name":            {"survival.example.com]", "'a..b']", "listeners[1].routes[0].match.host[1]: "},
		"no match":              {"      - match: { type: always }\n        action: { pool: eu }", "      - action: { pool: eu }", "listeners[0].routes[3]: match is missing"},
		"a match of no kind":    {"{ type: always }", "{ type: regex }", `match.type: "regex" is none of`},
		"no peek":               {"peek_max_bytes: 2048", "peek_max_bytes: 0", "peek_max_bytes: 0 is not from 1 to 16384"},
		"no time to peek":       {"peek_timeout_ms: 200", "peek_timeout_ms: 0", "peek_timeout_ms: 0 is not from 1"},
		"a null in a list":      {"[block-bogons, conn-rate]", "[block-bogons, null]", "listeners[0].filters[1]: is null"},
		"yes is no truth":       {"route_hint: true", "route_hint: yes", "stands where true or false belongs"},
		"null is nothing":       {"route_hint: true", "route_hint: null", ""},
	} {
		t.Run(name, func(t *testing.T) {
			out, _, err := adapt(changed(t, doc, tc.old, tc.by))
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("error %v, want %q", err, tc.want)
			}
			if err == nil {
				if err := validate(out); err != nil {
					t.Errorf("accepted, and does not load: %v", err)
				}
			}
		})
	}
}
