package monitoring

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// everything is a config in which clients meet filters, sniffers, a resolver,
// PROXY headers and pools with and without backends that answer.
func everything(t *testing.T, port int) kit.M {
	answers := []string{`{"pool": "live"}`, `{"pool": "nowhere"}`, `{}`, `{"target": "127.0.0.1:1"}`, `nonsense`}
	var asked atomic.Uint32
	oracle := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, answers[int(asked.Add(1))%len(answers)])
	}))
	t.Cleanup(oracle.Close)
	tcp, udp := kit.NewTCPBackend(t, 1, "127.0.0.1:0"), kit.NewUDPBackend(t, 1, "127.0.0.1:0")
	dead := kit.Local(kit.Port(t))
	filters := kit.A{
		kit.M{"filter": "acl", "deny": kit.A{"127.9.0.0/16"}},
		kit.M{"filter": "rate_limit", "per_ip": kit.M{"rate": 2, "burst": 2}},
		kit.M{"filter": "source_limit", "max_per_ip": 2},
	}
	routes := func(pool string) []kit.M {
		return []kit.M{
			kit.Match(kit.M{"sniffer": kit.M{"name": "minecraft"}}, kit.M{"handler": "pool", "pool": pool}),
			kit.Match(kit.M{"first_bytes": kit.M{"prefix": "hex:00"}}, kit.M{"handler": "pool", "pool": "dead-" + pool}),
			kit.Match(kit.M{"first_bytes": kit.M{"prefix": "hex:01"}}, kit.M{"handler": "reject"}),
			kit.Match(kit.M{"first_bytes": kit.M{"prefix": "hex:02"}}, kit.M{"handler": "resolve", "resolver": "oracle"}, kit.M{"handler": "pool", "pool": pool}),
			kit.Match(kit.M{"first_bytes": kit.M{"prefix": "hex:03"}}, kit.M{"handler": "route_hint"}, kit.M{"handler": "pool", "pool": pool}),
			kit.Match(kit.M{"first_bytes": kit.M{"prefix": "hex:04"}}, kit.M{"handler": "pool", "pool": pool}),
		}
	}
	listener := func(network, pool string, port int) kit.M {
		l := kit.Listener([]string{fmt.Sprintf("%s/127.0.0.1:%d", network, port)}, routes(pool)...)
		return kit.With(l, kit.M{"filters": filters, "peek": kit.M{"timeout": "50ms"}})
	}
	told := kit.With(listener("tcp", "live", port+1), kit.M{"accept_proxy": kit.M{"from": kit.A{"127.0.0.0/8"}, "require": true, "timeout": "50ms"}})
	return kit.App(
		kit.M{"tcp": listener("tcp", "live", port), "udp": listener("udp", "live-udp", port), "told": told},
		kit.M{
			"live": kit.With(kit.Pool(tcp.Addr), kit.M{"proxy_protocol": "v2"}), "live-udp": kit.Pool(udp.Addr),
			"dead-live": kit.Pool(dead), "dead-live-udp": kit.Pool(dead),
			"checked": kit.M{"targets": kit.A{tcp.Addr, dead}, "health": kit.M{"check": "tcp_connect", "interval": "100ms"}},
		},
		kit.M{"resolvers": kit.M{"oracle": kit.M{"resolver": "http", "endpoint": oracle.URL, "on_error": "fallback_route",
			"cache": kit.M{"key": kit.A{"src_ip"}}}}},
	)
}

// strangers are clients from as many addresses that say something odd, a number
// at once.
func strangers(t *testing.T, random *rand.Rand, n, port int) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range n {
		if i%20 == 0 {
			wg.Wait()
		}
		seed := random.Uint64()
		wg.Go(func() { stranger(t, rand.New(rand.NewPCG(seed, 1)), i, port) })
	}
	wg.Wait()
}

// stranger says something and does not wait long for an answer.
func stranger(t *testing.T, random *rand.Rand, n, port int) {
	from := netip.AddrFrom4([4]byte{127, byte(1 + n%10), byte(n >> 8), byte(1 + n%250)})
	if n%7 == 0 {
		from = netip.MustParseAddr("127.1.1.1") // again and again
	}
	say := make([]byte, 1+random.IntN(60))
	for i := range say {
		say[i] = byte(random.Uint32())
	}
	say[0] = byte(random.IntN(8))
	switch n % 16 {
	case 8: // a ping of Minecraft
		say = []byte("\x10\x00\xfb\x05\x09localhost\x63\xdd\x01")
	case 9:
		say = []byte("PROXY TCP4 198.51.100.7 198.51.100.1 4000 7777\r\n\x04hello")
	case 10:
		say = []byte("wayhouse_x{client=\"" + from.String() + "\"}\n")
	}
	network, to := []string{"tcp", "udp"}[n%2], kit.Local(port)
	local := net.Addr(&net.UDPAddr{IP: from.AsSlice()})
	if network == "tcp" {
		local, to = &net.TCPAddr{IP: from.AsSlice()}, kit.Local(port+n/2%2)
	}
	c, err := (&net.Dialer{LocalAddr: local, Timeout: kit.Long}).Dial(network, to)
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	c.Write(say)
	if n%3 == 0 {
		if tc, ok := c.(*net.TCPConn); ok {
			tc.CloseWrite()
		}
	}
	c.SetReadDeadline(time.Now().Add(50 * time.Millisecond)) // whatever becomes of it
	c.Read(make([]byte, 100))
}

