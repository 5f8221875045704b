package listener_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	wayhouse "github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// answering is a UDP backend that says again what it gets.
func answering(t *testing.T) string {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 2048)
		for {
			n, from, err := pc.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				pc.WriteTo(append([]byte("yes:"), buf[:n]...), from)
			}
		}
	}()
	t.Cleanup(func() { pc.Close(); <-done })
	return pc.LocalAddr().String()
}

// behindUDP is behind for datagrams, on a port that no other test has: one that
// the kernel chooses is kept for the next listener of the name, with its sessions.
func behindUDP(t *testing.T, backend, proxied, extra, match string) string {
	at := fmt.Sprintf("udp/127.0.0.1:%d", ports(t, 1)[0])
	return `{"shutdown_grace": "0s", ` + strings.Replace(behind(backend, proxied, extra, match), "tcp/127.0.0.1:0", at, 1)[1:]
}

// noAnswer wants none, to what has been dealt with by now.
func noAnswer(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if n, err := c.Read(make([]byte, 2048)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d bytes, %v; want silence", n, err)
	}
	c.SetReadDeadline(time.Now().Add(testkit.Long))
}

// headerDrops are the datagrams of the listener l that were dropped for their
// header.
func headerDrops() (n uint64) {
	for i := range wayhouse.CountersOf("l") {
		n += wayhouse.CountersOf("l")[i].Dropped[relay.ProxyHeader].Load()
	}
	return n
}

// TestDatagramHeaderIn: a session is the client's that a header names, to the
// list, the filters, the routes and the counts, and who is not believed is not.
func TestDatagramHeaderIn(t *testing.T) {
	spp := told(proxyproto.SPP, client4, local4)
	v2 := told(proxyproto.V2UDP, client4, local4)
	for name, tc := range map[string]struct {
		from, head    string
		options       string // of accept_proxy
		client, local string // "": the socket's
		dropped       bool
		result        string
	}{
		"v2":                   {from: "127.0.0.2", head: v2, client: client4, local: local4, result: "client"},
		"v2, IPv6":             {from: "127.0.0.2", head: told(proxyproto.V2UDP, client6, local6), client: client6, local: local6, result: "client"},
		"v2, IPv4 as IPv6":     {from: "127.0.0.2", head: raw(0x21, 0x22, v4as6), client: client4, local: local4, result: "client"},
		"v2, no destination":   {from: "127.0.0.2", head: told(proxyproto.V2UDP, client4, "0.0.0.0:0"), client: client4, result: "client"},
		"spp":                  {from: "127.0.0.2", head: spp, client: client4, local: local4, result: "client"},
		"local, required":      {from: "127.0.0.2", head: raw(0x20, 0x00, ""), options: `, "require": true`, result: "own"},
		"unspec":               {from: "127.0.0.2", head: raw(0x21, 0x00, ""), result: "own"},
		"none":                 {from: "127.0.0.2", result: "own"},
		"none, required":       {from: "127.0.0.2", options: `, "require": true`, dropped: true},
		"v2 of streams":        {from: "127.0.0.2", head: raw(0x21, 0x11, v4), dropped: true},
		"stranger":             {from: "127.0.0.3", head: v2},
		"stranger with spp":    {from: "127.0.0.3", head: spp},
		"stranger, required":   {from: "127.0.0.3", head: v2, options: `, "require": true`, dropped: true},
		"stranger, in silence": {from: "127.0.0.3", options: `, "require": true`, dropped: true},
	} {
		for routes, match := range map[string]string{"bytes": `{"regexp": {"pattern": "hello", "count": 5}}`, "none": `{}`} {
			t.Run(name+", "+routes, func(t *testing.T) {
				if tc.result == "" && !tc.dropped && routes == "bytes" {
					match = `{}` // the header is its payload
				}
				load(t, behindUDP(t, answering(t), tc.options, ``, match))
				testkit.Settles(t, "what the test before has left", 0, func() int64 { return flow.ListenerOf("l").Sessions.Load() })
				count := func() (n float64) {
					for _, r := range []string{"client", "own"} {
						if v := testutil.ToFloat64(wayhouse.HeadersRead("l", r)); r == tc.result {
							n += v
						} else {
							n -= v
						}
					}
					return n
				}
				before, dropped := count(), headerDrops()
				c := dialFrom(t, "udp", tc.from, addr(t, "l"))
				send(t, c, tc.head+"hello")
				if tc.dropped {
					testkit.Settles(t, "what is dropped", dropped+1, headerDrops)
					noAnswer(t, c)
					return
				}
				want := "yes:hello"
				switch {
				case tc.head == spp && tc.result != "":
					want = spp + want
				case tc.result == "":
					want = "yes:" + tc.head + "hello"
				}
				expect(t, c, want)
				client, local := tc.client, tc.local
				if client == "" {
					client = c.LocalAddr().String()
				}
				if local == "" {
					local = c.RemoteAddr().String()
				}
				f := flows()
				if len(f) != 1 || f[0].Client.String() != client || f[0].Local.String() != local {
					t.Errorf("%+v, want %s → %s", f, client, local)
				}
				if n, _ := flow.ListenerOf("l").Live(netip.MustParseAddrPort(client).Addr()); n != 1 {
					t.Errorf("%d flows are the client's", n)
				}
				if n := count() - before; tc.result != "" && n != 1 || tc.result == "" && n != 0 {
					t.Errorf("%v are counted as %s", n, tc.result)
				}
			})
		}
	}
}

