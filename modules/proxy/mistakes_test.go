package proxy_test

import (
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// validate loads a config as "caddy validate" would.
func validate(config []byte) error {
	var cfg caddy.Config
	if err := caddy.StrictUnmarshalJSON(config, &cfg); err != nil {
		return err
	}
	return caddy.Validate(&cfg)
}

// TestMistakes makes each mistake in both forms. The JSON form tells the path
// and what would be right; so does the Caddyfile form, or the file and line.
func TestMistakes(t *testing.T) {
	const (
		pool     = `"pools": {"lobby": {"targets": ["10.0.0.5:7777"]}}`
		route    = `"routes": [{"handle": [{"handler": "pool", "pool": "lobby"}]}]`
		cfPool   = "pool lobby {\n\t\tto 10.0.0.5:7777\n\t}\n"
		cfRoute  = " {\n\t\troute {\n\t\t\tpool lobby\n\t\t}\n\t}\n"
		lobby    = "pool lobby {\n\t\t"
		listener = "listener game "
	)
	one := func(options string) string {
		return `{"pools": {"lobby": {"targets": ["10.0.0.5:7777"], ` + options + `}}}`
	}
	on := func(bind string) string {
		return `{` + pool + `, "listeners": {"game": {"bind": [` + bind + `], ` + route + `}}}`
	}
	for name, tc := range map[string]struct {
		app, want             string // JSON of the app, and its error
		caddyfile, wantInFile string // its Caddyfile; "" as the JSON's
	}{
		"a pool that there is not": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{"handle": [{"handler": "pool", "pool": "loby"}]}]}}}`,
			want:      `listeners.game.routes[0]: handle: `,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\troute {\n\t\t\tpool loby\n\t\t}\n\t}\n", wantInFile: `no pool is named "loby" in apps.wayhouse.pools; did you mean lobby?`,
		},
		"a handler that there is not": {
			app: `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{"handle": [{"handler": "poool", "pool": "lobby"}]}]}}}`, want: `listeners.game.routes[0]: handle[0].handler: there is no layer4.handlers.poool; did you mean pool?`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\troute {\n\t\t\tthrottle {\n\t\t\t\tread_burst_size 1\n\t\t\t}\n\t\t\tpoool lobby\n\t\t}\n\t}\n", wantInFile: `unrecognized handler "poool"; did you mean pool?, at Caddyfile:11`,
		},
		"a matcher that there is not": {
			app: `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{"match": [{"remote_ip": {}}, {"remoteip": {}}], "handle": [{"handler": "pool", "pool": "lobby"}]}]}}}`, want: `listeners.game.routes[0]: match[1].remoteip: there is no layer4.matchers.remoteip; did you mean remote_ip?`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\t@m {\n\t\t\tremote_ip 10.0.0.0/8\n\t\t\tlocalip 10.0.0.0/8\n\t\t}\n\t\troute @m {\n\t\t\tpool lobby\n\t\t}\n\t}\n", wantInFile: `unrecognized matcher "localip"; did you mean local_ip?, at Caddyfile:9`,
		},
		"a directory that is a file": {
			app: `{"state_dir": "/dev/null", ` + pool + `}`, want: `state_dir: /dev/null is not a directory`,
			caddyfile: "state_dir /dev/null\n\t" + cfPool,
		},
		"a directory of nothing": {
			app: `{"state_dir": "{env.WAYHOUSE_NO_SUCH_VARIABLE}", ` + pool + `}`, want: `state_dir: evaluated placeholder {env.WAYHOUSE_NO_SUCH_VARIABLE} is empty; name a directory, or "off" to keep nothing`,
			caddyfile: "state_dir {env.WAYHOUSE_NO_SUCH_VARIABLE}\n\t" + cfPool,
		},
		"a directory below nothing": {
			app: `{"state_dir": "{env.WAYHOUSE_NO_SUCH_VARIABLE}/wayhouse", ` + pool + `}`, want: `state_dir: evaluated placeholder {env.WAYHOUSE_NO_SUCH_VARIABLE} is empty`,
			caddyfile: "state_dir {env.WAYHOUSE_NO_SUCH_VARIABLE}/wayhouse\n\t" + cfPool,
		},
		"a pool without backends": {
			app: `{"pools": {"lobby": {}}}`, want: `pools.lobby.targets: none; give at least one, ip:port or host:port`,
			caddyfile: "pool lobby\n",
		},
		"a pool that is null": {
			app: `{"pools": {"lobby": null}}`, want: `pools.lobby.targets: none`,
		},
		"a route that is null": {
			app: `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "routes": [null]}}}`, want: `listeners.game.routes[0]: is null`,
		},
		"a handler that is null": {
			app: `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{"handle": [null]}]}}}`, want: `listeners.game.routes[0]: handle: `,
		},
		"a match that is null": {
			app: `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{"match": [{"remote_ip": null}], "handle": [null]}]}}}`, want: `listeners.game.routes[0]: `,
		},
		"a backend without a port": {
			app: `{"pools": {"lobby": {"targets": ["10.0.0.5"]}}}`, want: `pools.lobby.targets: "10.0.0.5" is neither ip:port nor host:port`,
			caddyfile: lobby + "to 10.0.0.5\n\t}\n",
		},
		"a backend that is no address": {
			app: `{"pools": {"lobby": {"targets": ["10.0.0.500:7777"]}}}`, want: `pools.lobby.targets: "10.0.0.500:7777": "10.0.0.500" is neither an IP address nor a host name`,
			caddyfile: lobby + "to 10.0.0.500:7777\n\t}\n",
		},
		"a backend on port 0": {
			app: `{"pools": {"lobby": {"targets": ["10.0.0.5:0"]}}}`, want: `pools.lobby.targets: "10.0.0.5:0": the port is not a number from 1 to 65535`,
			caddyfile: lobby + "to 10.0.0.5:0\n\t}\n",
		},
		"a backend twice": {
			app: `{"pools": {"lobby": {"targets": ["10.0.0.5:1", "10.0.0.5:1"]}}}`, want: `pools.lobby.targets: "10.0.0.5:1" is listed twice`,
			caddyfile: lobby + "to 10.0.0.5:1 10.0.0.5:1\n\t}\n",
		},
		"a listener without an address": {
			app: `{` + pool + `, "listeners": {"game": {` + route + `}}}`, want: `listeners.game.bind: no address: give at least one, as in udp/0.0.0.0:7777`,
			caddyfile: cfPool + "listener game" + cfRoute, wantInFile: "listener game: an address is missing, as in udp/0.0.0.0:7777, at Caddyfile:6",
		},
		"an address without a protocol": {
			app: on(`":7777"`), want: `listeners.game.bind[0]: ":7777" does not begin with tcp/ or udp/: write it as udp/0.0.0.0:7777`,
			caddyfile: cfPool + listener + ":7777" + cfRoute,
		},
		"an address without a port": {
			app: on(`"udp/0.0.0.0"`), want: `listeners.game.bind[0]: "udp/0.0.0.0" has no port: write it as udp/0.0.0.0:7777`,
			caddyfile: cfPool + listener + "udp/0.0.0.0" + cfRoute,
		},
		"an address that is a name": {
			app: on(`"udp/game.example.com:7777"`), want: `listeners.game.bind[0]: "udp/game.example.com:7777": "game.example.com" is not an IP address; leave it out to listen on all`,
			caddyfile: cfPool + listener + "udp/game.example.com:7777" + cfRoute,
		},
		"an address twice": {
			app: on(`"tcp/:7777", "tcp/:7777"`), want: `listeners.game.bind[1]: tcp/[::]:7777 is bound by listeners.game.bind[0] already`,
			caddyfile: cfPool + listener + "tcp/:7777 tcp/:7777" + cfRoute,
		},
		"an address in a range of another listener": {
			app: `{"listeners": {"a": {"bind": ["udp/0.0.0.0:30000-30009"]}, "b": {"bind": ["udp/0.0.0.0:30005"]}}}`, want: `listeners.b.bind[0]: udp/0.0.0.0:30005 is bound by listeners.a.bind[0] already`,
			caddyfile: "listener a udp/0.0.0.0:30000-30009\n\tlistener b udp/0.0.0.0:30005\n",
		},
		"a range that is too large": {
			app: on(`"udp/:30000-31024"`), want: `listeners.game.bind[0]: "udp/:30000-31024": 1025 ports are more than 1024, the most one bind may name`,
			caddyfile: cfPool + listener + "udp/:30000-31024" + cfRoute,
		},
		"a range that runs backwards": {
			app: on(`"udp/:30009-30000"`), want: `listeners.game.bind[0]: "udp/:30009-30000": the range runs backwards: write 30000-30009`,
			caddyfile: cfPool + listener + "udp/:30009-30000" + cfRoute,
		},
		"a port that is too large": {
			app: on(`"udp/:77777"`), want: `listeners.game.bind[0]: "udp/:77777": port "77777" is not a number from 0 to 65535`,
			caddyfile: cfPool + listener + "udp/:77777" + cfRoute,
		},
		"a weight of 0": {
			app: one(`"balancer": {"policy": "weighted", "weights": {"10.0.0.5:7777": 0}}`), want: `weights: "10.0.0.5:7777": 0 is not between 1 and 1000000`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tbalancer weighted {\n\t\t\tweight 10.0.0.5:7777 0\n\t\t}\n\t}\n",
		},
		"a weight below 0": {
			app: one(`"balancer": {"policy": "weighted", "weights": {"10.0.0.5:7777": -1}}`), want: `pools.lobby.balancer.weights.10.0.0.5:7777: want a whole number, not below 0`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tbalancer weighted {\n\t\t\tweight 10.0.0.5:7777 -1\n\t\t}\n\t}\n", wantInFile: `weight: "-1" is not a number from 1 to 1000000, at Caddyfile:6`,
		},
		"a weight for no backend": {
			app: one(`"balancer": {"policy": "weighted", "weights": {"10.0.0.6:7777": 3}}`), want: `pools.lobby.balancer.weights: "10.0.0.6:7777" is not one of the targets`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tbalancer weighted {\n\t\t\tweight 10.0.0.6:7777 3\n\t\t}\n\t}\n",
		},
		"an idle timeout of 0": {
			app: one(`"idle_timeout": 0`), want: `pools.lobby.idle_timeout: 0s is not above zero; leave it out for 90s`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tidle_timeout 0s\n\t}\n",
		},
		"a connect timeout of 0": {
			app: one(`"connect_timeout": "0s"`), want: `pools.lobby.connect_timeout: 0s is not above zero; leave it out for 300ms`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tconnect_timeout 0s\n\t}\n",
		},
		"a peek timeout of 0": {
			app: `{"listeners": {"game": {"bind": ["tcp/:7777"], "peek": {"timeout": "0s"}}}}`, want: `listeners.game.peek.timeout: 0s is not above zero; leave it out for 250ms`,
			caddyfile: listener + "tcp/:7777 {\n\t\tpeek_timeout 0s\n\t}\n",
		},
		"a timeout of a check of 0": {
			app: one(`"health": {"check": "tcp_connect", "timeout": "0s"}`), want: `timeout: 0s is not above zero; leave it out for 500ms`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\thealth tcp_connect {\n\t\t\ttimeout 0s\n\t\t}\n\t}\n",
		},
		"a duration without a unit": {
			app: one(`"idle_timeout": "90"`), want: `pools.lobby.idle_timeout: "90" is not a duration, such as 500ms or 90s`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tidle_timeout 90\n\t}\n", wantInFile: `idle_timeout: "90" is not a duration, such as 500ms or 90s, at Caddyfile:5`,
		},
		"an option that the app does not have": {
			app: `{"worker": 2}`, want: `worker: unknown key; did you mean workers?`,
			caddyfile: "worker 2\n", wantInFile: `unrecognized option "worker" of wayhouse; did you mean workers?, at Caddyfile:3`,
		},
		"an option that a pool does not have": {
			app: one(`"idel_timeout": "3s"`), want: `pools.lobby.idel_timeout: unknown key; did you mean idle_timeout?`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tidel_timeout 3s\n\t}\n", wantInFile: `unrecognized option "idel_timeout" of a pool; did you mean idle_timeout?, at Caddyfile:5`,
		},
		"an option that a listener does not have": {
			app: `{"listeners": {"game": {"binds": ["tcp/:7777"]}}}`, want: `listeners.game.binds: unknown key; did you mean bind?`,
			caddyfile: listener + "tcp/:7777 {\n\t\tprefx ::/64\n\t}\n", wantInFile: `unrecognized option "prefx" of a listener`,
		},
		"an option that the handler does not have": {
			app:        `{"listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{"handle": [{"handler": "pool", "targts": ["10.0.0.5:7777"]}]}]}}}`,
			want:       `targts: unknown key; did you mean targets?`,
			caddyfile:  listener + "tcp/:7777 {\n\t\troute {\n\t\t\tpool {\n\t\t\t\ttarget 10.0.0.5:7777\n\t\t\t}\n\t\t}\n\t}\n",
			wantInFile: `unrecognized option "target" of a pool`,
		},
		"a mapped port that is none": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:65000-65009"], "routes": [{"handle": [{"handler": "pool", "pool": "lobby", "target_port": "offset 530"}]}]}}}`,
			want:      `target_port: offset 530: port 65006 of the listener would be 65536, which is not from 1 to 65535`,
			caddyfile: cfPool + listener + "tcp/:65000-65009 {\n\t\troute {\n\t\t\tpool lobby {\n\t\t\t\ttarget_port offset 530\n\t\t\t}\n\t\t}\n\t}\n",
		},
		"a list of ports that is too short": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:30000-30009"], "routes": [{"handle": [{"handler": "pool", "pool": "lobby", "target_port": [1, "2-9"]}]}]}}}`,
			want:      `target_port: 9 ports for a listener that has 10: give one for each`,
			caddyfile: cfPool + listener + "tcp/:30000-30009 {\n\t\troute {\n\t\t\tpool lobby {\n\t\t\t\ttarget_port 1 2-9\n\t\t\t}\n\t\t}\n\t}\n",
		},
		"a mapping of ports that is none": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{"handle": [{"handler": "pool", "pool": "lobby", "target_port": "some"}]}]}}}`,
			want:      `target_port: "some" is neither "same", "offset N" or a list of ports`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\troute {\n\t\t\tpool lobby {\n\t\t\t\ttarget_port some\n\t\t\t}\n\t\t}\n\t}\n", wantInFile: `target_port: "some" is neither a port from 1 to 65535 nor a range such as 30000-30099, and not same or offset N`,
		},
		"accept_proxy from nobody": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "accept_proxy": {"require": true}, ` + route + `}}}`,
			want:      `listeners.game.accept_proxy.from: none; give the networks or addresses of the load balancers that are trusted, such as 10.0.0.0/24`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\taccept_proxy {\n\t\t\trequire\n\t\t}\n\t\troute {\n\t\t\tpool lobby\n\t\t}\n\t}\n", wantInFile: "accept_proxy: a value is missing, at Caddyfile:7",
		},
		"accept_proxy from a network with bits behind it": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "accept_proxy": {"from": ["10.0.0.1", "10.0.0.7/24"]}, ` + route + `}}}`,
			want:      `listeners.game.accept_proxy.from[1]: "10.0.0.7/24" has bits behind its prefix: 10.0.0.0/24 is the network`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\taccept_proxy 10.0.0.1 10.0.0.7/24\n\t\troute {\n\t\t\tpool lobby\n\t\t}\n\t}\n",
		},
		"accept_proxy from a placeholder that there is not": {
			app:  `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "accept_proxy": {"from": ["{balancers}"]}, ` + route + `}}}`,
			want: `listeners.game.accept_proxy.from[0]: unrecognized placeholder {balancers}`,
		},
		"accept_proxy without time": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "accept_proxy": {"from": ["10.0.0.1"], "timeout": 0}, ` + route + `}}}`,
			want:      `listeners.game.accept_proxy.timeout: 0s is not above zero; leave it out for 3s`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\taccept_proxy 10.0.0.1 {\n\t\t\ttimeout 0s\n\t\t}\n\t\troute {\n\t\t\tpool lobby\n\t\t}\n\t}\n",
		},
		"accept_proxy with an option that there is not": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "accept_proxy": {"from": ["10.0.0.1"], "required": true}, ` + route + `}}}`,
			want:      `listeners.game.accept_proxy.required: unknown key; did you mean require?`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\taccept_proxy 10.0.0.1 {\n\t\t\trequired\n\t\t}\n\t\troute {\n\t\t\tpool lobby\n\t\t}\n\t}\n", wantInFile: `unrecognized option "required" of accept_proxy; did you mean require?`,
		},
		"a prefix with bits behind it": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/0.0.0.0:7777"], "prefix": "198.51.100.7/24", ` + route + `}}}`,
			want:      `listeners.game.prefix: "198.51.100.7/24" has bits behind its prefix: 198.51.100.0/24 is the network`,
			caddyfile: cfPool + listener + "tcp/0.0.0.0:7777 {\n\t\tprefix 198.51.100.7/24\n\t\troute {\n\t\t\tpool lobby\n\t\t}\n\t}\n",
		},
		"a prefix on an address": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "prefix": "198.51.100.0/24", ` + route + `}}}`,
			want:      `listeners.game.prefix: tcp/[::]:7777 is not the wildcard address of IPv4, in which 198.51.100.0/24 lies: write tcp/0.0.0.0:7777`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\tprefix 198.51.100.0/24\n\t\troute {\n\t\t\tpool lobby\n\t\t}\n\t}\n",
		},
		"a prefix and transparent": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/0.0.0.0:7777"], "prefix": "198.51.100.0/24", "transparent": true, ` + route + `}}}`,
			want:      `listeners.game.transparent: the listener has a prefix`,
			caddyfile: cfPool + listener + "tcp/0.0.0.0:7777 {\n\t\tprefix 198.51.100.0/24\n\t\ttransparent\n\t\troute {\n\t\t\tpool lobby\n\t\t}\n\t}\n",
		},
		"a handler that names a pool and gives one": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{"handle": [{"handler": "pool", "pool": "lobby", "max_tries": 3}]}]}}}`,
			want:      `"lobby" is named and options of a pool are given too: name one or give one`,
			caddyfile: cfPool + listener + "tcp/:7777 {\n\t\troute {\n\t\t\tpool lobby {\n\t\t\t\tmax_tries 3\n\t\t\t}\n\t\t}\n\t}\n", wantInFile: "pool lobby: a pool that is named has its options in the wayhouse block, not here, at Caddyfile:9",
		},
		"a balancer that there is not": {
			app: one(`"balancer": {"policy": "roundrobin"}`), want: `pools.lobby.balancer.policy: there is no wayhouse.balancers.roundrobin; did you mean round_robin?`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tbalancer roundrobin\n\t}\n", wantInFile: `unrecognized balancer "roundrobin"; did you mean round_robin?, at Caddyfile:5`,
		},
		"a balancer that is no object": {
			app: one(`"balancer": "round_robin"`), want: `pools.lobby.balancer: "round_robin" is not an object, as in {"policy": "round_robin"}`,
		},
		"an option of another balancer": {
			app: one(`"balancer": {"policy": "least_conn", "hash_on": "src_ip"}`), want: `pools.lobby.balancer.hash_on: unknown key; there are none (policy is least_conn)`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\tbalancer least_conn src_ip\n\t}\n", wantInFile: `unexpected argument "src_ip" of least_conn, at Caddyfile:5`,
		},
		"a check that there is not": {
			app: one(`"health": {"check": "tcp"}`), want: `pools.lobby.health.check: there is no wayhouse.health_checks.tcp; did you mean tcp_connect?`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\thealth tcp\n\t}\n", wantInFile: `unrecognized health check "tcp"; did you mean tcp_connect?, at Caddyfile:5`,
		},
		"an option of another check": {
			app: one(`"health": {"check": "tcp_connect", "path": "/"}`), want: `pools.lobby.health.path: unknown key; there are fall, interval, rise, timeout (check is tcp_connect)`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\thealth tcp_connect {\n\t\t\tpath /\n\t\t}\n\t}\n", wantInFile: `unrecognized option "path" of tcp_connect; there are fall, interval, rise, timeout, at Caddyfile:6`,
		},
		"a probe with nothing to send": {
			app: one(`"health": {"check": "udp_probe"}`), want: `send: missing; give the datagram to send, hex:… or ascii:…`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\thealth udp_probe\n\t}\n",
		},
		"a probe that sends what is no hex": {
			app: one(`"health": {"check": "udp_probe", "send": "hex:0"}`), want: `send: "0" is not made of pairs of hexadecimal digits`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\thealth udp_probe {\n\t\t\tsend hex:0\n\t\t}\n\t}\n",
		},
		"such a check, of a pool inside another handler": {
			app:       `{` + pool + `, "listeners": {"game": {"bind": ["udp/:7777"], "routes": [{"handle": [{"handler": "subroute", "routes": [{"handle": [{"handler": "pool", "pool": "lobby"}]}]}]}]}}}`,
			want:      `pools.lobby.health.check: missing, and the default, tcp_connect, cannot succeed at a backend that speaks UDP only`,
			caddyfile: cfPool + listener + "udp/:7777 {\n\t\troute {\n\t\t\tsubroute {\n\t\t\t\troute {\n\t\t\t\t\tpool lobby\n\t\t\t\t}\n\t\t\t}\n\t\t}\n\t}\n",
		},
		"a check that UDP backends need not answer": {
			app: on(`"udp/:7777"`), want: `pools.lobby.health.check: missing, and the default, tcp_connect, cannot succeed at a backend that speaks UDP only; name udp_probe with what to send, http with a port, or none`,
			caddyfile: cfPool + listener + "udp/:7777" + cfRoute,
		},
		"a mode that there is not": {
			app: one(`"on_all_down": "panic"`), want: `pools.lobby.on_all_down: "panic" is none of refuse, try_all`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\ton_all_down panic\n\t}\n", wantInFile: `on_all_down: "panic" is none of refuse, try_all, at Caddyfile:5`,
		},
		"a wait of a mode that does not": {
			app: one(`"on_backend_down": "close", "hold": "3s"`), want: `pools.lobby.hold: on_backend_down is close, which does not wait; leave hold out, or set on_backend_down to hold`,
			caddyfile: lobby + "to 10.0.0.5:7777\n\t\ton_backend_down close 3s\n\t}\n",
		},
		"a limit of 0": {
			app: `{"limits": {"max_connections": 0}}`, want: `limits.max_connections: 0 would let nothing through: at least 1, or leave it out for no limit`,
			caddyfile: "limits {\n\t\tmax_connections 0\n\t}\n",
		},
		"a session log of nothing": {
			app: `{"connection_log": {"sample": 0}}`, want: `connection_log.sample: 0 is not above 0 and up to 1; to log nothing leave connection_log out`,
			caddyfile: "connection_log {\n\t\tsample 0\n\t}\n",
		},
		"a session log of too much": {
			app: `{"connection_log": {"progress": "10ms"}}`, want: `connection_log.progress: 10ms is below 1s; leave it out for no records of live sessions`,
			caddyfile: "connection_log {\n\t\tprogress 10ms\n\t}\n",
		},
		"workers below 0": {
			app: `{"workers": -1}`, want: `workers: -1 is not from 0 to 127`,
			caddyfile: "workers -1\n",
		},
		"a route that does nothing": {
			app: `{"listeners": {"game": {"bind": ["tcp/:7777"], "routes": [{}]}}}`, want: `listeners.game.routes[0]: handle: nothing to do: name a handler, as in {"handler": "pool", "pool": "NAME"}`,
			caddyfile: listener + "tcp/:7777 {\n\t\troute\n\t}\n", wantInFile: "route: a handler is missing, as in route { pool NAME }, at Caddyfile:4",
		},
		"a string where there is a list": {
			app: `{"pools": {"lobby": {"targets": "10.0.0.5:7777"}}}`, want: `pools.lobby.targets: want a list, not string`,
		},
		"a listener that is null": {
			app: `{"listeners": {"game": null}}`, want: `listeners.game: is null`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			has(t, "JSON", validate([]byte(`{"apps": {"wayhouse": `+tc.app+`}}`)), tc.want)
			if tc.caddyfile == "" {
				return
			}
			want := tc.wantInFile
			if want == "" {
				want = tc.want
			}
			config, err := adapt([]byte("{\n\twayhouse {\n\t" + tc.caddyfile + "\t}\n}\n"))
			if err == nil {
				err = validate([]byte(config))
			}
			has(t, "Caddyfile", err, want)
		})
	}
}

func has(t *testing.T, form string, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%s: error %v\nwant %s", form, err, want)
	}
}
