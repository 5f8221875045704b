package listener_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/clientcidr"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/dst"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	wayhouse "github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// told is a header as our own writer makes it.
func told(version proxyproto.Version, client, local string) string {
	f := proxyproto.Form{Version: version, CRC: version == proxyproto.V2}
	return string(f.Append(nil, &proxyproto.Flow{Client: netip.MustParseAddrPort(client), Local: netip.MustParseAddrPort(local)}))
}

// raw is a header of version 2 with whatever is in it.
func raw(cmd, family byte, rest string) string {
	return "\r\n\r\n\x00\r\nQUIT\n" + string([]byte{cmd, family, byte(len(rest) >> 8), byte(len(rest))}) + rest
}

const (
	v4      = "\xcb\x00\x71\x07\xc6\x33\x64\x02\xc8\x67\x63\xdd" // 203.0.113.7:51303 → 198.51.100.2:25565
	mapped  = "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff"
	v4as6   = mapped + "\xcb\x00\x71\x07" + mapped + "\xc6\x33\x64\x02" + "\xc8\x67\x63\xdd"
	client4 = "203.0.113.7:51303"
	local4  = "198.51.100.2:25565"
	client6 = "[2001:db8::7]:51303"
	local6  = "[2001:db8::2]:25565"
)

// behind is a listener that believes 127.0.0.2, with a pool behind it.
func behind(backend, proxied, extra, match string) string {
	return `{"listeners": {"l": ` + listener("tcp/127.0.0.1:0", `"accept_proxy": {"from": ["127.0.0.2"]`+proxied+`}, `+extra, `"routes": [`+pooled(match, backend)+`]`) + `}}`
}

// dialFrom connects from one of the addresses of loopback.
func dialFrom(t *testing.T, network, ip, to string) net.Conn {
	t.Helper()
	from := netip.AddrPortFrom(netip.MustParseAddr(ip), 0)
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(from)}
	if network == "udp" {
		d.LocalAddr = net.UDPAddrFromAddrPort(from)
	}
	c, err := d.Dial(network, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(testkit.Long))
	return c
}

// flows are those of the listener l.
func flows() (list []relay.Info) {
	wayhouse.Running().Flows(func(i *relay.Info) bool {
		if i.Path.Listener == "l" {
			list = append(list, *i)
		}
		return true
	})
	return list
}

// TestHeaderIn has every kind of header in front of what a client sends, cut
// anywhere, for a route that needs bytes and for one that needs none.
func TestHeaderIn(t *testing.T) {
	long := "PROXY UNKNOWN " + strings.Repeat("x", 107-16) + "\r\n"
	for name, tc := range map[string]struct{ head, client, local string }{
		"v1, IPv4":              {told(proxyproto.V1, client4, local4), client4, local4},
		"v1, IPv6":              {told(proxyproto.V1, client6, local6), client6, local6},
		"v1, IPv4 as IPv6":      {"PROXY TCP6 ::ffff:203.0.113.7 ::ffff:198.51.100.2 51303 25565\r\n", client4, local4},
		"v1, no destination":    {"PROXY TCP4 203.0.113.7 0.0.0.0 51303 0\r\n", client4, ""},
		"v1, unknown":           {"PROXY UNKNOWN\r\n", "", ""},
		"v1, the longest":       {long, "", ""},
		"v2, IPv4":              {told(proxyproto.V2, client4, local4), client4, local4},
		"v2, IPv6":              {told(proxyproto.V2, client6, local6), client6, local6},
		"v2, IPv4 as IPv6":      {raw(0x21, 0x21, v4as6), client4, local4},
		"v2, fields":            {raw(0x21, 0x11, v4+"\x04\x00\x05abcde"), client4, local4},
		"v2, the longest":       {raw(0x21, 0x11, v4+"\x04\x01\xf9"+strings.Repeat("x", 505)), client4, local4},
		"v2, unspec":            {raw(0x21, 0x00, ""), "", ""},
		"v2, local":             {raw(0x20, 0x00, ""), "", ""},
		"v2, local with others": {raw(0x20, 0x11, v4), "", ""},
	} {
		for routes, match := range map[string]string{"bytes": `{"first_bytes": {"prefix": "ascii:hello"}}`, "none": `{}`} {
			t.Run(name+", "+routes, func(t *testing.T) {
				load(t, behind(greeter(t, "yes:"), "", `"peek": {"timeout": "1h"},`, match))
				all := tc.head + "hello there"
				cuts := []int{0, len(tc.head), len(tc.head) + 2, len(all)}
				if len(tc.head) < 70 {
					cuts = slices.Collect(func(yield func(int) bool) {
						for i := 0; i <= len(all) && yield(i); i++ {
						}
					})
				}
				for _, cut := range cuts {
					c := dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
					send(t, c, all[:cut])
					testkit.Eventually(t, "the connection", func() bool { return len(flows()) == 1 })
					flows() // the worker has seen the first piece by now
					send(t, c, all[cut:])
					expect(t, c, "yes:hello there")
					client, local := tc.client, tc.local
					if client == "" {
						client = c.LocalAddr().String()
					}
					if local == "" {
						local = c.RemoteAddr().String()
					}
					if f := flows(); len(f) != 1 || f[0].Client.String() != client || f[0].Local.String() != local || f[0].BytesC2S != uint64(len("hello there")) {
						t.Fatalf("cut at %d: %+v, want %s → %s", cut, f, client, local)
					}
					if f := flows()[0]; tc.client != "" {
						if n, _ := flow.ListenerOf("l").Live(netip.MustParseAddr("127.0.0.2")); n != 0 {
							t.Fatalf("%d flows are the balancer's", n)
						}
						if n, _ := flow.ListenerOf("l").Live(f.Client.Addr()); n != 1 {
							t.Fatalf("%d flows are the client's", n)
						}
					}
					c.Close()
					testkit.Settles(t, "the number of flows", 0, func() int64 { return flow.ListenerOf("l").Conns.Load() })
				}
			})
		}
	}
}

