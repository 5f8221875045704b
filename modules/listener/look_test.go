package listener_test

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/firstbytes"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/port"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/sni"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	wayhouse "github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
	_ "github.com/wayhouse-proxy/wayhouse/modules/sniff/native"
)

func init() { caddy.RegisterModule(badFlow{}) }

// badFlow panics on the worker when the client has said "panic".
type badFlow struct{}

func (badFlow) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "layer4.matchers.test_panics_flow", New: func() caddy.Module { return new(badFlow) }}
}

func (badFlow) Match(*layer4.Connection) (bool, error) { panic("matcher of the test") }

func (badFlow) MatchFlow(f *sniff.Flow, _, _ netip.AddrPort) (bool, error) {
	if string(f.Input().Bytes) == "panic" {
		panic("matcher of the test")
	}
	return false, layer4.ErrConsumedAllPrefetchedBytes
}

// greeter is a backend that says its name first and echoes then.
func greeter(t *testing.T, name string) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() { io.WriteString(c, name); io.Copy(c, c); c.Close() }()
		}
	}()
	return ln.Addr().String()
}

// pooled is a route of these matchers to a backend.
func pooled(match, backend string) string {
	return fmt.Sprintf(`{"match": [%s], "handle": [{"handler": "pool", "targets": ["%s"], "health": {"check": "none"}}]}`, match, backend)
}

// gaveUp is of a connection whose dialer is told that it has ended.
var gaveUp relay.Info

func infos(t *testing.T) (list []relay.Info) {
	at := addr(t, "l")
	wayhouse.Running().Flows(func(i *relay.Info) bool {
		if i.Local.String() == at { // and not what earlier tests have left
			list = append(list, *i)
		}
		return true
	})
	return list
}

// TestLooking has flows that are decided and forwarded by the worker alone.
func TestLooking(t *testing.T) {
	hello, other := greeter(t, "hello:"), greeter(t, "other:")
	routes := `"routes": [` + pooled(`{"first_bytes": {"prefix": "ascii:hello"}}`, hello) + `,
		{"handle": [{"handler": "pool", "targets": ["` + other + `"], "health": {"check": "none"}}]}]`
	config := func(timeout string) string {
		return `{"listeners": {"l": ` + listener("tcp/127.0.0.1:0", `"peek": {"timeout": "`+timeout+`"},`, routes) + `}}`
	}
	t.Run("cut anywhere", func(t *testing.T) {
		load(t, config("30s"))
		for cut := range 6 {
			c := dial(t, "tcp", addr(t, "l"))
			send(t, c, "hello"[:cut])
			testkit.Eventually(t, "a look", func() bool { return len(infos(t)) == cut+1 })
			send(t, c, "hello!"[cut:])
			expect(t, c, "hello:hello!")
		}
		c := dial(t, "tcp", addr(t, "l"))
		send(t, c, "help")
		expect(t, c, "other:help")
	})
	t.Run("silence", func(t *testing.T) {
		load(t, config("100ms"))
		expect(t, dial(t, "tcp", addr(t, "l")), "other:")
	})
	t.Run("too little", func(t *testing.T) {
		load(t, config("100ms"))
		c := dial(t, "tcp", addr(t, "l"))
		send(t, c, "hel")
		expectClosed(t, c)
		testkit.Settles(t, "the number of flows", 0, func() int64 { return flow.ListenerOf("l").Conns.Load() })
	})
	t.Run("operator", func(t *testing.T) {
		load(t, config("1h"))
		c := dial(t, "tcp", addr(t, "l"))
		send(t, c, "hel")
		testkit.Eventually(t, "the session", func() bool { return len(infos(t)) == 1 })
		i := infos(t)[0]
		if i.Path.Listener != "l" || i.Path.Route != -1 || i.Client.String() != c.LocalAddr().String() {
			t.Errorf("listed as %+v", i)
		}
		if !wayhouse.Running().CloseFlow(i.ID, relay.Admin) {
			t.Error("cannot be closed")
		}
		expectClosed(t, c)
		testkit.Settles(t, "the number of flows", 0, func() int64 { return flow.ListenerOf("l").Conns.Load() })
	})
	t.Run("reload", func(t *testing.T) {
		port := ports(t, 1)[0]
		at := func(routes string) string {
			return `{"listeners": {"l": ` + listener(fmt.Sprintf("tcp/127.0.0.1:%d", port), `"peek": {"timeout": "1h"},`, routes) + `}}`
		}
		load(t, at(routes))
		c := dial(t, "tcp", addr(t, "l"))
		send(t, c, "hel")
		testkit.Eventually(t, "the session", func() bool { return len(infos(t)) == 1 })
		load(t, at(`"routes": [`+pooled(`{"first_bytes": {"prefix": "ascii:hello"}}`, other)+`]`))
		send(t, c, "lo")
		expect(t, c, "hello:hello") // by the routes it came to
		c = dial(t, "tcp", addr(t, "l"))
		send(t, c, "hello")
		expect(t, c, "other:hello")
	})
	t.Run("panic", func(t *testing.T) {
		load(t, `{"listeners": {"l": `+listener("tcp/127.0.0.1:0", `"peek": {"timeout": "1h"},`, `"routes": [`+pooled(`{"test_panics_flow": {}}`, other)+`]`)+`}}`)
		good, bad := dial(t, "tcp", addr(t, "l")), dial(t, "tcp", addr(t, "l"))
		send(t, good, "x")
		send(t, bad, "panic")
		expectClosed(t, bad)
		testkit.Settles(t, "the number of flows", 1, func() int64 { return flow.ListenerOf("l").Conns.Load() })
		if n := len(infos(t)); n != 1 {
			t.Errorf("%d flows are left, want the other one", n)
		}
	})
}