// TestDatagramHeaderIsSeen: many clients by one socket of a balancer, of whom
// filters and matchers judge each by its own address, in any notation.
func TestDatagramHeaderIsSeen(t *testing.T) {
	for name, tc := range map[string]struct{ options, match, rule string }{
		"acl":         {options: `"filters": [{"filter": "acl", "deny": ["203.0.113.0/24"]}],`, rule: "acl"},
		"rate_limit":  {options: `"filters": [{"filter": "rate_limit", "per_ip": {"rate": 1, "burst": 1}}],`, rule: "rate_ip"},
		"client_cidr": {match: `{"client_cidr": {"cidrs": ["198.18.0.0/24"]}}`},
		"dst":         {match: `{"dst": {"cidrs": ["192.0.2.1"]}}`},
	} {
		for notation, head := range map[string]string{
			"spp": told(proxyproto.SPP, client4, local4), "v2": raw(0x21, 0x12, v4), "v2, mapped": raw(0x21, 0x22, v4as6),
			"spp, compatible": "\x56\xec" + strings.Repeat("\x00", 12) + v4[:4] + strings.Repeat("\x00", 12) + v4[4:8] + v4[8:],
		} {
			t.Run(name+", "+notation, func(t *testing.T) {
				match := tc.match
				if match == "" {
					match = `{}`
				}
				load(t, behindUDP(t, answering(t), ``, tc.options, match))
				c := dialFrom(t, "udp", "127.0.0.2", addr(t, "l"))
				if tc.rule == "rate_ip" { // whose one is spent by another session
					spent := dialFrom(t, "udp", "127.0.0.2", addr(t, "l"))
					send(t, spent, told(proxyproto.SPP, "203.0.113.7:9", local4)+"x")
					expect(t, spent, told(proxyproto.SPP, "203.0.113.7:9", local4)+"yes:x")
				}
				refused := func() float64 {
					if tc.rule == "" {
						return 0
					}
					return testutil.ToFloat64(flow.ListenerOf("l").Rule(tc.rule).Counter())
				}
				before := refused()
				send(t, c, head+"x")
				other := told(proxyproto.SPP, "198.18.0.9:1", "192.0.2.1:1")
				if !strings.HasPrefix(notation, "spp") { // one socket is of one kind
					c = dialFrom(t, "udp", "127.0.0.2", addr(t, "l"))
				}
				send(t, c, other+"x")
				expect(t, c, other+"yes:x") // and nothing before it
				if tc.rule != "" {
					testkit.Settles(t, "what is refused by "+tc.rule, before+1, refused)
				}
			})
		}
	}
}

// TestDatagramHeaderInPrefix: a prefix is about the address that a datagram has
// come to, not about the one that a header tells.
func TestDatagramHeaderInPrefix(t *testing.T) {
	app := strings.Replace(behindUDP(t, answering(t), ``, `"prefix": "127.1.0.0/16",`, `{}`), "udp/127.0.0.1", "udp/0.0.0.0", 1)
	load(t, app)
	_, port, _ := net.SplitHostPort(addr(t, "l"))
	outside := func() (n uint64) {
		cs := wayhouse.CountersOf("l")
		for i := range cs {
			n += cs[i].Dropped[relay.OutsidePrefix].Load()
		}
		return n
	}
	before := outside()
	for hit, inside := range map[string]bool{"127.1.0.1": true, "127.2.0.1": false} {
		c := dialFrom(t, "udp", "127.0.0.2", net.JoinHostPort(hit, port))
		send(t, c, told(proxyproto.V2UDP, client4, "127.1.0.9:1")+"x")
		if inside {
			expect(t, c, "yes:x")
			d := dialFrom(t, "udp", "127.0.0.2", net.JoinHostPort(hit, port))
			send(t, d, told(proxyproto.V2UDP, client4, local4)+"x")
			expect(t, d, "yes:x")
		} else {
			testkit.Settles(t, "what is outside", before+1, outside)
		}
	}
}

