package resolve_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	_ "github.com/wayhouse-proxy/wayhouse/handlers/pool"
	"github.com/wayhouse-proxy/wayhouse/handlers/resolve"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/sniffer"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
	_ "github.com/wayhouse-proxy/wayhouse/modules/sniff/native"
)

func TestMain(m *testing.M) { kit.Main(m) }

// load runs a config until the test ends.
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
			t.Errorf("stopping: %v", err)
		}
	})
}

func addr(t *testing.T, name string) string {
	t.Helper()
	b := proxy.Running().Listening(name)
	if len(b) == 0 {
		t.Fatalf("listener %s has no address", name)
	}
	return b[0].Addr.String()
}

// named is a backend for TCP and UDP that puts its name in front of everything
// it is sent.
func named(t *testing.T, name string) (address string) {
	t.Helper()
	var ln net.Listener
	var pc net.PacketConn
	for tries := 0; pc == nil; tries++ { // the port may be free for one of them only
		var err error
		if ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if pc, err = net.ListenPacket("udp", ln.Addr().String()); err != nil {
			if ln.Close(); tries == 10 {
				t.Fatal(err)
			}
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 2048)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			pc.WriteTo([]byte(name+string(b[:n])), from)
		}
	})
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				b := make([]byte, 2048)
				for {
					n, err := c.Read(b)
					if err != nil {
						return
					}
					io.WriteString(c, name+string(b[:n]))
				}
			})
		}
	})
	t.Cleanup(func() { ln.Close(); pc.Close(); wg.Wait() })
	return ln.Addr().String()
}

// Clients of one test have an address of their own, and those of newClient one
// each: with the address of an earlier client they might have its port too, and
// with it the session, for sessions outlive configs.
var (
	lastAddress uint16
	addresses   = map[*testing.T]net.IP{}
)

func newAddress() net.IP {
	lastAddress++
	return net.IPv4(127, 1, byte(lastAddress>>8), byte(lastAddress))
}

func dial(t *testing.T, network, to string) net.Conn {
	t.Helper()
	if addresses[t] == nil {
		addresses[t] = newAddress()
	}
	return dialFrom(t, addresses[t], network, to)
}

func newClient(t *testing.T, to string) net.Conn {
	t.Helper()
	return dialFrom(t, newAddress(), "udp", to)
}

func dialFrom(t *testing.T, from net.IP, network, to string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}
	if network == "udp" {
		d.LocalAddr = &net.UDPAddr{IP: from}
	}
	c, err := d.Dial(network, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(kit.Long))
	return c
}

// exchange sends and wants an answer that begins like this.
func exchange(t *testing.T, c net.Conn, send, want string) {
	t.Helper()
	if _, err := io.WriteString(c, send); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len(want))
	n, err := c.Read(b)
	if string(b[:n]) != want {
		t.Fatalf("received %q, %v; want %q", b[:n], err, want)
	}
}

func expectClosed(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("read %d bytes, %v; want the connection closed", n, err)
	}
}

// service is a resolver that answers as it is told, and keeps what it was
// asked.
type service struct {
	*httptest.Server
	mu     sync.Mutex
	answer string
	status int
	asked  []request
}

type request struct {
	Listener   string `json:"listener"`
	Src        string `json:"src"`
	Dst        string `json:"dst"`
	SNI        string `json:"sni"`
	FirstBytes []byte `json:"first_bytes_b64"`
	RoutingKey string `json:"routing_key"`
}

func newService(t *testing.T, answer string) *service {
	s := &service{answer: answer, status: 200}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var q request
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
			t.Errorf("a request that is no JSON: %v", err)
		}
		s.mu.Lock()
		s.asked = append(s.asked, q)
		status, answer := s.status, s.answer
		s.mu.Unlock()
		w.WriteHeader(status)
		io.WriteString(w, answer)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *service) now(status int, answer string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status, s.answer = status, answer
}

func (s *service) requests() []request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]request(nil), s.asked...)
}

var networks = []string{"tcp", "udp"}

// both is a config whose listeners tcp and udp ask a resolver and then go on to
// a pool.
func both(resolver kit.M, pools kit.M, then ...kit.M) kit.M {
	listeners := kit.M{}
	for _, network := range networks {
		routes := append([]kit.M{kit.Route(kit.M{"handler": "resolve", "resolver": "mm"})}, then...)
		listeners[network] = kit.Listener([]string{network + "/127.0.0.1:0"}, routes...)
	}
	resolver = kit.With(kit.M{"resolver": "http", "timeout": "1m"}, resolver)
	return kit.App(listeners, pools, kit.M{"resolvers": kit.M{"mm": resolver}})
}

