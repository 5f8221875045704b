package listener_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/standard"
	_ "github.com/mholt/caddy-l4"
	"github.com/mholt/caddy-l4/layer4"
	"github.com/prometheus/client_golang/prometheus/testutil"

	_ "github.com/wayhouse-proxy/wayhouse/handlers/pool"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/sniffer"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	wl "github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// load runs a config with this wayhouse app, and other apps if given, until
// the test ends.
func load(t testing.TB, app string, others ...string) {
	t.Helper()
	apps := append([]string{`"wayhouse": ` + app}, others...)
	cfg := fmt.Sprintf(`{"admin": {"disabled": true, "config": {"persist": false}}, "apps": {%s}}`, strings.Join(apps, ","))
	if !json.Valid([]byte(cfg)) {
		t.Fatalf("not JSON: %s", cfg)
	}
	if err := caddy.Load([]byte(cfg), true); err != nil {
		t.Fatalf("loading %s: %v", cfg, err)
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Errorf("stopping: %v", err)
		}
	})
}

func addr(t testing.TB, name string) string {
	t.Helper()
	b := proxy.Running().Listening(name)
	if len(b) == 0 {
		t.Fatalf("listener %s has no address", name)
	}
	return b[0].Addr.String()
}

func dial(t *testing.T, network, to string) net.Conn {
	t.Helper()
	c, err := net.Dial(network, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(10 * time.Second))
	return c
}

func send(t *testing.T, c net.Conn, s string) {
	t.Helper()
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatalf("sending %q: %v", s, err)
	}
}

func expect(t *testing.T, c net.Conn, want string) {
	t.Helper()
	buf := make([]byte, len(want)+1)
	n, err := io.ReadAtLeast(c, buf, len(want))
	if string(buf[:n]) != want {
		t.Fatalf("received %q, %v; want %q", buf[:n], err, want)
	}
}

// expectClosed wants the connection cut off without a byte.
func expectClosed(t *testing.T, c net.Conn) {
	t.Helper()
	n, err := c.Read(make([]byte, 1))
	if n != 0 || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("read %d bytes, %v; want the connection closed without any", n, err)
	}
}

func init() {
	caddy.RegisterModule(says{})
	caddy.RegisterModule(panics{})
	caddy.RegisterModule(from{})
}

// says answers with its text and the first bytes it gets, and closes.
type says struct {
	Text string `json:"text"`
	// Greet: say it without having read.
	Greet bool `json:"greet"`
	// Pass lets the connection go on to the next routes.
	Pass bool `json:"pass"`
}

func (says) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "layer4.handlers.test_says", New: func() caddy.Module { return new(says) }}
}

func (s says) Handle(cx *layer4.Connection, next layer4.Handler) error {
	if s.Pass {
		io.WriteString(cx, s.Text)
		return next.Handle(cx)
	}
	if s.Greet {
		_, err := io.WriteString(cx, s.Text)
		return err
	}
	buf := make([]byte, 2048)
	n, err := cx.Read(buf)
	if err != nil {
		return err
	}
	_, err = io.WriteString(cx, s.Text+string(buf[:n]))
	return err
}

type panics struct{}

func (panics) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "layer4.matchers.test_panics", New: func() caddy.Module { return new(panics) }}
}

func (panics) Match(*layer4.Connection) (bool, error) { panic("matcher of the test") }

const threeRoutes = `"routes": [
	{"match": [{"regexp": {"pattern": "^hello$", "count": 5}}], "handle": [{"handler": "test_says", "text": "one:"}]},
	{"match": [{"regexp": {"pattern": "^h", "count": 1}}], "handle": [{"handler": "test_says", "text": "two:"}]},
	{"handle": [{"handler": "test_says", "text": "three:", "greet": %v}]}]`

func listener(bind, extra, routes string) string {
	return fmt.Sprintf(`{"bind": ["%s"], %s %s}`, bind, extra, routes)
}

