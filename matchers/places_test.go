package matchers_test

import (
	"encoding/json"
	"fmt"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// packets are the segments or datagrams of the case of that name.
func packets(t *testing.T, id string) [][]byte {
	t.Helper()
	c := firstpackets.One(t, id)
	return c.Data(t)
}

// A QUIC hello over two datagrams: by then it is QUIC, but its name is not
// known. Only routes that want the name wait for it.
func TestHelloInTwoDatagrams(t *testing.T) {
	both := packets(t, "quic-pq-2-v1")
	named, any := route("named", sniffer("quic", "pq-quic.example.com")), route("any", sniffer("quic"))
	sni := route("sni", testkit.M{"sni": testkit.M{"host": []string{"*.example.com"}}})
	for name, tc := range map[string]struct {
		routes    []testkit.M
		datagrams [][]byte
		want      string
	}{
		"the name is wanted":        {[]testkit.M{named, any}, both, "named"},
		"the name is not wanted":    {[]testkit.M{any, named}, both[:1], "any"},
		"another is":                {[]testkit.M{route("other", sniffer("quic", "other.example")), any}, both, "any"},
		"by sni":                    {[]testkit.M{sni, any}, both, "sni"},
		"turned round":              {[]testkit.M{sni, any}, [][]byte{both[1], both[0]}, "sni"},
		"sni waits before the rest": {[]testkit.M{sni, route("rest", nil)}, both, "sni"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tell(t, "udp", load(t, "udp", patient, tc.routes...), tc.datagrams...); got != tc.want {
				t.Errorf("told %q, want %q", got, tc.want)
			}
		})
	}
}

// The first sniffer that recognises a flow is its only one, wherever the routes
// that name the others stand.
func TestFirstSnifferWins(t *testing.T) {
	goldsrc := packets(t, "srccon-goldsrc-connect")[0]
	ours := testkit.M{"sniffers": testkit.M{"native": testkit.M{"ours": testkit.M{"sniffer": "regex_first_bytes", "pattern": "key:g|hex:ffffffff"}}}}
	for name, tc := range map[string]struct {
		routes []testkit.M
		want   string
	}{
		"quake3 first":        {[]testkit.M{route("quake3 host", sniffer("quake3", "h.example")), route("ours", sniffer("ours")), route("rest", nil)}, "rest"},
		"ours first":          {[]testkit.M{route("ours host", sniffer("ours", "h.example")), route("quake3", sniffer("quake3")), route("ours", sniffer("ours"))}, "ours"},
		"with its key":        {[]testkit.M{route("g", testkit.M{"sniffer": testkit.M{"name": "ours", "key": []string{"f", "g"}}})}, "g"},
		"two sets of a route": {[]testkit.M{testkit.With(route("either", nil), testkit.M{"match": []testkit.M{sniffer("a2s"), sniffer("ours")}}), route("rest", nil)}, "either"},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, testkit.Listener([]string{"udp/127.0.0.1:0"}, tc.routes...), ours)
			if got := tell(t, "udp", listening(), goldsrc); got != tc.want {
				t.Errorf("told %q, want %q", got, tc.want)
			}
		})
	}
}

// Behind a handler that has taken bytes away the matchers see what is left.
func TestBehindAHandler(t *testing.T) {
	strip := testkit.Match(testkit.M{"proxy_protocol": testkit.M{}}, testkit.M{"handler": "proxy_protocol"})
	for name, routes := range map[string][]testkit.M{
		"alone":                         {strip, route("survival", sniffer("minecraft", "survival.example.net")), route("rest", nil)},
		"that was asked about before":   {route("early", sniffer("minecraft")), strip, route("survival", sniffer("minecraft", "survival.example.net")), route("rest", nil)},
		"that is wanted by first_bytes": {strip, route("survival", testkit.M{"first_bytes": testkit.M{"prefix": "ascii:survival", "offset": 5}}), route("rest", nil)},
	} {
		t.Run(name, func(t *testing.T) {
			to := load(t, "tcp", patient, routes...)
			header, hello := []byte("PROXY TCP4 192.0.2.1 192.0.2.2 5000 25565\r\n"), packets(t, "mc-1.12.2-status")[0]
			for cut := 1; cut < len(hello); cut += 9 {
				if got := tell(t, "tcp", to, append(header, hello[:cut]...), hello[cut:]); got != "survival" {
					t.Errorf("cut at %d: told %q", cut, got)
				}
			}
		})
	}
}

// The matchers work in a server of caddy-l4, too.
func TestLayer4Server(t *testing.T) {
	port := testkit.Port(t)
	listen := []string{fmt.Sprintf("tcp/127.0.0.1:%d", port), fmt.Sprintf("udp/127.0.0.1:%d", port)}
	cfg, err := json.Marshal(testkit.M{
		"admin": testkit.M{"disabled": true, "config": testkit.M{"persist": false}},
		"apps": testkit.M{"layer4": testkit.M{"servers": testkit.M{"s": testkit.M{"listen": listen, "matching_timeout": "1m", "routes": []testkit.M{
			route("stranger", testkit.M{"client_cidr": testkit.M{"cidrs": []string{"192.0.2.0/24"}}}),
			route("port and dst", testkit.M{"port": testkit.M{"ports": []int{port}}, "dst": testkit.M{"cidrs": []string{"127.0.0.1"}}, "first_bytes": testkit.M{"prefix": "ascii:PORT"}}),
			route("sni", testkit.M{"sni": testkit.M{"host": []string{"*.example.com"}}}),
			route("minecraft", sniffer("minecraft", "survival.example.net")),
			route("a2s", sniffer("a2s")),
			route("quic", sniffer("quic", "h3.example.com")),
		}}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(cfg, true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { caddy.Stop() })
	to := fmt.Sprintf("127.0.0.1:%d", port)
	for _, tc := range []struct {
		network string
		pieces  [][]byte
		want    string
	}{
		{"tcp", [][]byte{[]byte("PORT please")}, "port and dst"},
		{"tcp", packets(t, "tls-go13"), "sni"},
		{"tcp", packets(t, "mc-1.12.2-status"), "minecraft"},
		{"udp", packets(t, "a2s-player"), "a2s"},
		{"udp", packets(t, "quic-v1-quicgo"), "sni"},
	} {
		if got := tell(t, tc.network, to, tc.pieces...); got != tc.want {
			t.Errorf("%s % .20x…: told %q, want %q", tc.network, tc.pieces[0], got, tc.want)
		}
	}
}
