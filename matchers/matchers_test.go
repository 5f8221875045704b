// Package matchers_test drives the matchers through the listeners of a running
// config, with real sockets.
package matchers_test

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"

	_ "github.com/wayhouse-proxy/wayhouse"
	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func TestMain(m *testing.M) {
	caddy.RegisterModule(new(say))
	testkit.Main(m)
}

// say tells the client which route it has got.
type say struct {
	Text string `json:"text,omitempty"`
}

func (*say) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "layer4.handlers.test_say", New: func() caddy.Module { return new(say) }}
}

func (s *say) Handle(cx *layer4.Connection, _ layer4.Handler) error {
	if _, err := io.WriteString(cx, s.Text); err != nil || cx.LocalAddr().Network() == "udp" {
		return err
	}
	io.Copy(io.Discard, cx) // a close with bytes left would be a reset
	return nil
}

// route is a route with matchers that says its name.
func route(name string, matchers testkit.M) testkit.M {
	return testkit.Match(matchers, testkit.M{"handler": "test_say", "text": name})
}

// load runs a listener on a port of its own until the test ends.
func load(t *testing.T, network string, peek testkit.M, routes ...testkit.M) (to string) {
	t.Helper()
	run(t, testkit.With(testkit.Listener([]string{network + "/127.0.0.1:0"}, routes...), testkit.M{"peek": peek}))
	return listening()
}

// listening is the first address of the listener that runs.
func listening() string { return proxy.Running().Listening("l")[0].Addr.String() }

// run runs a listener named l until the test ends.
func run(t *testing.T, l testkit.M, options ...testkit.M) {
	t.Helper()
	quiet := testkit.M{"admin": testkit.M{"disabled": true, "config": testkit.M{"persist": false}}}
	cfg, err := json.Marshal(testkit.With(testkit.App(testkit.M{"l": l}, nil, options...), quiet))
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(cfg, true); err != nil {
		t.Fatalf("loading %s: %v", cfg, err)
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
}

// patient waits longer for first bytes than any test takes.
var patient = testkit.M{"timeout": "1m", "max_bytes": 16384}

// tell sends the pieces as segments, with the end of the stream behind them, or
// as datagrams, and returns what the client is told. Nothing is for a client
// that was cut off.
func tell(t testing.TB, network, to string, pieces ...[]byte) string {
	t.Helper()
	c, err := net.Dial(network, to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testkit.Long))
	for _, p := range pieces {
		if _, err := c.Write(p); err != nil {
			break // cut off before it has said all
		}
	}
	if tc, ok := c.(*net.TCPConn); ok {
		tc.CloseWrite()
		b, _ := io.ReadAll(c)
		return string(b)
	}
	b := make([]byte, 64)
	n, err := c.Read(b)
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	return string(b[:n])
}

func sniffer(name string, hosts ...string) testkit.M {
	return testkit.M{"sniffer": testkit.M{"name": name, "host": hosts}}
}

var hosts = []string{".example.com", ".example.net", ".example.org", ".example", "localhost", "203.0.113.5"}

// routes asks every sniffer, weak ones last.
func routes(kinds ...string) (list []testkit.M) {
	for _, kind := range kinds {
		list = append(list, route(kind+" host", sniffer(kind, hosts...)), route(kind, sniffer(kind)))
	}
	return append(list, route("other", nil))
}

// check compares what a client was told with what a first packet is.
func check(t *testing.T, c firstpackets.Case, got string) {
	t.Helper()
	kind, _, host := strings.Cut(got, " ")
	switch {
	case c.Expect.Tolerance == "either":
	case (kind == c.Protocol) != c.Expect.Recognised:
		t.Errorf("%s: told %q", c.ID, got)
	case c.Expect.Recognised && !c.Expect.HostOptional && host != (c.Expect.Host != ""):
		t.Errorf("%s: told %q of host %q", c.ID, got, c.Expect.Host)
	}
}

var known = []string{"quic", "dtls", "wireguard", "raknet", "teamspeak3", "a2s", "quake3", "enet", "stun", "openvpn"}

// Every first packet that a sniffer is for gets its route, over UDP.
func TestDatagrams(t *testing.T) {
	to := load(t, "udp", patient, routes(known...)...)
	for _, c := range firstpackets.All(t, known...) {
		if c.UDP() {
			check(t, c, tell(t, "udp", to, c.Data(t)...))
		}
	}
}