// TestHeaderRefused holds who is turned away, in silence and counted once, and
// who is served as an ordinary client although nothing is believed.
func TestHeaderRefused(t *testing.T) {
	const trusted, stranger = "127.0.0.2", "127.0.0.3"
	good := told(proxyproto.V1, client4, local4)
	wrong := []byte(told(proxyproto.V2, client4, local4))
	wrong[len(wrong)-1]++
	for name, tc := range map[string]struct {
		from, send string
		both       bool   // with and without require
		require    bool   // if not both
		end        bool   // the peer ends its side then
		want       string // what the backend gets, behind which it says "yes:"; "-": refused
		told       string // what a trusted peer is counted under
	}{
		"stranger with a header, required":    {from: stranger, send: good + "hi", require: true, want: "-"},
		"stranger with a header":              {from: stranger, send: good + "hi", want: good + "hi"},
		"stranger in silence, required":       {from: stranger, require: true, want: "-"},
		"no header, required":                 {from: trusted, send: "hello", require: true, want: "-"},
		"no header":                           {from: trusted, send: "hello", want: "hello", told: "none"},
		"hardly a header":                     {from: trusted, send: "PROXYjunk", want: "PROXYjunk", told: "none"},
		"silence, required":                   {from: trusted, require: true, want: "-"},
		"silence":                             {from: trusted, want: "", told: "none"},
		"the end in silence, required":        {from: trusted, end: true, require: true, want: "-"},
		"the end in silence":                  {from: trusted, end: true, want: "", told: "none"},
		"a part of v1":                        {from: trusted, send: good[:20], both: true, want: "-"},
		"a part of v2":                        {from: trusted, send: raw(0x21, 0x11, v4)[:20], both: true, want: "-"},
		"a part of the signature":             {from: trusted, send: "\r\n\r\n", both: true, want: "-"},
		"a part, and the end":                 {from: trusted, send: good[:20], end: true, both: true, want: "-"},
		"v1, too long":                        {from: trusted, send: "PROXY UNKNOWN " + strings.Repeat("x", 107-15) + "\r\n", both: true, want: "-"},
		"v1 that does not end":                {from: trusted, send: "PROXY UNKNOWN " + strings.Repeat("x", 200), both: true, want: "-"},
		"v1, no address":                      {from: trusted, send: "PROXY TCP4 1.2.3.4.5 6.7.8.9 1 2\r\nhi", both: true, want: "-"},
		"v2, too long":                        {from: trusted, send: raw(0x21, 0x11, v4+"\x04\x01\xfa"+strings.Repeat("x", 506)), both: true, want: "-"},
		"v2, another version":                 {from: trusted, send: raw(0x11, 0x11, v4) + "hi", both: true, want: "-"},
		"v2, of datagrams":                    {from: trusted, send: raw(0x21, 0x12, v4) + "hi", both: true, want: "-"},
		"v2, of Unix sockets":                 {from: trusted, send: raw(0x21, 0x31, strings.Repeat("\x00", 216)) + "hi", both: true, want: "-"},
		"v2, shorter than its addresses":      {from: trusted, send: raw(0x21, 0x21, v4) + "hi", both: true, want: "-"},
		"v2, a field beyond the end":          {from: trusted, send: raw(0x21, 0x11, v4+"\x04\x00\x05abc") + "hi", both: true, want: "-"},
		"v2, a wrong checksum":                {from: trusted, send: string(wrong) + "hi", both: true, want: "-"},
		"a client that nobody is":             {from: trusted, send: "PROXY TCP4 0.0.0.0 6.7.8.9 1 2\r\nhi", both: true, want: "-"},
		"a client that is many":               {from: trusted, send: "PROXY TCP6 ff02::1 2001:db8::1 1 2\r\nhi", both: true, want: "-"},
		"a header, and one more as a payload": {from: trusted, send: good + good + "hi", both: true, want: good + "hi", told: "client"},
		"its own, and required":               {from: trusted, send: "PROXY UNKNOWN\r\nhi", require: true, want: "hi", told: "own"},
	} {
		for _, require := range []bool{false, true} {
			if !tc.both && require != tc.require {
				continue
			}
			t.Run(fmt.Sprintf("%s, %v", name, require), func(t *testing.T) {
				load(t, behind(greeter(t, "yes:"), fmt.Sprintf(`, "require": %v, "timeout": "100ms"`, require), ``, `{}`))
				l := flow.ListenerOf("l")
				rule := func() float64 { return testutil.ToFloat64(l.Rule("proxy_header").Counter()) }
				count := func() (n float64) {
					if tc.told != "" {
						n = testutil.ToFloat64(wayhouse.HeadersRead("l", tc.told))
					}
					return n
				}
				refused, believed := rule(), count()
				c := dialFrom(t, "tcp", tc.from, addr(t, "l"))
				io.WriteString(c, tc.send) // who is refused may be reset by now
				if tc.end {
					c.(*net.TCPConn).CloseWrite()
				}
				if tc.want == "-" {
					expectClosed(t, c)
					testkit.Settles(t, "the count of proxy_header", refused+1, rule)
				} else {
					expect(t, c, "yes:"+tc.want)
					if n := rule() - refused; n != 0 {
						t.Errorf("%v are counted as refused", n)
					}
					if n := count() - believed; tc.told != "" && n != 1 {
						t.Errorf("%v are counted as %s", n, tc.told)
					}
				}
				c.Close()
				testkit.Settles(t, "the number of flows", 0, func() int64 { return l.Conns.Load() })
			})
		}
	}
}