func TestPoolAndTarget(t *testing.T) {
	s := newService(t, "")
	a, b, direct := named(t, "a:"), named(t, "b:"), named(t, "direct:")
	load(t, both(kit.M{"endpoint": s.URL}, kit.M{"a": kit.Pool(a), "b": kit.Pool(b)}))
	for _, network := range networks {
		for answer, want := range map[string]string{
			`{"pool": "a", "target": null, "ttl_sec": 30}`: "a:",
			`{"pool": "b"}`:                                    "b:",
			fmt.Sprintf(`{"target": %q}`, direct):              "direct:",
			fmt.Sprintf(`{"target": %q, "pool": "a"}`, direct): "direct:",
		} {
			s.now(200, answer)
			c := dial(t, network, addr(t, network))
			exchange(t, c, "hello", want+"hello")
			exchange(t, c, "again", want+"again")
			asked := s.requests()
			last := asked[len(asked)-1]
			if last.Listener != network || last.Src != c.LocalAddr().String() || last.Dst != c.RemoteAddr().String() {
				t.Errorf("%s: the resolver was asked about %+v", network, last)
			}
			if network == "udp" && string(last.FirstBytes) != "hello" {
				t.Errorf("the resolver was told the datagram %q", last.FirstBytes)
			}
			c.Close()
		}
	}
	if n := len(s.requests()); n != 8 {
		t.Errorf("the resolver was asked %d times, want once a flow", n)
	}
}

// TestTargetThatLoops has a service name listeners of this process: such a flow
// would be one more to ask about, and so on without end.
func TestTargetThatLoops(t *testing.T) {
	loops := func(network string) float64 {
		if network == "udp" {
			return value(t, "wayhouse_datagrams_dropped_total", "listener", network, "reason", "loop")
		}
		return value(t, "wayhouse_listener_connections_total", "listener", network, "result", "loop")
	}
	s := newService(t, "")
	config := both(kit.M{"endpoint": s.URL}, kit.M{"a": kit.Pool(named(t, "a:"))})
	for _, bind := range []string{"127.0.0.1:0", "0.0.0.0:0"} {
		for _, network := range networks {
			config["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"].(kit.M)[network].(kit.M)["bind"] = []string{network + "/" + bind}
		}
		load(t, config)
		for _, network := range networks {
			_, port, err := net.SplitHostPort(addr(t, network))
			if err != nil {
				t.Fatal(err)
			}
			to := net.JoinHostPort("127.0.0.1", port)
			s.now(200, fmt.Sprintf(`{"target": %q}`, to))
			before, asked := loops(network), len(s.requests())
			c := dial(t, network, to)
			io.WriteString(c, "hello")
			kit.Settles(t, bind+", loops over "+network, before+1, func() float64 { return loops(network) })
			if network == "tcp" {
				expectClosed(t, c)
			}
			if n := len(s.requests()) - asked; n != 1 {
				t.Errorf("%s over %s: %d requests, want 1", bind, network, n)
			}
		}
	}
}

// TestOnError has everything that may go wrong meet every mode.
func TestOnError(t *testing.T) {
	redirected := newService(t, `{"pool": "a"}`)
	for name, tc := range map[string]struct {
		status int
		answer string
	}{
		"5xx":                    {503, `{"pool": "a"}`},
		"bad JSON":               {200, `{"pool": "a"`},
		"no object":              {200, `"a"`},
		"another type":           {200, `{"pool": 7}`},
		"more behind it":         {200, `{"pool": "a"} {}`},
		"nothing":                {200, `{}`},
		"no content":             {204, ``},
		"a pool there is not":    {200, `{"pool": "zzz"}`},
		"a target not allowed":   {200, `{"target": "127.0.0.2:9"}`},
		"a target without port":  {200, `{"target": "127.0.0.1"}`},
		"a target that is named": {200, `{"target": "localhost:80"}`},
		"port 0":                 {200, `{"target": "127.0.0.1:0"}`},
		"too much":               {200, `{"pool": "a", "x": "` + string(make([]byte, 64<<10)) + `"}`},
	} {
		t.Run(name, func(t *testing.T) {
			s := newService(t, "")
			s.now(tc.status, tc.answer)
			everyMode(t, s.URL)
		})
	}
	t.Run("a redirect", func(t *testing.T) {
		s := httptest.NewServer(http.RedirectHandler(redirected.URL, http.StatusTemporaryRedirect))
		defer s.Close()
		everyMode(t, s.URL)
		if n := len(redirected.requests()); n != 0 {
			t.Errorf("%d redirects were followed", n)
		}
	})
	t.Run("nobody listens", func(t *testing.T) {
		s := httptest.NewServer(nil)
		s.Close()
		everyMode(t, s.URL)
	})
}

