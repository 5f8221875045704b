package pool

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
)

func TestConfigErrors(t *testing.T) {
	const a = `"targets": ["10.0.0.1:7777"]`
	for in, want := range map[string]string{
		`{` + a + `}`: "",
		`{"targets": ["game.example:7777", "game.example:7778", "[2001:db8::1]:1", "_x.y:1"]}`: "",
		`{` + a + `, "balancer": {"policy": "consistent_hash", "hash_on": "src_ip"}}`:          "",
		`{` + a + `, "balancer": {}}`: "",
		`{"targets": ["10.0.0.1:7777", "A.example:1"], "balancer": {"policy": "weighted", "weights": {"a.example.:1": 2, "[::ffff:10.0.0.1]:7777": 3}}}`: "",
		`{` + a + `, "health": {"interval": "1s"}}`: "",
		`{` + a + `, "health": {"check": "udp_probe", "send": "hex:01", "expect": "hex:02", "interval": "2s", "timeout": "500ms", "rise": 2, "fall": 3}}`: "",
		`{` + a + `, "per_backend": {"max_sessions": 1, "max_new_per_sec": 1}}`:                                                                           "",
		`{` + a + `, "keepalive": "off"}`: "",
		`{` + a + `, "keepalive": 0, "nodelay": false, "max_tries": 1, "max_lifetime": "1d", "connect_timeout": "1s", "idle_timeout": "10s"}`: "",
		`{` + a + `, "on_all_down": "try_all", "on_backend_down": "rehome", "on_backend_removed": "close"}`:                                   "",
		`{` + a + `, "on_backend_down": "hold", "hold": "1s", "drain_deadline": "10m"}`:                                                       "",
		`{` + a + `, "source_addresses": ["192.0.2.1", "2001:db8::1"]}`:                                                                       "",

		`{}`:                                                 `targets: none; give at least one`,
		`{"targets": []}`:                                    `targets: none`,
		`{"targets": ["10.0.0.1"]}`:                          `targets: "10.0.0.1" is neither ip:port nor host:port`,
		`{"targets": ["10.0.0.1:0"]}`:                        `targets: "10.0.0.1:0": the port is not a number from 1 to 65535`,
		`{"targets": ["10.0.0.1:65536"]}`:                    `the port is not`,
		`{"targets": ["10.0.0.1:game"]}`:                     `the port is not`,
		`{"targets": ["10.0.0.300:1"]}`:                      `"10.0.0.300" is neither an IP address nor a host name`,
		`{"targets": [":7777"]}`:                             `"" is neither an IP address nor a host name`,
		`{"targets": ["a b:1"]}`:                             `"a b" is neither`,
		`{"targets": ["-a.example:1"]}`:                      `is neither`,
		`{"targets": ["0.0.0.0:1"]}`:                         `is not the address of one host`,
		`{"targets": ["224.0.0.1:1"]}`:                       `is not the address of one host`,
		`{"targets": ["255.255.255.255:1"]}`:                 `is not the address of one host`,
		`{"targets": ["10.0.0.1:1", "10.0.0.1:1"]}`:          `targets: "10.0.0.1:1" is listed twice`,
		`{"targets": ["10.0.0.1:1", "[::ffff:10.0.0.1]:1"]}`: `"[::ffff:10.0.0.1]:1" is listed twice`,
		`{"targets": ["a.example:1", "A.example.:1"]}`:       `"A.example.:1" is listed twice`,

		`{` + a + `, "balancer": {"policy": "random"}}`:                                                                 `balancer.policy: there is no wayhouse.balancers.random; there are`,
		`{` + a + `, "balancer": {"policy": 3}}`:                                                                        `balancer.policy: 3 is not a name`,
		`{` + a + `, "balancer": "least_conn"}`:                                                                         `balancer: `,
		`{` + a + `, "balancer": {"policy": "least_conn", "hash_on": "src_ip"}}`:                                        `balancer.hash_on: unknown key; there are none (policy is least_conn)`,
		`{` + a + `, "balancer": {"policy": "weighted", "weights": {"10.0.0.9:1": 2}}}`:                                 `balancer.weights: "10.0.0.9:1" is not one of the targets`,
		`{` + a + `, "balancer": {"policy": "weighted", "weights": {"10.0.0.1:7777": 0}}}`:                              `weights: "10.0.0.1:7777": 0 is not between 1`,
		`{` + a + `, "balancer": {"policy": "weighted", "weights": {"10.0.0.1:7777": 1, "[::ffff:10.0.0.1]:7777": 1}}}`: `has a weight already`,
		`{` + a + `, "health": {"check": "ping"}}`:                                                                      `health.check: there is no wayhouse.health_checks.ping; there are`,
		`{` + a + `, "health": {"check": "tcp_connect", "send": "hex:01"}}`:                                             `health.send: unknown key`,
		`{` + a + `, "health": {"send": "hex:01"}}`:                                                                     `health.send: unknown key; there are fall, interval, rise, timeout (check is tcp_connect)`,
		`{` + a + `, "health": {"timeout": 0}}`:                                                                         `timeout: 0s is not above zero`,
		`{` + a + `, "health": {"rise": 0}}`:                                                                            `rise: 0 is less than 1`,
		`{` + a + `, "per_backend": {"max_sessions": 0}}`:                                                               `per_backend.max_sessions: 0 is less than 1`,
		`{` + a + `, "per_backend": {"max_new_per_sec": -1}}`:                                                           `per_backend.max_new_per_sec: -1 is not between`,
		`{` + a + `, "connect_timeout": 0}`:                                                                             `connect_timeout: 0s is not above zero; leave it out for 300ms`,
		`{` + a + `, "idle_timeout": "-1s"}`:                                                                            `idle_timeout: -1s is not above zero`,
		`{` + a + `, "max_lifetime": "-1s"}`:                                                                            `max_lifetime: -1s is below zero`,
		`{` + a + `, "max_tries": 0}`:                                                                                   `max_tries: 0 is less than 1`,
		`{` + a + `, "keepalive": "-5s"}`:                                                                               `keepalive: -5s is below zero; use "off"`,
		`{` + a + `, "on_all_down": "pray"}`:                                                                            `on_all_down: "pray" is none of refuse, try_all`,
		`{` + a + `, "on_backend_down": "drain"}`:                                                                       `on_backend_down: "drain" is none of hold, close, rehome`,
		`{` + a + `, "on_backend_removed": "hold"}`:                                                                     `on_backend_removed: "hold" is none of drain, close`,
		`{` + a + `, "on_backend_down": "close", "hold": "5s"}`:                                                         `hold: on_backend_down is close`,
		`{` + a + `, "hold": 0}`:                                                                                        `hold: 0s is not above zero; use on_backend_down close`,
		`{` + a + `, "on_backend_removed": "close", "drain_deadline": "5s"}`:                                            `drain_deadline: on_backend_removed is close`,
		`{` + a + `, "drain_deadline": "-5s"}`:                                                                          `drain_deadline: -5s is below zero`,
		`{` + a + `, "source_addresses": ["eth0"]}`:                                                                     `source_addresses: "eth0" is not an IP address`,
		`{` + a + `, "source_addresses": ["0.0.0.0"]}`:                                                                  `is no address to connect from`,
		`{` + a + `, "source_addresses": ["192.0.2.1", "::ffff:192.0.2.1"]}`:                                            `192.0.2.1 is listed twice`,
	} {
		t.Run(in, func(t *testing.T) {
			ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
			defer cancel()
			p, err := parse(t, in).Provision(ctx, t.Name())
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q", err, want)
			}
			if p != nil {
				p.Cleanup()
			}
		})
	}
	used(t, 0)
}

