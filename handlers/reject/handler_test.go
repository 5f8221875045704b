package reject_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	_ "github.com/mholt/caddy-l4/modules/l4throttle"
	"github.com/prometheus/client_golang/prometheus/testutil"

	_ "github.com/wayhouse-proxy/wayhouse/handlers/pool"
	"github.com/wayhouse-proxy/wayhouse/handlers/reject"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/clientcidr"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/firstbytes"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func TestMain(m *testing.M) {
	// The runtime's goroutine for signals, which Caddy starts, stays for good: let
	// it be there before anything is counted.
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	signal.Stop(c)
	kit.Main(m)
}

func load(t *testing.T, config kit.M) {
	t.Helper()
	config["admin"] = kit.M{"disabled": true, "config": kit.M{"persist": false}}
	b, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(b, true); err != nil {
		t.Fatalf("loading %s: %v", b, err)
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
}

func dial(t *testing.T, network, from, to string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
	if network == "tcp" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	c, err := d.Dial(network, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(kit.Long))
	return c
}

// silent wants a connection closed without a byte.
func silent(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

func dropped(name string) (n uint64) {
	cs := flow.ListenerOf(name).Workers(runtime.GOMAXPROCS(0))
	for i := range cs {
		n += cs[i].Dropped[relay.Reject].Load()
	}
	return n
}

// TestReject turns flows away that are found by address, by their bytes, and
// behind another handler; all others go where they went.
func TestReject(t *testing.T) {
	backend, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer backend.Close()
	pools := kit.M{"tcp": kit.Pool(kit.NewTCPBackend(t, 1, "127.0.0.1:0").Addr), "udp": kit.Pool(backend.LocalAddr().String())}
	turn := kit.M{"handler": "reject"}
	routes := func(pool string) []kit.M {
		return []kit.M{
			kit.Match(kit.M{"client_cidr": kit.M{"cidrs": kit.A{"127.0.0.9"}}}, turn),
			kit.Match(kit.M{"first_bytes": kit.M{"prefix": "ascii:bad"}}, turn),
			kit.Match(kit.M{"first_bytes": kit.M{"prefix": "ascii:slow"}}, kit.M{"handler": "throttle"}, turn),
			kit.Route(kit.M{"handler": "pool", "pool": pool}),
		}
	}
	load(t, kit.App(kit.M{
		"t": kit.Listener([]string{"tcp/127.0.0.1:0"}, routes("tcp")...),
		"u": kit.Listener([]string{"udp/127.0.0.1:0"}, routes("udp")...),
	}, pools))
	to := func(name string) string { return proxy.Running().Listening(name)[0].Addr.String() }
	st := flow.ListenerOf("t")
	turned, accepted := testutil.ToFloat64(st.Turned), testutil.ToFloat64(st.Accepted)

	silent(t, dial(t, "tcp", "127.0.0.9", to("t")))
	c := dial(t, "tcp", "127.0.0.1", to("t"))
	io.WriteString(c, "bad news")
	silent(t, c)
	if got := testutil.ToFloat64(st.Turned) - turned; got != 2 {
		t.Errorf("%v connections are counted as turned away, want 2", got)
	}
	if got := testutil.ToFloat64(st.Accepted) - accepted; got != 0 {
		t.Errorf("%v connections are counted as accepted, want none", got)
	}
	c = dial(t, "tcp", "127.0.0.1", to("t"))
	io.WriteString(c, "slow news")
	silent(t, c)
	kit.Settles(t, "live connections", 0, st.Conns.Load)

	before := dropped("u")
	for _, d := range []struct{ from, text string }{{"127.0.0.9", "hello"}, {"127.0.0.1", "bad"}, {"127.0.0.1", "slow"}} {
		io.WriteString(dial(t, "udp", d.from, to("u")), d.text)
	}
	kit.Settles(t, "dropped datagrams", before+2, func() uint64 { return dropped("u") })
	kit.Settles(t, "live sessions", 0, flow.ListenerOf("u").Sessions.Load)
	io.WriteString(dial(t, "udp", "127.0.0.1", to("u")), "good")
	backend.SetReadDeadline(time.Now().Add(kit.Long))
	b := make([]byte, 100)
	if n, _, err := backend.ReadFrom(b); string(b[:n]) != "good" || err != nil {
		t.Errorf("the backend has %q, %v; want nothing but the good one", b[:n], err)
	}

	for name, want := range map[string]string{"127.0.0.9:1": "rejected", "127.0.0.1:1": "pool"} {
		e, err := proxy.Running().Listeners["t"].Explain(listener.Question{Client: netip.MustParseAddrPort(name), Pieces: [][]byte{[]byte("hello")}, Final: true})
		if err != nil || e.End.What != want {
			t.Errorf("%s: %v, %v; want %s", name, e, err, want)
		}
	}
}

// TestOtherServers rejects in a server of caddy-l4.
func TestOtherServers(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	load(t, kit.Apps(kit.M{"layer4": kit.M{"servers": kit.M{"s": kit.M{
		"listen": kit.A{"tcp/" + addr, "udp/" + addr}, "routes": kit.A{kit.Route(kit.M{"handler": "reject"})},
	}}}}))
	before := testutil.ToFloat64(flow.ListenerOf("layer4").Turned)
	silent(t, dial(t, "tcp", "127.0.0.1", addr))
	if got := testutil.ToFloat64(flow.ListenerOf("layer4").Turned) - before; got != 1 {
		t.Errorf("%v connections are counted, want 1", got)
	}
	io.WriteString(dial(t, "udp", "127.0.0.1", addr), "x")
	kit.Settles(t, "dropped datagrams", 1, func() uint64 { return flow.ListenerOf("layer4").Workers(1)[0].Dropped[relay.Reject].Load() })
}

func TestAllocations(t *testing.T) {
	h, o := new(reject.Handler), udprelay.Opening{}
	if n := testing.AllocsPerRun(100, func() { h.ForwardUDP(&o, nil) }); n > 0 || o.Reason != relay.Reject {
		t.Errorf("%v allocations, %v", n, o.Reason)
	}
}

func TestConfig(t *testing.T) {
	for in, want := range map[string]string{
		"reject":          "<nil>",
		"reject x":        `unexpected argument "x" of reject`,
		"reject {\n a\n}": `unrecognized option "a" of reject`,
	} {
		if err := new(reject.Handler).UnmarshalCaddyfile(caddyfile.NewTestDispenser(in)); !strings.HasPrefix(fmt.Sprint(err), want) {
			t.Errorf("%s: %v, want %s", in, err, want)
		}
	}
	if err := json.Unmarshal([]byte(`{"status": 1}`), new(reject.Handler)); err == nil || !strings.Contains(err.Error(), "status") {
		t.Errorf("an unknown key: %v", err)
	}
}