// The same over TCP, and however a stream is cut it gets the same route, or is
// refused the same way.
func TestStreams(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	list := append([]testkit.M{
		route("tls host", testkit.M{"sni": testkit.M{"host": hosts}}),
		route("prefix", testkit.M{"first_bytes": testkit.M{"prefix": "ascii:GET ", "length": testkit.M{"min": 20}}}),
	}, routes("minecraft", "stun", "openvpn")...)
	to := load(t, "tcp", patient, list...)
	for _, c := range firstpackets.All(t) {
		if c.UDP() {
			continue
		}
		data := c.Data(t)
		var stream []byte
		for _, d := range data {
			stream = append(stream, d...)
		}
		whole := tell(t, "tcp", to, stream)
		switch c.Protocol {
		case "tls":
			if host := whole == "tls host"; host != (c.Expect.Host != "") && c.Expect.Tolerance != "either" && !c.Expect.HostOptional {
				t.Errorf("%s: told %q of host %q", c.ID, whole, c.Expect.Host)
			}
		case "minecraft", "stun", "openvpn":
			check(t, c, whole)
		case "http":
			if strings.HasPrefix(string(stream), "GET ") != (whole == "prefix") && len(stream) >= 20 {
				t.Errorf("%s: told %q", c.ID, whole)
			}
		}
		if got := tell(t, "tcp", to, data...); got != whole {
			t.Errorf("%s: told %q in its segments, %q in one", c.ID, got, whole)
		}
		if c.ID == "ovpn-neg-tcp-len-over" {
			continue // a packet with another behind it: cut between them it is one
		}
		for range testkit.Scaled(3, 200) {
			if got := tell(t, "tcp", to, cut(rng, stream)...); got != whole {
				t.Errorf("%s: told %q in pieces, %q in one", c.ID, got, whole)
			}
		}
	}
}

// cut cuts a stream in up to five places.
func cut(rng *rand.Rand, stream []byte) (pieces [][]byte) {
	for range rng.IntN(5) + 1 {
		n := rng.IntN(len(stream) + 1)
		pieces = append(pieces, stream[:n])
		stream = stream[n:]
	}
	return append(pieces, stream)
}

// A hello that drips in never gets to the route for everybody: the client is
// cut off when its time is over.
func TestDrip(t *testing.T) {
	to := load(t, "tcp", testkit.M{"timeout": "50ms"}, route("secret", testkit.M{"sni": testkit.M{"host": []string{"secret.example"}}}), route("everybody", nil))
	hello := packets(t, "tls-go13")[0]
	conn, err := net.Dial("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(testkit.Long))
	if _, err := conn.Write(hello[:100]); err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(conn); len(b) > 0 {
		t.Errorf("told %q", b)
	}
	if got := tell(t, "tcp", to, hello); got != "everybody" {
		t.Errorf("the whole hello: told %q", got)
	}
}

// Routes by address are decided the same way on a worker and beside a route
// that wants bytes.
func TestAddresses(t *testing.T) {
	port := testkit.Ports(t, 3)
	for name, bytes := range map[string][]testkit.M{"on the worker": nil, "behind a look at bytes": {route("bytes", testkit.M{"first_bytes": testkit.M{"prefix": "ascii:bytes"}})}} {
		t.Run(name, func(t *testing.T) {
			list := append(bytes,
				route("stranger", testkit.M{"client_cidr": testkit.M{"cidrs": []string{"198.51.100.0/24"}}}),
				route("first", testkit.M{"port": testkit.M{"ports": []any{port}}}),
				route("second there", testkit.M{"port": testkit.M{"ports": []any{fmt.Sprintf("%d-%d", port+1, port+2)}}, "dst": testkit.M{"cidrs": []string{"127.0.0.2"}}}),
				route("second", testkit.M{"port": testkit.M{"ports": []any{port + 1}}, "client_cidr": testkit.M{"cidrs": []string{"127.0.0.0/8"}}}),
			)
			run(t, testkit.Listener([]string{fmt.Sprintf("udp/0.0.0.0:%d-%d", port, port+2), fmt.Sprintf("tcp/[::]:%d-%d", port, port+2)}, append(list, route("rest", nil))...))
			for _, network := range []string{"udp", "tcp"} {
				for to, want := range map[string]string{
					fmt.Sprintf("127.0.0.1:%d", port): "first", fmt.Sprintf("127.0.0.2:%d", port+1): "second there",
					fmt.Sprintf("127.0.0.1:%d", port+1): "second", fmt.Sprintf("127.0.0.1:%d", port+2): "rest",
				} {
					if got := tell(t, network, to, []byte("hello, I say more than five bytes")); got != want {
						t.Errorf("%s %s: told %q, want %q", network, to, got, want)
					}
				}
			}
		})
	}
}