// used checks how many backends are held by anyone.
func used(t testing.TB, want int) {
	t.Helper()
	n := 0
	backends.Range(func(any, any) bool { n++; return true })
	if n != want {
		t.Errorf("%d backends are held, want %d", n, want)
	}
}

func TestUnknownKeysAreRefused(t *testing.T) {
	for _, in := range []string{`{"proxy_proto": "v2"}`, `{"sources": "x"}`, `{"per_backend": {"max": 1}}`} {
		if err := caddy.StrictUnmarshalJSON([]byte(in), new(Config)); err == nil || !strings.Contains(err.Error(), "unknown field") {
			t.Errorf("%s: %v", in, err)
		}
	}
	err := json.Unmarshal([]byte(`{"keepalive": "never"}`), new(Config))
	if err == nil || !strings.Contains(err.Error(), `"never" is neither a duration`) {
		t.Error(err)
	}
}

func TestDefaults(t *testing.T) {
	got := (&Config{}).settings()
	if got.ConnectTimeout != 300*time.Millisecond || got.IdleTimeout != 90*time.Second || got.MaxLifetime != 0 || got.MaxTries != 2 ||
		got.Keepalive != 30*time.Second || !got.NoDelay || got.OnAllDown != Refuse || got.OnBackendDown != DownHold ||
		got.Hold != 30*time.Second || got.OnBackendRemoved != RemovedDrain || got.DrainDeadline != 0 || got.SourceAddresses != nil ||
		got.MaxSessions != 0 || got.MaxNewPerSec != 0 {
		t.Errorf("defaults %+v", got)
	}
	if s := parse(t, `{"keepalive": "off"}`).settings(); s.Keepalive != 0 {
		t.Errorf("keepalive off is %v", s.Keepalive)
	}
}

func TestHealthNamed(t *testing.T) {
	for in, want := range map[string]bool{"": false, `, "health": {"interval": "1s"}`: false, `, "health": {"check": "tcp_connect"}`: true} {
		p := provision(t, `{"targets": ["10.0.0.1:1"]`+in+`}`)
		if p.HealthNamed() != want {
			t.Errorf("%q: %v, want %v", in, p.HealthNamed(), want)
		}
		p.Cleanup()
	}
}