// everyMode loads a resolver that has no good answer in each mode and wants
// what the mode says.
func everyMode(t *testing.T, url string) {
	t.Helper()
	a, fallback := named(t, "a:"), named(t, "fallback:")
	for _, mode := range []string{"reject", "fallback_route", "stale_ok"} {
		r := kit.M{"endpoint": url, "on_error": mode, "allow_targets": kit.A{"127.0.0.1/32"}, "cache": kit.M{"key": kit.A{"src_ip"}}}
		load(t, both(r, kit.M{"a": kit.Pool(a), "fallback": kit.Pool(fallback)}, kit.Route(kit.M{"handler": "pool", "pool": "fallback"})))
		c := dial(t, "tcp", addr(t, "tcp"))
		u := newClient(t, addr(t, "udp"))
		if mode == "fallback_route" {
			exchange(t, c, "x", "fallback:x")
			exchange(t, u, "x", "fallback:x")
		} else {
			expectClosed(t, c)
			dropped := noRoute(t, "udp")
			io.WriteString(u, "x")
			kit.Eventually(t, mode+": the datagram was dropped", func() bool { return noRoute(t, "udp") == dropped+1 })
		}
		c.Close()
		u.Close()
		if err := caddy.Stop(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestStaleAnswers(t *testing.T) {
	s := newService(t, `{"pool": "a", "ttl_sec": 0}`)
	r := kit.M{"endpoint": s.URL, "on_error": "stale_ok", "cache": kit.M{"key": kit.A{"src_ip"}, "positive_ttl": "1ns", "negative_ttl": "1h"}}
	load(t, both(r, kit.M{"a": kit.Pool(named(t, "a:"))}))
	exchange(t, dial(t, "tcp", addr(t, "tcp")), "x", "a:x")
	s.now(500, "")
	expectClosed(t, dial(t, "tcp", addr(t, "tcp"))) // ttl_sec 0: nothing was kept
	s.now(200, `{"pool": "a"}`)
	exchange(t, dial(t, "tcp", addr(t, "tcp")), "x", "a:x") // and now it is, for a moment
	s.now(500, "")
	for _, network := range networks {
		exchange(t, dial(t, network, addr(t, network)), "x", "a:x")
	}
	s.now(200, `{}`) // an answer that is none is one
	expectClosed(t, dial(t, "tcp", addr(t, "tcp")))
	s.now(500, "")
	expectClosed(t, dial(t, "tcp", addr(t, "tcp")))
}

// TestCacheOutlivesReload loads the config again, unchanged and changed.
func TestCacheOutlivesReload(t *testing.T) {
	s := newService(t, `{"pool": "a", "ttl_sec": 3600}`)
	r := kit.M{"endpoint": s.URL, "cache": kit.M{"key": kit.A{"src_ip"}}}
	pools := kit.M{"a": kit.Pool(named(t, "a:"))}
	load(t, both(r, pools))
	ask := func(times int) {
		t.Helper()
		for range 3 {
			exchange(t, dial(t, "udp", addr(t, "udp")), "x", "a:x")
		}
		if n := len(s.requests()); n != times {
			t.Fatalf("asked %d times, want %d", n, times)
		}
	}
	ask(1)
	load(t, both(r, kit.With(pools, kit.M{"b": kit.Pool("127.0.0.1:9")})))
	ask(1)
	load(t, both(kit.With(r, kit.M{"timeout": "61s"}), pools))
	ask(2)
}

func TestServerName(t *testing.T) {
	s := newService(t, `{"pool": "a"}`)
	r := kit.M{"endpoint": s.URL, "cache": kit.M{"key": kit.A{"sni"}}}
	load(t, both(r, kit.M{"a": kit.Pool(named(t, "a:"))}))
	hello := clientHello(t, "Match.Example.com")
	for range 2 {
		c := dial(t, "tcp", addr(t, "tcp"))
		for _, part := range []string{hello[:7], hello[7:50]} {
			io.WriteString(c, part)
		}
		exchange(t, c, hello[50:], "a:"+hello[:7])
		c.Close()
	}
	asked := s.requests()
	if len(asked) != 1 || asked[0].SNI != "match.example.com" {
		t.Errorf("the resolver was asked %+v", asked)
	}
}

// TestFirstBytes waits for the bytes that the key needs, and asks without the
// cache about a client that never sends them.
func TestFirstBytes(t *testing.T) {
	s := newService(t, `{"pool": "a"}`)
	r := kit.M{"endpoint": s.URL, "cache": kit.M{"key": kit.A{"first_bytes:0:4"}}}
	load(t, both(r, kit.M{"a": kit.Pool(named(t, "a:"))}))
	for range 2 {
		c := dial(t, "tcp", addr(t, "tcp"))
		io.WriteString(c, "to")
		io.WriteString(c, "ken")
		exchange(t, c, "!", "a:to")
		c.Close()
	}
	if n := len(s.requests()); n != 1 {
		t.Errorf("asked %d times about one key", n)
	}
	for range 2 {
		exchange(t, dial(t, "tcp", addr(t, "tcp")), "to", "a:to")
	}
	if n := len(s.requests()); n != 3 {
		t.Errorf("asked %d times, want once more for each client that sent too little", n)
	}
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"resolve mm":          `{"resolver":"mm"}`,
		"resolve":             "resolve: the name of a resolver is missing, as in resolve matchmaker",
		"resolve mm x":        `unexpected argument "x" of resolve mm`,
		"resolve mm {\n a\n}": `unrecognized option "a" of resolve mm`,
	} {
		var h resolve.Handler
		got := ""
		if err := h.UnmarshalCaddyfile(caddyfile.NewTestDispenser(in)); err != nil {
			got = err.Error()
		} else {
			b, _ := json.Marshal(&h)
			got = string(b)
		}
		if len(got) < len(want) || got[:len(want)] != want {
			t.Errorf("%s: got %s, want %s", in, got, want)
		}
	}
}

// TestRoutingKey tells the resolver what a sniffer of the listener has found.
func TestRoutingKey(t *testing.T) {
	s := newService(t, `{"pool": "a"}`)
	a := kit.M{"a": kit.Pool(named(t, "a:"))}
	r := kit.M{"endpoint": s.URL, "cache": kit.M{"key": kit.A{"routing_key"}}}
	config := both(r, a)
	routes := []kit.M{
		kit.Match(kit.M{"sniffer": kit.M{"name": "a2s", "host": kit.A{"never.example.com"}}}, kit.M{"handler": "pool", "pool": "a"}),
		kit.Route(kit.M{"handler": "resolve", "resolver": "mm"}),
	}
	config["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"] = kit.M{"udp": kit.Listener([]string{"udp/127.0.0.1:0"}, routes...)}
	load(t, config)
	const query = "\xff\xff\xff\xffTSource Engine Query\x00"
	for range 3 {
		exchange(t, newClient(t, addr(t, "udp")), query, "a:"+query)
	}
	asked := s.requests()
	if len(asked) != 1 || asked[0].RoutingKey != "a2s" {
		t.Errorf("the resolver was asked %+v", asked)
	}
	exchange(t, newClient(t, addr(t, "udp")), "something else", "a:something else")
	exchange(t, newClient(t, addr(t, "udp")), "something else", "a:something else")
	if n := len(s.requests()); n != 3 {
		t.Errorf("asked %d times, want once more for each client without a key", n)
	}
}

// TestRoutingKeyIsTheHost holds that of a hint with a host and a key the
// resolver is told the host.
func TestRoutingKeyIsTheHost(t *testing.T) {
	s := newService(t, `{"pool": "a"}`)
	a := kit.M{"a": kit.Pool(named(t, "a:"))}
	config := both(kit.M{"endpoint": s.URL, "cache": kit.M{"key": kit.A{"routing_key"}}}, a)
	config["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"] = kit.M{"tcp": kit.Listener([]string{"tcp/127.0.0.1:0"},
		kit.Match(kit.M{"sniffer": kit.M{"name": "minecraft", "host": kit.A{"never.example.com"}}}, kit.M{"handler": "pool", "pool": "a"}),
		kit.Route(kit.M{"handler": "resolve", "resolver": "mm"}))}
	load(t, config)
	const handshake = "\x16\x00\x2f\x10play.example.comc\xdd\x02\x09\x00\x07Player1" // protocol 47, login
	c, err := net.Dial("tcp", addr(t, "tcp"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, handshake); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 2)); err != nil {
		t.Fatal(err)
	}
	if asked := s.requests(); len(asked) != 1 || asked[0].RoutingKey != "play.example.com" {
		t.Errorf("the resolver was asked %+v", asked)
	}
}