func TestRoutesInOrderTCP(t *testing.T) {
	const long = `"peek": {"timeout": "30s"},`
	const short = `"peek": {"timeout": "100ms"},`
	const shortNext = `"peek": {"timeout": "100ms", "on_undecided": "next"},`
	const few = `"peek": {"timeout": "30s", "max_bytes": 3},`
	for name, tc := range map[string]struct {
		peek  string
		greet bool
		do    func(t *testing.T, c net.Conn)
	}{
		"the first route waits for its bytes": {peek: long, do: func(t *testing.T, c net.Conn) {
			for _, b := range "hello" {
				send(t, c, string(b))
			}
			expect(t, c, "one:hello")
		}},
		"decided against the first": {peek: long, do: func(t *testing.T, c net.Conn) {
			send(t, c, "he")
			send(t, c, "ffaloes")
			buf := make([]byte, 64)
			n, _ := c.Read(buf)
			if !strings.HasPrefix(string(buf[:n]), "two:heff") {
				t.Fatalf("received %q, want the second route", buf[:n])
			}
		}},
		"undecided when the time is over": {peek: short, do: func(t *testing.T, c net.Conn) {
			send(t, c, "hel")
			expectClosed(t, c)
		}},
		"undecided, and next": {peek: shortNext, do: func(t *testing.T, c net.Conn) {
			send(t, c, "hel")
			expect(t, c, "two:hel")
		}},
		"undecided when the bytes are spent": {peek: few, do: func(t *testing.T, c net.Conn) {
			send(t, c, "hello")
			expectClosed(t, c)
		}},
		"a silent client": {peek: short, greet: true, do: func(t *testing.T, c net.Conn) {
			expect(t, c, "three:")
		}},
		"a client that ends its side having said too little": {peek: long, do: func(t *testing.T, c net.Conn) {
			send(t, c, "hel")
			c.(*net.TCPConn).CloseWrite()
			expectClosed(t, c)
		}},
		"a client that ends its side silently": {peek: long, greet: true, do: func(t *testing.T, c net.Conn) {
			c.(*net.TCPConn).CloseWrite()
			expect(t, c, "three:")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			load(t, `{"listeners": {"l": `+listener("tcp/127.0.0.1:0", tc.peek, fmt.Sprintf(threeRoutes, tc.greet))+`}}`)
			tc.do(t, dial(t, "tcp", addr(t, "l")))
		})
	}
}

func TestRoutesInOrderUDP(t *testing.T) {
	for name, tc := range map[string]struct {
		peek string
		send []string
		want string
	}{
		"whole in one datagram":          {send: []string{"hello"}, want: "one:hello"},
		"decided against the first":      {send: []string{"hippo"}, want: "two:hippo"},
		"neither":                        {send: []string{"world"}, want: "three:world"},
		"two datagrams, read one by one": {peek: `"peek": {"timeout": "30s"},`, send: []string{"hel", "lo"}, want: "one:hel"},
		"undecided, and next":            {peek: `"peek": {"timeout": "100ms", "on_undecided": "next"},`, send: []string{"he"}, want: "two:he"},
		"no bytes at all":                {peek: `"peek": {"timeout": "100ms"},`, send: []string{""}, want: "three:"},
	} {
		t.Run(name, func(t *testing.T) {
			load(t, `{"listeners": {"l": `+listener("udp/127.0.0.1:0", tc.peek, fmt.Sprintf(threeRoutes, tc.want == "three:"))+`}}`)
			c := dial(t, "udp", addr(t, "l"))
			for _, s := range tc.send {
				if _, err := c.Write([]byte(s)); err != nil {
					t.Fatal(err)
				}
			}
			buf := make([]byte, 64)
			n, err := c.Read(buf)
			if string(buf[:n]) != tc.want {
				t.Fatalf("received %q, %v; want %q", buf[:n], err, tc.want)
			}
		})
	}
}

// TestSetNeedsAll holds that one definite no decides a set, whatever the
// order in which its matchers are asked.
func TestSetNeedsAll(t *testing.T) {
	load(t, `{"listeners": {"l": `+listener("tcp/127.0.0.1:0", `"peek": {"timeout": "30s"},`, `"routes": [
		{"match": [{"regexp": {"pattern": "^hello$", "count": 5}, "remote_ip": {"ranges": ["192.0.2.0/24"]}}], "handle": [{"handler": "test_says", "text": "one:"}]},
		{"handle": [{"handler": "test_says", "text": "two:", "greet": true}]}]`)+`}}`)
	for range 20 { // maps are asked in any order
		expect(t, dial(t, "tcp", addr(t, "l")), "two:")
	}
}

