package listener_test

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

func init() {
	caddy.RegisterModule(badBalancer{})
	caddy.RegisterModule(badAddr{})
	caddy.RegisterModule(badFilter{})
}

// badBalancer, badAddr and badFilter panic on the worker.
type badBalancer struct{}

func (badBalancer) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.balancers.test_panics", New: func() caddy.Module { return new(badBalancer) }}
}

func (badBalancer) Pick([]balancer.Candidate, balancer.Flow) int { panic("balancer of the test") }

type badAddr struct{}

func (badAddr) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "layer4.matchers.test_panics_addr", New: func() caddy.Module { return new(badAddr) }}
}

func (badAddr) MatchAddr(_, _ netip.AddrPort) bool     { panic("matcher of the test") }
func (badAddr) Match(*layer4.Connection) (bool, error) { panic("matcher of the test") }

type badFilter struct{}

func (badFilter) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.filters.test_panics", New: func() caddy.Module { return new(badFilter) }}
}

func (badFilter) Check(filter.Flow) string { panic("filter of the test") }

// TestPanicIsCountedOut holds that flows whose filter, matcher or balancer panics
// on the worker are refused and counted, and do not use up the limits.
func TestPanicIsCountedOut(t *testing.T) {
	const balancer = `"routes": [{"handle": [{"handler": "pool", "targets": ["127.0.0.1:9"], "health": {"check": "none"}, "balancer": {"policy": "test_panics"}}]}]`
	const matcher = `"routes": [{"match": [{"test_panics_addr": {}}], "handle": [{"handler": "pool", "targets": ["127.0.0.1:9"], "health": {"check": "none"}}]}]`
	for _, network := range []string{"tcp", "udp"} {
		for name, tc := range map[string]struct{ options, routes string }{
			"balancer": {routes: balancer},
			"matcher":  {routes: matcher},
			"filter":   {options: `"filters": [{"filter": "test_panics"}],`, routes: `"routes": [{"handle": [{"handler": "echo"}]}]`},
		} {
			t.Run(network+" "+name, func(t *testing.T) {
				load(t, `{"listeners": {"bad": `+listener(network+"/127.0.0.1:0", tc.options, tc.routes)+`}}`)
				l := flow.ListenerOf("bad")
				before := l.Panics()
				c := dial(t, network, addr(t, "bad"))
				send(t, c, "x")
				if network == "tcp" {
					expectClosed(t, c)
				}
				testkit.Settles(t, "the number of panics", before+1, l.Panics)
				testkit.Settles(t, "the number of flows", 0, func() int64 { return l.Conns.Load() + l.Sessions.Load() })
			})
		}
	}
}

// TestRehomeAfterRename moves a session whose listener has another name by
// now, and looks whether both names count right.
func TestRehomeAfterRename(t *testing.T) {
	port := ports(t, 1)[0]
	alive := testkit.NewUDPBackend(t, 1, "127.0.0.1:0")
	dead, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer dead.Close()
	config := func(name string) string {
		return fmt.Sprintf(`{"shutdown_grace": "0s", "listeners": {"%s": %s}, "pools": {"p": {"targets": ["%s", "%s"], "balancer": {"policy": "first_available"},
			"health": {"check": "none", "fall": 1, "interval": "1h", "rise": 1}, "on_backend_down": "rehome"}}}`,
			name, listener(fmt.Sprintf("udp/127.0.0.1:%d", port), "", `"routes": [{"handle": [{"handler": "pool", "pool": "p"}]}]`), dead.LocalAddr(), alive.Addr)
	}
	load(t, config("first-name"))
	c := dial(t, "udp", fmt.Sprintf("127.0.0.1:%d", port))
	frame := testkit.Frame{Flow: 1, Seq: 1}
	send(t, c, string(frame.Append(nil)))
	buf := make([]byte, 2048)
	if _, _, err := dead.ReadFrom(buf); err != nil {
		t.Fatal(err)
	}
	load(t, config("second-name"))
	dead.Close()
	answered := make(chan error, 1)
	go func() {
		_, err := c.Read(buf)
		for ; err != nil; _, err = c.Read(buf) {
			if e, ok := err.(net.Error); ok && e.Timeout() {
				break
			}
		}
		answered <- err
	}()
	testkit.Eventually(t, "an answer", func() bool {
		c.Write(frame.Append(nil))
		select {
		case err := <-answered:
			if err != nil {
				t.Fatal(err)
			}
			return true
		default:
			return false
		}
	})
	if first, second := flow.ListenerOf("first-name").Sessions.Load(), flow.ListenerOf("second-name").Sessions.Load(); first != 1 || second != 0 {
		t.Errorf("%d sessions under the first name and %d under the second, want the one where it was opened", first, second)
	}
}