// TestHeaderInTime: a header that drips is not waited for beyond its time, and
// what routes need has a time of its own from then on.
func TestHeaderInTime(t *testing.T) {
	head := told(proxyproto.V1, client4, local4)
	t.Run("dripped", func(t *testing.T) {
		load(t, behind(greeter(t, "yes:"), `, "timeout": "200ms"`, ``, `{}`))
		refused := testutil.ToFloat64(flow.ListenerOf("l").Rule("proxy_header").Counter())
		c := dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
		for i := 0; i < len(head)-1; i++ {
			if _, err := io.WriteString(c, head[i:i+1]); err != nil {
				break
			}
			testkit.Eventually(t, "the worker", func() bool { flows(); return true })
		}
		expectClosed(t, c)
		testkit.Settles(t, "the count of proxy_header", refused+1, func() float64 {
			return testutil.ToFloat64(flow.ListenerOf("l").Rule("proxy_header").Counter())
		})
	})
	t.Run("first bytes after it", func(t *testing.T) {
		const peek = `"peek": {"timeout": "2s"},`
		for who, tc := range map[string]struct{ match, first, rest string }{
			"worker":    {`{"first_bytes": {"prefix": "ascii:hello"}}`, "hel", "lo"},
			"goroutine": {`{"http": []}`, "GET / HT", "TP/1.0\r\n\r\n"},
		} {
			load(t, behind(greeter(t, "yes:"), `, "timeout": "1h"`, peek, tc.match))
			c := dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
			testkit.Eventually(t, "a wait that peek.timeout would have ended", func() bool {
				f := flows()
				return len(f) == 1 && f[0].Age > 2100*time.Millisecond
			})
			send(t, c, head+tc.first)
			flows() // the worker has seen it by now
			send(t, c, tc.rest)
			expect(t, c, "yes:"+tc.first+tc.rest)
			c.Close()
			c = dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
			send(t, c, head+tc.first)
			expectClosed(t, c) // by peek.timeout
			if t.Failed() {
				t.Fatal(who)
			}
		}
	})
}