func TestHandlerThatPasses(t *testing.T) {
	load(t, `{"listeners": {"l": `+listener("tcp/127.0.0.1:0", `"peek": {"timeout": "30s"},`, `"routes": [
		{"handle": [{"handler": "test_says", "text": "passed;", "pass": true}]},
		{"match": [{"regexp": {"pattern": "^b", "count": 1}}], "handle": [{"handler": "test_says", "text": "two:"}]},
		{"handle": [{"handler": "test_says", "text": "three:"}]}]`)+`}}`)
	c := dial(t, "tcp", addr(t, "l"))
	send(t, c, "bee")
	expect(t, c, "passed;two:bee")
}

func TestPanicEndsOneFlow(t *testing.T) {
	load(t, `{"listeners": {
		"bad": `+listener("tcp/127.0.0.1:0", ``, `"routes": [{"match": [{"test_panics": {}}], "handle": [{"handler": "echo"}]}]`)+`,
		"good": `+listener("tcp/127.0.0.1:0", ``, `"routes": [{"handle": [{"handler": "echo"}]}]`)+`}}`)
	good := dial(t, "tcp", addr(t, "good"))
	bad := dial(t, "tcp", addr(t, "bad"))
	expectClosed(t, bad)
	send(t, good, "still here")
	expect(t, good, "still here")
}

func TestNetworkHTTP(t *testing.T) {
	load(t, `{"listeners": {"web": {"bind": ["tcp/127.0.0.1:0"]}}}`,
		`"http": {"servers": {
			"main": {"listen": ["wayhouse/web:443"], "automatic_https": {"disable": true}, "protocols": ["h1"], "routes": [{"handle": [{"handler": "static_response", "body": "main {http.request.remote.host}"}]}]},
			"redirect": {"listen": ["wayhouse/web:80"], "automatic_https": {"disable": true}, "protocols": ["h1"], "routes": [{"handle": [{"handler": "static_response", "body": "redirect"}]}]}}}`)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := client.Get("http://" + addr(t, "web") + "/")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if string(body) != "main 127.0.0.1" {
		t.Errorf("the answer is %q, want that of the server on 443 and the client's address", body)
	}
}

func TestNetworkLayer4(t *testing.T) {
	load(t, `{"listeners": {"t": {"bind": ["tcp/127.0.0.1:0"]}, "u": {"bind": ["udp/127.0.0.1:0"]}}}`,
		`"layer4": {"servers": {
			"t": {"listen": ["wayhouse/t"], "routes": [{"handle": [{"handler": "echo"}]}]},
			"u": {"listen": ["wayhouse/u"], "routes": [{"handle": [{"handler": "echo"}]}]}}}`)
	for _, network := range []string{"tcp", "udp"} {
		c := dial(t, network, addr(t, network[:1]))
		for _, s := range []string{"one", "two", "three"} {
			send(t, c, s)
			expect(t, c, s)
		}
	}
}

func TestNetworkUnknownName(t *testing.T) {
	err := caddy.Load([]byte(`{"admin": {"disabled": true, "config": {"persist": false}}, "apps": {
		"wayhouse": {"listeners": {"web": {"bind": ["tcp/127.0.0.1:0"]}}},
		"layer4": {"servers": {"t": {"listen": ["wayhouse/webb"], "routes": [{"handle": [{"handler": "echo"}]}]}}}}}`), true)
	if err == nil || !strings.Contains(err.Error(), `has no listener "webb" without routes`) {
		t.Errorf("loading: %v, want the name that is wrong", err)
	}
	if err == nil {
		caddy.Stop()
	}
}