// TestDatagramHeaderForServers: a server on wayhouse/NAME has the client of the
// header for the sender, and its answer goes back by the balancer.
func TestDatagramHeaderForServers(t *testing.T) {
	load(t, `{"listeners": {"l": {"bind": ["udp/127.0.0.1:0"], "accept_proxy": {"from": ["127.0.0.2"], "require": true}}}}`)
	pc := listenOn(t, "l").(net.PacketConn)
	defer pc.Close()
	for _, v := range []proxyproto.Version{proxyproto.V2UDP, proxyproto.SPP} {
		c := dialFrom(t, "udp", "127.0.0.2", addr(t, "l"))
		head := told(v, client4, local4)
		send(t, c, head+"hello")
		buf := make([]byte, 2048)
		n, from, err := pc.ReadFrom(buf)
		if err != nil || string(buf[:n]) != "hello" || from.String() != client4 {
			t.Fatalf("%v: read %q of %v, %v", v, buf[:n], from, err)
		}
		if _, err := pc.WriteTo([]byte("answer"), from); err != nil {
			t.Fatal(err)
		}
		want := "answer"
		if v == proxyproto.SPP {
			want = head + want
		}
		expect(t, c, want)
	}
}

// TestDatagramHeaderOverReloads: sessions go on as what they have begun as, and
// new ones are what the new config says.
func TestDatagramHeaderOverReloads(t *testing.T) {
	backend, port := answering(t), ports(t, 1)[0]
	config := func(option string) string {
		return `{"shutdown_grace": "0s", "listeners": {"l": ` + listener(fmt.Sprintf("udp/127.0.0.1:%d", port), option, `"routes": [`+pooled(`{}`, backend)+`]`) + `}}`
	}
	const on = `"accept_proxy": {"from": ["127.0.0.2"]},`
	at, head := fmt.Sprintf("127.0.0.1:%d", port), told(proxyproto.V2UDP, client4, local4)
	ask := func(c net.Conn, p, want string) {
		t.Helper()
		send(t, c, p)
		expect(t, c, "yes:"+want)
	}
	load(t, config(``))
	plain := dialFrom(t, "udp", "127.0.0.2", at)
	ask(plain, head+"x", head+"x")
	load(t, config(on))
	headed := dialFrom(t, "udp", "127.0.0.2", at)
	ask(headed, head+"x", "x")
	ask(plain, head+"x", head+"x")
	load(t, config(``))
	ask(headed, head+"y", "y")
	late := dialFrom(t, "udp", "127.0.0.2", at)
	ask(late, head+"x", head+"x")
	load(t, config(strings.Replace(on, "127.0.0.2", "127.0.0.3", 1)))
	ask(dialFrom(t, "udp", "127.0.0.3", at), head+"x", "x")
	for _, c := range []net.Conn{plain, headed, late} {
		ask(c, "still", "still")
	}
}

// TestDatagramHeaderExplained asks what becomes of datagrams of peers.
func TestDatagramHeaderExplained(t *testing.T) {
	spp := told(proxyproto.SPP, client4, local4)
	for name, tc := range map[string]struct {
		src     string
		pieces  []string
		require bool
		end     string
		step    string
	}{
		"v2":                    {src: "127.0.0.2:1", pieces: []string{told(proxyproto.V2UDP, client4, local4) + "hello"}, end: wayhouse.EndPool, step: "the client is 203.0.113.7:51303 and has hit 198.51.100.2:25565"},
		"spp":                   {src: "127.0.0.2:1", pieces: []string{spp + "hel", spp + "lo"}, end: wayhouse.EndPool, step: "the client is 203.0.113.7:51303"},
		"local":                 {src: "127.0.0.2:1", pieces: []string{raw(0x20, 0, "") + "hello"}, require: true, end: wayhouse.EndNoRoute, step: "its own"},
		"none":                  {src: "127.0.0.2:1", pieces: []string{"hello"}, end: wayhouse.EndNoRoute, step: "sends no header"},
		"none, required":        {src: "127.0.0.2:1", pieces: []string{"hello"}, require: true, end: wayhouse.EndHeader, step: "missing or wrong"},
		"of streams":            {src: "127.0.0.2:1", pieces: []string{told(proxyproto.V2, client4, local4) + "hello"}, end: wayhouse.EndHeader, step: "missing or wrong"},
		"not trusted":           {src: "203.0.113.7:1", pieces: []string{"hello"}, end: wayhouse.EndPool, step: "is not in accept_proxy.from"},
		"not trusted, required": {src: "203.0.113.7:1", pieces: []string{spp + "hello"}, require: true, end: wayhouse.EndHeader, step: "is not in accept_proxy.from"},
	} {
		t.Run(name, func(t *testing.T) {
			load(t, behindUDP(t, "127.0.0.1:9", fmt.Sprintf(`, "require": %v`, tc.require), ``, `{"client_cidr": {"cidrs": ["203.0.113.0/24"]}, "regexp": {"pattern": "hello", "count": 5}}`))
			q := wayhouse.Question{UDP: true, Client: netip.MustParseAddrPort(tc.src), Final: true}
			for _, p := range tc.pieces {
				q.Pieces = append(q.Pieces, []byte(p))
			}
			e, err := proxy.Running().Listeners["l"].Explain(q)
			if err != nil || e.End.What != tc.end || len(e.Steps) == 0 || e.Steps[0].Kind != "header" || !strings.Contains(e.Steps[0].Reason, tc.step) {
				t.Errorf("%+v, %v, want the end %s", e, err, tc.end)
			}
		})
	}
}
