package pool

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	own "github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// clientsOf are the clients of a listener's flows.
func clientsOf(name string) (list []string) {
	listener.Running().Flows(func(i *relay.Info) bool {
		if i.Path.Listener == name {
			list = append(list, i.Client.String()+" → "+i.Local.String())
		}
		return true
	})
	return list
}

// TestChainedTCP has two proxies in a row, of which the second believes the
// header of the first, and a backend that learns of the client what the first one
// knows: by the engine, and where handlers of others stand in between.
func TestChainedTCP(t *testing.T) {
	throttle := testkit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20}
	for _, version := range []string{"v1", "v2"} {
		for how, before := range map[string][]testkit.M{"engine": nil, "copied": {throttle}} {
			for _, hit := range []string{"127.0.0.3", "::1"} {
				t.Run(fmt.Sprint(version, " ", how, " ", hit), func(t *testing.T) {
					addr, heard := tellTCP(t)
					origin := testkit.Local(testkit.Port(t))
					edge := testkit.With(testkit.Pool(origin), testkit.M{"proxy_protocol": version})
					last := testkit.With(testkit.Pool(addr), testkit.M{"proxy_protocol": "v2"})
					run(t, testkit.App(testkit.M{
						"edge": testkit.ToPool("edge", "tcp/:0"),
						"origin": testkit.With(testkit.Listener([]string{"tcp/" + origin}, testkit.Route(append(before, testkit.M{"handler": "pool", "pool": "last"})...)),
							testkit.M{"accept_proxy": testkit.M{"from": testkit.A{"127.0.0.0/8"}, "require": true}}),
					}, testkit.M{"edge": edge, "last": last}))
					to := netip.AddrPortFrom(netip.MustParseAddr(hit), proxy.Running().Listening("edge")[0].Addr.Port())
					c, err := net.Dial("tcp", to.String())
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					c.SetDeadline(time.Now().Add(testkit.Long))
					if how == "copied" { // the throttle waits for bytes
						io.WriteString(c, forged)
					}
					buf := make([]byte, len("welcome"))
					if _, err := io.ReadFull(c, buf); err != nil {
						t.Fatal(err)
					}
					if got, want := fmt.Sprint(clientsOf("origin")), fmt.Sprintf("[%v → %v]", c.LocalAddr(), to); got != want {
						t.Errorf("the second proxy has %s, want %s", got, want)
					}
					if how == "engine" {
						io.WriteString(c, forged)
					}
					c.(*net.TCPConn).CloseWrite()
					if b, err := io.ReadAll(c); string(b) != forged || err != nil {
						t.Errorf("got %q, %v back", b, err)
					}
					if got := <-heard; got.err != nil || got.from != c.LocalAddr().String() || got.to != to.String() || got.text != forged {
						t.Errorf("heard %+v, want %v to %v and %q", got, c.LocalAddr(), to, forged)
					}
				})
			}
		}
	}
}

// TestChainedUDP is the same for datagrams: the backend learns of the client
// behind both, and its answers come back through both.
func TestChainedUDP(t *testing.T) {
	for _, tc := range []struct{ version, mode string }{{"v2-udp", "first"}, {"v2-udp", "until_reply"}, {"v2-udp", "every"}, {"spp", ""}} {
		t.Run(fmt.Sprint(tc.version, " ", tc.mode), func(t *testing.T) {
			backend, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			if err != nil {
				t.Fatal(err)
			}
			defer backend.Close()
			origin := testkit.Local(testkit.Port(t))
			edge := testkit.With(testkit.Pool(origin), testkit.M{"proxy_protocol": tc.version})
			if tc.mode != "" {
				edge["proxy_protocol_udp"] = tc.mode
			}
			last := testkit.With(testkit.Pool(backend.LocalAddr().String()), testkit.M{"proxy_protocol": "v2-udp", "proxy_protocol_udp": "every"})
			name := "edge-" + tc.version + "-" + tc.mode
			run(t, testkit.App(testkit.M{
				name: testkit.ToPool("edge", "udp/0.0.0.0:0"),
				"origin-udp": testkit.With(testkit.ToPool("last", "udp/"+origin),
					testkit.M{"accept_proxy": testkit.M{"from": testkit.A{"127.0.0.0/8"}, "require": true}}),
			}, testkit.M{"edge": edge, "last": last}))
			to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.3"), proxy.Running().Listening(name)[0].Addr.Port())
			c, err := net.Dial("udp", to.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(testkit.Long))
			backend.SetDeadline(time.Now().Add(testkit.Long))
			buf := make([]byte, 2048)
			for i, text := range []string{"hello", "", forged, "\x56\xec and more"} {
				io.WriteString(c, text)
				n, from, err := backend.ReadFromUDPAddrPort(buf)
				if err != nil {
					t.Fatal(err)
				}
				h, at, err := own.ReadDatagram(buf[:n])
				if err != nil || h.Client.String() != c.LocalAddr().String() || h.Dest != to || string(buf[at:n]) != text {
					t.Errorf("datagram %d is %q of %v to %v, %v; want %q of %v to %v", i, buf[at:n], h.Client, h.Dest, err, text, c.LocalAddr(), to)
				}
				backend.WriteToUDPAddrPort([]byte("answer"), from)
				if n, err = c.Read(buf); err != nil || string(buf[:n]) != "answer" {
					t.Fatalf("answer %q, %v", buf[:n], err)
				}
			}
			if got, want := clientsOf("origin-udp"), fmt.Sprintf("%v → %v", c.LocalAddr(), to); !slices.Contains(got, want) {
				t.Errorf("the second proxy has %q, want %q among them", got, want)
			}
		})
	}
}