// TestRouteByAddress holds that routes which need no bytes are decided without
// any, in order, and that one with a matcher that needs them still waits.
func TestRouteByAddress(t *testing.T) {
	echo := func() string {
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
				go func() { io.WriteString(c, "hello first"); io.Copy(c, c); c.Close() }()
			}
		}()
		return ln.Addr().String()
	}()
	pool := fmt.Sprintf(`"handle": [{"handler": "pool", "targets": ["%s"], "health": {"check": "none"}}]`, echo)
	load(t, `{"listeners": {
		"here": `+listener("tcp/127.0.0.1:0", `"peek": {"timeout": "1h"},`, `"routes": [{"match": [{"test_from": {"ip": "192.0.2.1"}}], "handle": [{"handler": "test_says", "text": "wrong"}]}, {"match": [{"test_from": {"ip": "127.0.0.1"}}], `+pool+`}]`)+`,
		"nowhere": `+listener("tcp/127.0.0.1:0", ``, `"routes": [{"match": [{"test_from": {"ip": "192.0.2.1"}}], `+pool+`}]`)+`,
		"bytes": `+listener("tcp/127.0.0.1:0", `"peek": {"timeout": "1h"},`, `"routes": [{"match": [{"test_from": {"ip": "127.0.0.1"}, "regexp": {"pattern": "^ab$", "count": 2}}], "handle": [{"handler": "test_says", "text": "bytes:"}]}, {`+pool+`}]`)+`}}`)
	expect(t, dial(t, "tcp", addr(t, "here")), "hello first")
	expectClosed(t, dial(t, "tcp", addr(t, "nowhere")))
	c := dial(t, "tcp", addr(t, "bytes"))
	send(t, c, "a")
	send(t, c, "b")
	expect(t, c, "bytes:ab")
}

// from matches a client address, with or without a connection.
type from struct {
	IP netip.Addr `json:"ip"`
}

func (from) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "layer4.matchers.test_from", New: func() caddy.Module { return new(from) }}
}

func (f from) MatchAddr(client, _ netip.AddrPort) bool { return client.Addr() == f.IP }

func (f from) Match(cx *layer4.Connection) (bool, error) {
	a, err := netip.ParseAddrPort(cx.RemoteAddr().String())
	return f.MatchAddr(a, a), err
}

// TestWildcardsShareAPort holds that IPv4 traffic goes to the IPv4 wildcard
// where there is one, whichever was bound first, and else to the other, and that
// the IPv6 one is not touched when the IPv4 one comes beside it.
func TestWildcardsShareAPort(t *testing.T) {
	ln, err := net.Listen("tcp", "[::]:0")
	if err != nil {
		t.Fatal(err)
	}
	port := ln.Addr().(*net.TCPAddr).Port
	ln.Close()
	says := func(text string) string {
		return fmt.Sprintf(`"routes": [{"handle": [{"handler": "test_says", "text": %q}]}]`, text)
	}
	six := fmt.Sprintf(`"six": {"bind": ["tcp/[::]:%d", "udp/[::]:%d"], %s}`, port, port, says("six:"))
	four := fmt.Sprintf(`"four": {"bind": ["tcp/0.0.0.0:%d", "udp/0.0.0.0:%d"], %s}`, port, port, says("four:"))
	ask := func(host, want string) {
		t.Helper()
		for _, network := range []string{"tcp", "udp"} {
			for range 8 { // enough to meet every worker's socket
				c := dial(t, network, net.JoinHostPort(host, fmt.Sprint(port)))
				send(t, c, "hi")
				expect(t, c, want+"hi")
				c.Close()
			}
		}
	}
	load(t, `{"listeners": {`+six+`}}`)
	ask("127.0.0.1", "six:")
	ask("::1", "six:")
	old := dial(t, "udp", fmt.Sprintf("[::1]:%d", port))
	send(t, old, "one")
	expect(t, old, "six:one")
	load(t, `{"listeners": {`+six+`, `+four+`}}`)
	ask("127.0.0.1", "four:")
	ask("::1", "six:")
	load(t, `{"listeners": {`+four+`}}`)
	ask("127.0.0.1", "four:")
	load(t, `{"listeners": {`+four+`, `+six+`}}`)
	ask("127.0.0.1", "four:")
	ask("::1", "six:")
}