// TestHeaderIsSeen holds that whatever looks at addresses sees those of the
// header, in each notation that it may have them in.
func TestHeaderIsSeen(t *testing.T) {
	const other = "198.18.0.9:1"
	compatible := "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	notations := map[string]string{
		"v1":                "PROXY TCP4 203.0.113.7 198.51.100.2 51303 25565\r\n",
		"v1, mapped":        "PROXY TCP6 ::ffff:203.0.113.7 ::ffff:198.51.100.2 51303 25565\r\n",
		"v1, mapped in hex": "PROXY TCP6 ::ffff:cb00:7107 ::ffff:c633:6402 51303 25565\r\n",
		"v1, compatible":    "PROXY TCP6 ::203.0.113.7 ::198.51.100.2 51303 25565\r\n",
		"v2":                raw(0x21, 0x11, v4),
		"v2, mapped":        raw(0x21, 0x21, v4as6),
		"v2, compatible":    raw(0x21, 0x21, compatible+v4[:4]+compatible+"\xc6\x33\x64\x02"+"\xc8\x67\x63\xdd"),
	}
	for name, tc := range map[string]struct {
		options, match string
		rule           string // by which the client is refused; "": only who has the other address is
		before         int    // connections that get in first
	}{
		"acl deny":     {options: `"filters": [{"filter": "acl", "deny": ["203.0.113.0/24"]}],`, rule: "acl"},
		"acl allow":    {options: `"filters": [{"filter": "acl", "allow": ["203.0.113.7"]}],`},
		"source_limit": {options: `"filters": [{"filter": "source_limit", "max_per_ip": 2}],`, rule: "src_conn_ip", before: 2},
		"rate_limit":   {options: `"filters": [{"filter": "rate_limit", "per_ip": {"rate": 1, "burst": 2}}],`, rule: "rate_ip", before: 2},
		"client_cidr":  {match: `{"client_cidr": {"cidrs": ["203.0.113.0/24"]}}`},
		"dst":          {match: `{"dst": {"cidrs": ["198.51.100.2"]}}`},
		"port":         {match: `{"port": {"ports": [25565]}}`},
		"remote_ip":    {match: `{"remote_ip": {"ranges": ["203.0.113.0/24"]}}`},
		"local_ip":     {match: `{"local_ip": {"ranges": ["198.51.100.0/24"]}}`},
	} {
		for notation, head := range notations {
			if strings.HasSuffix(name, "_ip") && strings.HasSuffix(notation, "compatible") {
				continue // of caddy-l4, which knows nothing of that
			}
			t.Run(name+", "+notation, func(t *testing.T) {
				if tc.match == "" {
					tc.match = `{}`
				}
				load(t, behind(greeter(t, "yes:"), "", tc.options, tc.match))
				testkit.Settles(t, "what the test before has left", 0, func() int64 { return flow.ListenerOf("l").Conns.Load() })
				blocked := func() float64 {
					return testutil.ToFloat64(flow.ListenerOf("l").Rule(tc.rule).Counter())
				}
				others := func(served bool) {
					t.Helper()
					c := dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
					send(t, c, told(proxyproto.V1, other, other)+"x")
					if served {
						expect(t, c, "yes:x")
					} else {
						expectClosed(t, c)
					}
				}
				ours := func(served bool) {
					t.Helper()
					c := dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
					send(t, c, head+"x")
					if served {
						expect(t, c, "yes:x")
					} else {
						expectClosed(t, c)
					}
				}
				for range tc.before {
					ours(true)
				}
				if tc.rule == "" {
					ours(true)
					others(false)
					return
				}
				before := blocked()
				ours(false)
				if n := blocked() - before; n != 1 {
					t.Errorf("%v are counted under %s", n, tc.rule)
				}
				others(true)
			})
		}
	}
}

