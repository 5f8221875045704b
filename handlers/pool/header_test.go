package pool

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	proxyproto "github.com/pires/go-proxyproto"

	own "github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// forged is what a client sends that would like to be somebody else.
const forged = "PROXY TCP4 6.6.6.6 6.6.6.6 6 6\r\n"

// told is what a backend has heard of a connection.
type told struct {
	from, to string
	id       string
	text     string // the client's
	err      error
}

// tellTCP starts a backend that reads PROXY headers. It speaks first, and once
// the client has ended its side says again what that has sent.
func tellTCP(t *testing.T) (string, chan told) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan told, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.SetDeadline(time.Now().Add(testkit.Long))
			in := bufio.NewReader(c)
			h, err := proxyproto.Read(in) // before a byte of the client
			var s told
			if s.err = err; err == nil {
				s.from, s.to = h.SourceAddr.String(), h.DestinationAddr.String()
				fields, _ := h.TLVs()
				for _, f := range fields {
					if f.Type == proxyproto.PP2_TYPE_UNIQUE_ID {
						s.id = string(f.Value)
					}
				}
				io.WriteString(c, "welcome")
				b, _ := io.ReadAll(in)
				s.text = string(b)
				c.Write(b)
			}
			c.Close()
			heard <- s
		}
	}()
	t.Cleanup(func() { ln.Close(); <-done })
	return ln.Addr().String(), heard
}

// TestHeadersTCP: a backend learns the client and the address it has hit, on a
// wildcard too, before anything of the client and also when it speaks first;
// what a client forges is payload. The half-closes go through.
func TestHeadersTCP(t *testing.T) {
	for _, version := range []string{"v1", "v2"} {
		for how, before := range map[string][]testkit.M{"engine": nil, "copied": {testkit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20}}} {
			for _, hit := range []string{"127.0.0.3", "::1"} {
				t.Run(fmt.Sprint(version, " ", how, " ", hit), func(t *testing.T) {
					addr, heard := tellTCP(t)
					name := "told-" + version
					p := testkit.Pool(addr)
					p["proxy_protocol"] = version
					if version == "v2" {
						p["proxy_protocol_tlvs"] = testkit.A{"unique_id", "crc32c"}
					}
					run(t, testkit.App(testkit.M{name: testkit.Listener([]string{"tcp/:0"}, testkit.Route(append(before, testkit.M{"handler": "pool", "pool": "p"})...))},
						testkit.M{"p": p}))
					port := proxy.Running().Listening(name)[0].Addr.Port()
					to := netip.AddrPortFrom(netip.MustParseAddr(hit), port)
					c, err := net.Dial("tcp", to.String())
					if err != nil {
						t.Fatal(err)
					}
					defer c.Close()
					c.SetDeadline(time.Now().Add(testkit.Long))
					if how == "copied" { // the throttle waits for nothing, matchers neither
						io.WriteString(c, forged)
					}
					buf := make([]byte, len("welcome"))
					if _, err := io.ReadFull(c, buf); err != nil {
						t.Fatal(err)
					}
					var id string
					listener.Running().Flows(func(i *relay.Info) bool {
						if i.Client.String() == c.LocalAddr().String() && !i.ID.UDP() {
							id = i.ID.String()
						}
						return true
					})
					if how == "engine" {
						io.WriteString(c, forged)
					}
					c.(*net.TCPConn).CloseWrite()
					if b, err := io.ReadAll(c); string(b) != forged || err != nil {
						t.Errorf("got %q, %v back", b, err)
					}
					got := <-heard
					if got.err != nil || got.from != c.LocalAddr().String() || got.to != to.String() || got.text != forged {
						t.Errorf("heard %+v, want %v to %v and %q", got, c.LocalAddr(), to, forged)
					}
					if version == "v2" && got.id != id {
						t.Errorf("the ID is %q, want %q", got.id, id)
					}
				})
			}
		}
	}
}

// TestHeadersUDP is the same for datagrams, by the engine and copied.
func TestHeadersUDP(t *testing.T) {
	for _, tc := range []struct{ version, mode, want string }{
		{"v2-udp", "", "hh--"}, {"v2-udp", "first", "h---"}, {"v2-udp", "every", "hhhh"}, {"spp", "", "hhhh"},
	} {
		for how, before := range map[string][]testkit.M{"engine": nil, "copied": {testkit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20}}} {
			t.Run(fmt.Sprint(tc.version, " ", tc.mode, " ", how), func(t *testing.T) {
				backend, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
				if err != nil {
					t.Fatal(err)
				}
				defer backend.Close()
				p := testkit.Pool(backend.LocalAddr().String())
				p["proxy_protocol"] = tc.version
				if tc.mode != "" {
					p["proxy_protocol_udp"] = tc.mode
				}
				run(t, testkit.App(testkit.M{"told-udp": testkit.Listener([]string{"udp/0.0.0.0:0"}, testkit.Route(append(before, testkit.M{"handler": "pool", "pool": "p"})...))},
					testkit.M{"p": p}))
				to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.3"), proxy.Running().Listening("told-udp")[0].Addr.Port())
				c, err := net.Dial("udp", to.String())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				c.SetDeadline(time.Now().Add(testkit.Long))
				backend.SetDeadline(time.Now().Add(testkit.Long))
				buf := make([]byte, 2048)
				for i, mark := range tc.want {
					text := strings.Repeat("x", 100*i)
					io.WriteString(c, text)
					n, from, err := backend.ReadFromUDPAddrPort(buf)
					if err != nil {
						t.Fatal(err)
					}
					h, at, err := own.ReadDatagram(buf[:n])
					if (err == nil) != (mark == 'h') || string(buf[at:n]) != text {
						t.Errorf("datagram %d: %q, %v", i, buf[:n], err)
					}
					if err == nil && (h.Client.String() != c.LocalAddr().String() || h.Dest != to) {
						t.Errorf("datagram %d is of %v to %v, want %v to %v", i, h.Client, h.Dest, c.LocalAddr(), to)
					}
					if i == 0 {
						continue
					}
					backend.WriteToUDPAddrPort(append(append([]byte(nil), buf[:at*btoi(tc.version == "spp")]...), "answer"...), from)
					if n, err = c.Read(buf); err != nil || string(buf[:n]) != "answer" {
						t.Fatalf("answer %q, %v", buf[:n], err)
					}
				}
			})
		}
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// TestHeadersMisfit: a header that is not for the flows of a listener is refused,
// and the error says where it is.
func TestHeadersMisfit(t *testing.T) {
	for bind, versions := range map[string][]string{"tcp": {"v2-udp", "spp"}, "udp": {"v1", "v2"}} {
		for _, version := range versions {
			p := testkit.Pool("127.0.0.1:1")
			p["proxy_protocol"] = version
			app := testkit.App(testkit.M{"l": testkit.Listener([]string{bind + "/127.0.0.1:0"}, testkit.Route(testkit.M{"handler": "pool", "pool": "p"}))}, testkit.M{"p": p})
			app["admin"] = testkit.M{"disabled": true}
			b, err := json.Marshal(app)
			if err != nil {
				t.Fatal(err)
			}
			var cfg *caddy.Config
			if err := json.Unmarshal(b, &cfg); err != nil {
				t.Fatal(err)
			}
			if err := caddy.Validate(cfg); err == nil || !strings.Contains(err.Error(), "pools.p.proxy_protocol: "+version) {
				t.Errorf("%s on %s: %v", version, bind, err)
			}
		}
	}
}