var (
	label  = regexp.MustCompile(`([a-z_]+)="((?:[^"\\]|\\.)*)"`)
	quoted = regexp.MustCompile("`([a-z0-9_-]+)`")
)

// TestSeriesBounded has strangers do odd things: every value of a label is one
// that docs/metrics.md names, a name of the config or a backend of it. No
// stranger is among them.
func TestSeriesBounded(t *testing.T) {
	known := make(map[string]bool)
	page, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range quoted.FindAllStringSubmatch(string(page), -1) {
		known[m[1]] = true
	}
	port := kit.Ports(t, 2)
	config := everything(t, port)
	backends := make(map[string]bool)
	app := config["apps"].(kit.M)["wayhouse"].(kit.M)
	for _, part := range []string{"listeners", "pools", "resolvers"} {
		for name := range app[part].(kit.M) {
			known[name] = true
		}
	}
	for _, pool := range app["pools"].(kit.M) {
		for _, b := range regexp.MustCompile(`127[0-9.:]+`).FindAllString(fmt.Sprint(pool.(kit.M)["targets"]), -1) {
			backends[b] = true
		}
	}
	for _, name := range []string{"wayhouse", "layer4", "minecraft", "round_robin"} { // ours, a sniffer, a policy
		known[name] = true
	}
	p := kit.Start(t, config, kit.Options{})
	strangers(t, rand.New(rand.NewPCG(1, 8)), kit.Scaled(300, 3000), port)
	series := 0
	for key := range p.Metrics() {
		if !strings.HasPrefix(key, "wayhouse_") {
			continue
		}
		series++
		for _, m := range label.FindAllStringSubmatch(key, -1) {
			switch name, value := m[1], m[2]; {
			case name == "le", name == "version", name == "commit", name == "hash":
			case name == "backend" && backends[value], name != "backend" && known[value]:
			default:
				t.Errorf("%s: the value of %s is neither in docs/metrics.md nor in the config", key, name)
			}
		}
	}
	// Else the test says little.
	met := map[string][]string{
		"filter_blocked_total": {"acl", "rate_ip"}, "listener_connections_total": {"accepted", "no_route", "reject"},
		"resolver_requests_total": {"ok", "empty", "error"}, "backend_connect_errors_total": {"refused"},
		"healthcheck_total": {"ok", "fail"}, "proxy_protocol_headers_total": {"v2"},
	}
	m := p.Metrics()
	for _, name := range slices.Sorted(maps.Keys(met)) {
		for _, value := range met[name] {
			if sum := sumOf(m, name, value); sum == 0 {
				t.Errorf("no client has met %s of %s", value, name)
			}
		}
	}
	t.Logf("%d series", series)
}

func sumOf(m kit.Metrics, name, value string) (sum float64) {
	for key, v := range m {
		if strings.HasPrefix(key, "wayhouse_"+name+"{") && strings.Contains(key, `="`+value+`"`) {
			sum += v
		}
	}
	return sum
}

// TestSeriesOfBackends loads pools of many backends again and again, each time
// others: the series are those of the ones there are.
func TestSeriesOfBackends(t *testing.T) {
	const pool = 500
	config := func(n int) kit.M {
		var targets []string
		for i := range pool {
			targets = append(targets, fmt.Sprintf("10.%d.%d.%d:7777", n, i/250, 1+i%250))
		}
		return kit.App(kit.M{}, kit.M{"p": kit.Pool(targets...)})
	}
	p := kit.Start(t, config(0), kit.Options{})
	count := func() int { return len(p.Metrics()) }
	first := count()
	if first < 6*pool {
		t.Fatalf("%d series of %d backends", first, pool)
	}
	rounds := kit.Scaled(6, 40)
	for n := range rounds {
		p.MustLoad(config(1 + n))
	}
	kit.Eventually(t, "the series of the backends that are gone are too", func() bool { return count() <= first+20 }) // Caddy's own
	if n := sumOf(p.Metrics(), "backend_active_sessions", fmt.Sprintf("10.%d.0.1:7777", rounds)); n != 0 {
		t.Errorf("a backend without sessions has %v", n)
	}
}