// TestHeaderHolds: who waits for a header takes a place of the process, and of
// nobody else; operators see and end them.
func TestHeaderHolds(t *testing.T) {
	app := behind(greeter(t, "yes:"), `, "timeout": "1h"`, `"filters": [{"filter": "source_limit", "max_per_ip": 1}],`, `{}`)
	load(t, `{"limits": {"max_connections": 2}, `+app[1:])
	l := flow.ListenerOf("l")
	live := func(n int64) {
		t.Helper()
		testkit.Settles(t, "the number of flows", n, func() int64 { return l.Conns.Load() })
	}
	first, second := dialFrom(t, "tcp", "127.0.0.2", addr(t, "l")), dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
	live(2)
	full := testutil.ToFloat64(l.Rule("max_conn").Counter())
	expectClosed(t, dialFrom(t, "tcp", "127.0.0.2", addr(t, "l")))
	if n := testutil.ToFloat64(l.Rule("max_conn").Counter()) - full; n != 1 {
		t.Errorf("%v are counted under max_conn", n)
	}
	send(t, first, told(proxyproto.V1, client4, local4)+"x")
	expect(t, first, "yes:x")
	send(t, second, told(proxyproto.V1, client4, local4)+"x") // one too many of the client
	expectClosed(t, second)
	live(1)
	second = dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
	live(2)
	for _, i := range flows() {
		if i.Client.String() != second.LocalAddr().String() {
			continue
		}
		if i.Path.Route != -1 || !wayhouse.Running().CloseFlow(i.ID, relay.Admin) {
			t.Errorf("%+v cannot be closed", i)
		}
	}
	expectClosed(t, second)
	live(1)
	first.Close()
	live(0)
	for _, a := range []string{"203.0.113.7", "127.0.0.2"} {
		if n, _ := l.Live(netip.MustParseAddr(a)); n != 0 {
			t.Errorf("%d are left of %s", n, a)
		}
	}
}

// TestHeaderPanics: what panics over the addresses of a header costs that
// connection, and no place in the counts.
func TestHeaderPanics(t *testing.T) {
	for name, tc := range map[string]struct{ options, match string }{
		"filter":  {`"filters": [{"filter": "test_panics"}],`, `{}`},
		"matcher": {``, `{"test_panics_addr": {}}`},
		"bytes":   {``, `{"test_panics_flow": {}}`},
	} {
		t.Run(name, func(t *testing.T) {
			load(t, behind(greeter(t, "yes:"), ``, tc.options, tc.match))
			c := dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
			send(t, c, told(proxyproto.V1, client4, local4)+"panic")
			expectClosed(t, c)
			testkit.Settles(t, "the number of flows", 0, func() int64 { return flow.ListenerOf("l").Conns.Load() })
			if n, _ := flow.ListenerOf("l").Live(netip.MustParseAddr("203.0.113.7")); n != 0 {
				t.Errorf("%d flows are left of the client", n)
			}
		})
	}
}