func init() { caddy.RegisterModule(bouncer{}) }

// bouncer is a sniffer that wants flows dropped which begin with "bad!".
type bouncer struct{}

func (bouncer) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.sniffers.test_bouncer", New: func() caddy.Module { return new(bouncer) }}
}

func (bouncer) Sniff(in *sniff.Input, h *sniff.Hint) sniff.Verdict {
	switch b := string(in.Bytes); {
	case strings.HasPrefix(b, "bad!"):
		h.Reject = true
		return sniff.Recognised
	case strings.HasPrefix("bad!", b) && !in.UDP() && !in.Final:
		return sniff.Undecided
	}
	return sniff.Unrecognised
}

// TestReject holds that a sniffer's reject comes before routes that would have
// matched without it, is silent, and reaches in pieces too.
func TestReject(t *testing.T) {
	routes := `"peek": {"timeout": "30s"}, "routes": [
		{"match": [{"test_from": {"ip": "127.0.0.1"}}], "handle": [{"handler": "test_says", "text": "in:"}]},
		{"match": [{"sniffer": {"name": "test_bouncer"}}], "handle": [{"handler": "echo"}]}]`
	load(t, `{"listeners": {"t": `+listener("tcp/127.0.0.1:0", ``, routes)+`, "u": `+listener("udp/127.0.0.1:0", ``, routes)+`}}`)
	rejected := flow.ListenerOf("t").Rejected
	before := testutil.ToFloat64(rejected)
	whole := dial(t, "tcp", addr(t, "t"))
	send(t, whole, "bad!")
	expectClosed(t, whole)
	pieces := dial(t, "tcp", addr(t, "t"))
	for _, b := range "bad!" {
		send(t, pieces, string(b))
	}
	expectClosed(t, pieces)
	if n := testutil.ToFloat64(rejected) - before; n != 2 {
		t.Errorf("%v connections are counted as rejected, want 2", n)
	}
	good := dial(t, "tcp", addr(t, "t"))
	send(t, good, "bah")
	expect(t, good, "in:bah")

	cs := flow.ListenerOf("u").Workers(runtime.GOMAXPROCS(0))
	dropped := func() (n uint64) {
		for i := range cs {
			n += cs[i].Dropped[relay.SnifferReject].Load()
		}
		return n
	}
	were := dropped()
	bad := dial(t, "udp", addr(t, "u"))
	send(t, bad, "bad!")
	other := dial(t, "udp", addr(t, "u"))
	send(t, other, "bah")
	expect(t, other, "in:bah")
	testkit.Settles(t, "datagrams counted as rejected", were+1, dropped)
}

// TestRejectInsideNot has the sniffer that rejects asked by a matcher inside
// not, for clients and by who asks what would become of one.
func TestRejectInsideNot(t *testing.T) {
	routes := `"peek": {"timeout": "30s"}, "routes": [
		{"match": [{"not": [{"sniffer": {"name": "test_bouncer"}}]}], "handle": [{"handler": "test_says", "text": "in:"}]}]`
	load(t, `{"listeners": {"n": `+listener("tcp/127.0.0.1:0", ``, routes)+`}}`)
	rejected := flow.ListenerOf("n").Rejected
	before := testutil.ToFloat64(rejected)
	bad := dial(t, "tcp", addr(t, "n"))
	send(t, bad, "bad!")
	expectClosed(t, bad)
	if n := testutil.ToFloat64(rejected) - before; n != 1 {
		t.Errorf("%v connections are counted as rejected, want 1", n)
	}
	good := dial(t, "tcp", addr(t, "n"))
	send(t, good, "bah")
	expect(t, good, "in:bah")
	e, err := proxy.Running().Listeners["n"].Explain(wl.Question{Client: netip.MustParseAddrPort("127.0.0.1:1"), Pieces: [][]byte{[]byte("bad!")}})
	if err != nil || e.End.What != wl.EndRejected || e.Steps[len(e.Steps)-1].Name != "test_bouncer" {
		t.Errorf("explained as %+v, %v", e, err)
	}
}