// handshake is that of a Minecraft client for a host of 16 characters.
const handshake = "\x17\x00\xff\x05\x10play.example.com\x63\xdd\x02"

// decided are routes that a worker decides, and what decides them.
func decided(t testing.TB) map[string]struct{ match, first string } {
	c := firstpackets.One(t, "tls-chrome133")
	hello := string(bytes.Join(c.Data(t), nil))
	return map[string]struct{ match, first string }{
		"first_bytes":          {`{"first_bytes": {"prefix": "ascii:hello"}}`, "hello there"},
		"first_bytes and port": {`{"first_bytes": {"prefix": "ascii:hello"}, "port": {"ports": ["1-65535"]}}`, "hello there"},
		"sni":                  {`{"sni": {"host": ["*.example.com"]}}`, hello},
		"sniffer":              {`{"sniffer": {"name": "minecraft", "host": ["play.example.com"]}}`, handshake},
		"regexp of caddy-l4":   {`{"regexp": {"pattern": "^hell", "count": 4}}`, "hello there"},
	}
}

// decide is what the engine does for a connection that is looked at once.
func decide(t testing.TB, match string) (once func(first []byte) bool) {
	load(t, `{"listeners": {"l": `+listener("tcp/127.0.0.1:0", ``, `"routes": [`+pooled(match, "127.0.0.1:9")+`]`)+`}}`)
	at := netip.MustParseAddrPort(addr(t, "l"))
	a := wayhouse.AcceptorAt(at)
	client := netip.MustParseAddrPort("127.0.0.1:5")
	o := new(tcprelay.Opening)
	return func(first []byte) bool {
		*o = tcprelay.Opening{FD: -1, Client: client, Local: at}
		d := a.Accept(o)
		if d == tcprelay.Peek {
			d = o.Looker.Look(o, first, false)
		}
		if d != tcprelay.Forward {
			return false
		}
		gaveUp.Client = client
		o.Dialer.GaveUp(&gaveUp, relay.ClientClose)
		return true
	}
}

// TestDecidingAllocatesNothing holds what a route that our own matchers decide
// costs: nothing that the collector has to find.
func TestDecidingAllocatesNothing(t *testing.T) {
	for name, tc := range decided(t) {
		t.Run(name, func(t *testing.T) {
			once, first := decide(t, tc.match), []byte(tc.first)
			if !once(first) {
				t.Fatal("not forwarded by the worker")
			}
			n := testing.AllocsPerRun(200, func() { once(first) })
			if name == "regexp of caddy-l4" {
				t.Logf("%v allocations", n)
			} else if n > 0 && !testkit.Race {
				t.Errorf("%v allocations", n)
			}
		})
	}
}

// BenchmarkDecide is what a connection costs until it is known where it goes,
// without the system calls: by no matcher, and by those that look at bytes.
func BenchmarkDecide(b *testing.B) {
	run := func(name, match, first string) {
		b.Run(name, func(b *testing.B) {
			once, bytes := decide(b, match), []byte(first)
			b.ReportAllocs()
			for b.Loop() {
				if !once(bytes) {
					b.Fatal("not forwarded by the worker")
				}
			}
		})
	}
	run("no matcher", `{}`, "")
	for name, tc := range decided(b) {
		run(name, tc.match, tc.first)
	}
}