// TestHeaderForServers: a server on wayhouse/NAME, and a handler that is not
// ours, find the addresses of the header on their connection.
func TestHeaderForServers(t *testing.T) {
	load(t, `{"listeners": {"l": {"bind": ["tcp/127.0.0.1:0"], "accept_proxy": {"from": ["127.0.0.2"]}}}}`,
		`"http": {"servers": {"main": {"listen": ["wayhouse/l"], "automatic_https": {"disable": true}, "protocols": ["h1"],
			"routes": [{"handle": [{"handler": "static_response", "body": "{http.request.remote} {http.request.local}"}]}]}}}`)
	for name, head := range map[string]string{"v1": told(proxyproto.V1, client4, local4), "v2": told(proxyproto.V2, client6, local6), "own": "PROXY UNKNOWN\r\n", "none": ""} {
		var c net.Conn
		client := &http.Client{Timeout: testkit.Long, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (net.Conn, error) {
			c = dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
			_, err := io.WriteString(c, head)
			return c, err
		}}}
		resp, err := client.Get("http://example.com/")
		if err != nil {
			t.Fatal(name, err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		want := c.LocalAddr().String() + " " + c.RemoteAddr().String()
		switch name {
		case "v1":
			want = client4 + " " + local4
		case "v2":
			want = client6 + " " + local6
		}
		if string(body) != want {
			t.Errorf("%s: %q, want %q", name, body, want)
		}
	}
}

// TestHeaderOverReloads adds and takes away accept_proxy, and moves the trust,
// while connections live; one that waits for its header goes by the config it
// came to.
func TestHeaderOverReloads(t *testing.T) {
	backend, port := greeter(t, "yes:"), ports(t, 1)[0]
	config := func(option string) string {
		return `{"listeners": {"l": ` + listener(fmt.Sprintf("tcp/127.0.0.1:%d", port), option, `"routes": [`+pooled(`{}`, backend)+`]`) + `}}`
	}
	const on = `"accept_proxy": {"from": ["127.0.0.2"], "timeout": "1h"},`
	at := fmt.Sprintf("127.0.0.1:%d", port)
	head := told(proxyproto.V1, client4, local4)
	load(t, config(``))
	plain := dialFrom(t, "tcp", "127.0.0.2", at)
	send(t, plain, head)
	expect(t, plain, "yes:"+head) // payload
	load(t, config(on))
	headed, waits := dialFrom(t, "tcp", "127.0.0.2", at), dialFrom(t, "tcp", "127.0.0.2", at)
	send(t, headed, head+"x")
	expect(t, headed, "yes:x")
	send(t, waits, head[:9])
	testkit.Eventually(t, "the connections", func() bool { return len(flows()) == 3 })
	load(t, config(strings.Replace(on, "127.0.0.2", "127.0.0.3", 1)))
	load(t, config(``))
	send(t, waits, head[9:]+"x")
	expect(t, waits, "yes:x")
	for _, c := range []net.Conn{plain, headed, waits} {
		send(t, c, "still")
		expect(t, c, "still")
	}
	if n := slices.IndexFunc(flows(), func(i relay.Info) bool { return i.Client.String() == client4 }); n < 0 {
		t.Errorf("no flow is the client's: %+v", flows())
	}
}

// TestHeaderedGoWithTheirAddress: connections whose address of ours is one that
// a header tells end, as others do, when their listener is gone.
func TestHeaderedGoWithTheirAddress(t *testing.T) {
	load(t, `{"shutdown_grace": "100ms", `+behind(greeter(t, "yes:"), ``, ``, `{}`)[1:])
	c := dialFrom(t, "tcp", "127.0.0.2", addr(t, "l"))
	send(t, c, told(proxyproto.V1, client4, local4)+"x")
	expect(t, c, "yes:x")
	load(t, `{"shutdown_grace": "100ms", "listeners": {"other": `+listener("tcp/127.0.0.1:0", ``, `"routes": [{"handle": [{"handler": "echo"}]}]`)+`}}`)
	expectClosed(t, c)
}

// TestHeaderAllocatesNothing holds what a header costs: of version 2 nothing
// that the collector has to find, of version 1 its line.
func TestHeaderAllocatesNothing(t *testing.T) {
	for routes, match := range map[string]string{"bytes": `{"first_bytes": {"prefix": "ascii:hello"}}`, "none": `{}`} {
		load(t, behind("127.0.0.1:9", ``, ``, match))
		at := netip.MustParseAddrPort(addr(t, "l"))
		a := wayhouse.AcceptorAt(at)
		o := new(tcprelay.Opening)
		first := []byte("hello")
		for head, most := range map[string]float64{told(proxyproto.V2, client4, local4): 0, told(proxyproto.V1, client6, local6): 1} {
			bytes := []byte(head + "hello")
			n := testing.AllocsPerRun(200, func() {
				*o = tcprelay.Opening{FD: -1, Client: netip.MustParseAddrPort("127.0.0.2:5"), Local: at}
				if d := a.Accept(o); d != tcprelay.Peek {
					t.Fatal("not waited for")
				}
				if d := o.Looker.Look(o, bytes, false); d != tcprelay.Peek || o.Discard != len(head) {
					t.Fatal("no header is seen")
				}
				if d := o.Looker.Look(o, first, false); d != tcprelay.Forward {
					t.Fatal("not forwarded by the worker")
				}
				gaveUp.Client = o.Client
				o.Dialer.GaveUp(&gaveUp, relay.ClientClose)
			})
			if n > most && !testkit.Race {
				t.Errorf("%s, %.5q: %v allocations", routes, head, n)
			}
		}
	}
}

// TestProxiedIsNotShielded: the kernel, which sees balancers, must not be told to
// turn away their clients.
func TestProxiedIsNotShielded(t *testing.T) {
	const filters = `"filters": [{"filter": "acl", "deny": ["203.0.113.0/24"]}],`
	load(t, `{"listeners": {"plain": `+listener("tcp/127.0.0.1:0", filters, `"routes": [`+pooled(`{}`, "127.0.0.1:9")+`]`)+`,
		"l": `+listener("tcp/127.0.0.1:0", filters+`"accept_proxy": {"from": ["127.0.0.2"]},`, `"routes": [`+pooled(`{}`, "127.0.0.1:9")+`]`)+`}}`)
	if ls := proxy.Running().Listeners; !ls["plain"].Shieldable() || ls["l"].Shieldable() {
		t.Errorf("shieldable: %v without accept_proxy, %v with it", ls["plain"].Shieldable(), ls["l"].Shieldable())
	}
}

// TestHeaderExplained asks what becomes of peers that are trusted and not.
func TestHeaderExplained(t *testing.T) {
	head := told(proxyproto.V1, client4, local4)
	for name, tc := range map[string]struct {
		src     string
		pieces  []string
		require bool
		open    bool
		end     string
		step    string // what the first step says
	}{
		"a header":              {src: "127.0.0.2:1", pieces: []string{head + "hello"}, end: wayhouse.EndPool, step: "the client is 203.0.113.7:51303 and has hit 198.51.100.2:25565"},
		"in pieces":             {src: "127.0.0.2:1", pieces: []string{head[:7], head[7:] + "he", "llo"}, end: wayhouse.EndPool, step: "the client is 203.0.113.7:51303"},
		"of somebody else":      {src: "127.0.0.2:1", pieces: []string{told(proxyproto.V2, "198.18.0.9:1", local4) + "hello"}, end: wayhouse.EndNoRoute, step: "the client is 198.18.0.9:1"},
		"its own":               {src: "127.0.0.2:1", pieces: []string{"PROXY UNKNOWN\r\nhello"}, end: wayhouse.EndNoRoute, step: "its own"},
		"none":                  {src: "127.0.0.2:1", pieces: []string{"hello"}, end: wayhouse.EndNoRoute, step: "sends no header"},
		"none, required":        {src: "127.0.0.2:1", pieces: []string{"hello"}, require: true, end: wayhouse.EndHeader, step: "missing or wrong"},
		"a part":                {src: "127.0.0.2:1", pieces: []string{head[:7]}, end: wayhouse.EndHeader, step: "missing or wrong"},
		"a part, to go on":      {src: "127.0.0.2:1", pieces: []string{head[:7]}, open: true, end: wayhouse.EndWaits, step: "is trusted"},
		"nothing yet":           {src: "127.0.0.2:1", open: true, require: true, end: wayhouse.EndWaits, step: "is trusted"},
		"not trusted":           {src: "203.0.113.7:1", pieces: []string{"hello"}, end: wayhouse.EndPool, step: "203.0.113.7 is not in accept_proxy.from"},
		"not trusted, required": {src: "203.0.113.7:1", pieces: []string{head + "hello"}, require: true, end: wayhouse.EndHeader, step: "203.0.113.7 is not in accept_proxy.from"},
	} {
		t.Run(name, func(t *testing.T) {
			load(t, behind("127.0.0.1:9", fmt.Sprintf(`, "require": %v`, tc.require), ``, `{"client_cidr": {"cidrs": ["203.0.113.0/24"]}, "first_bytes": {"prefix": "ascii:hello"}}`))
			q := wayhouse.Question{Client: netip.MustParseAddrPort(tc.src), Final: !tc.open}
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
