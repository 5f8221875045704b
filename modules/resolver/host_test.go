package resolver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

func init() { caddy.RegisterModule(new(fake)) }

// fake is a resolver that does what the test says.
type fake struct {
	Settings
	ID string `json:"id,omitempty"`

	closed atomic.Bool
}

// does is what fakes do, by ID.
var does sync.Map

type resolve func(context.Context, *Request) (Answer, error)

func (*fake) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.resolvers.fake", New: func() caddy.Module { return new(fake) }}
}

func (f *fake) Resolve(ctx context.Context, r *Request) (Answer, error) {
	do, _ := does.Load(f.ID)
	return do.(resolve)(ctx, r)
}

func (f *fake) Close() error {
	f.closed.Store(true)
	return nil
}

// hosted is a host for a fake, closed when the test ends.
func hosted(t *testing.T, options string, do resolve) *Host {
	t.Helper()
	does.Store(t.Name(), do)
	config := fmt.Sprintf(`{"resolver": "fake", "id": %q`, t.Name())
	if options != "" {
		config += ", " + options
	}
	h, err := open(t, config+"}")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Cleanup() })
	return h
}

func open(t *testing.T, config string) (*Host, error) {
	t.Helper()
	mine := prometheus.Labels{"resolver": t.Name()}
	requestsTotal.DeletePartialMatch(mine) // of an earlier run
	cacheTotal.DeletePartialMatch(mine)
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	return Load(ctx, t.Name(), json.RawMessage(config), func(p string) bool { return strings.HasPrefix(p, "pool") })
}

func from(ip string) *Request {
	return &Request{Listener: "l", Client: netip.AddrPortFrom(netip.MustParseAddr(ip), 4000), Local: netip.MustParseAddrPort("192.0.2.1:7777")}
}

func count(c prometheus.Counter) int {
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		panic(err)
	}
	return int(m.GetCounter().GetValue())
}

// wantCounts compares the counters of a host that has them to itself.
func wantCounts(t *testing.T, h *Host, requests [numResults]int, cache [numFound]int) {
	t.Helper()
	var r [numResults]int
	for i, c := range h.counts.requests {
		r[i] = count(c)
	}
	var f [numFound]int
	for i, c := range h.counts.cache {
		f[i] = count(c)
	}
	if r != requests || f != cache {
		t.Errorf("requests (ok, empty, timeout, error) %v, cache (hit, hit_negative, miss, stale, uncacheable) %v; want %v and %v", r, f, requests, cache)
	}
}

func TestCacheTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answer, fail := Answer{Pool: "pool-a"}, error(nil)
		h := hosted(t, `"on_error": "stale_ok", "cache": {"key": ["src_ip"], "positive_ttl": "30s", "negative_ttl": "2s"}`,
			func(context.Context, *Request) (Answer, error) { return answer, fail })
		want := func(pool string, err error) {
			t.Helper()
			a, got := h.Resolve(from("203.0.113.7"))
			if a.Pool != pool || !errors.Is(got, err) {
				t.Fatalf("%q, %v; want %q, %v", a.Pool, got, pool, err)
			}
		}
		want("pool-a", nil) // miss
		answer = Answer{Pool: "pool-b", HasTTL: true, TTL: 5 * time.Second}
		time.Sleep(30*time.Second - 1)
		want("pool-a", nil) // hit
		time.Sleep(time.Nanosecond)
		want("pool-b", nil) // miss
		time.Sleep(5 * time.Second)
		fail = errors.New("down")
		want("pool-b", nil) // stale
		want("pool-b", nil) // stale: a failure is not kept
		fail, answer = nil, Answer{}
		want("", ErrNoPlace) // miss
		answer = Answer{Pool: "pool-c"}
		time.Sleep(2*time.Second - 1)
		want("", ErrNoPlace) // hit_negative
		time.Sleep(time.Nanosecond)
		want("pool-c", nil) // miss
		h.known = func(pool string) bool { return pool != "pool-c" }
		answer = Answer{Pool: "pool-a"}
		want("pool-a", nil) // a kept answer whose pool has gone is none
		wantCounts(t, h, [numResults]int{4, 1, 0, 2}, [numFound]int{1, 1, 5, 2, 0})
	})
}

func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := hosted(t, `"cache": {"key": ["src_ip"]}`, func(ctx context.Context, _ *Request) (Answer, error) {
			<-ctx.Done()
			return Answer{}, ctx.Err()
		})
		began := time.Now()
		_, err := h.Resolve(from("203.0.113.7"))
		if took := time.Since(began); err == nil || took != 40*time.Millisecond {
			t.Errorf("%v after %v", err, took)
		}
		wantCounts(t, h, [numResults]int{0, 0, 1, 0}, [numFound]int{0, 0, 1, 0, 0})
	})
}

func TestSingleFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var calls atomic.Int64
		h := hosted(t, `"cache": {"key": ["src_ip"]}`, func(context.Context, *Request) (Answer, error) {
			calls.Add(1)
			time.Sleep(10 * time.Millisecond)
			return Answer{Pool: "pool-a"}, nil
		})
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				a, err := h.Resolve(from([]string{"203.0.113.7", "203.0.113.8"}[i%2]))
				if a.Pool != "pool-a" || err != nil {
					t.Errorf("%v, %v", a, err)
				}
			})
		}
		wg.Wait()
		if n := calls.Load(); n != 2 {
			t.Errorf("%d calls for two keys", n)
		}
	})
}

// TestCallsAreBounded has more flows ask than calls may be under way.
func TestCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now, most atomic.Int64
		h := hosted(t, `"timeout": "25ms"`, func(ctx context.Context, _ *Request) (Answer, error) {
			n := now.Add(1)
			defer now.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			time.Sleep(10 * time.Millisecond)
			return Answer{Pool: "pool-a"}, ctx.Err()
		})
		var good atomic.Int64
		var wg sync.WaitGroup
		for range 4 * maxCalls {
			wg.Go(func() {
				if _, err := h.Resolve(from("203.0.113.7")); err == nil {
					good.Add(1)
				}
			})
		}
		began := time.Now()
		wg.Wait()
		if most.Load() != maxCalls || good.Load() != 2*maxCalls || time.Since(began) > 30*time.Millisecond {
			t.Errorf("at most %d calls at once, %d answers in %v", most.Load(), good.Load(), time.Since(began))
		}
		wantCounts(t, h, [numResults]int{2 * maxCalls, 0, 2 * maxCalls, 0}, [numFound]int{})
	})
}

func TestManyKeys(t *testing.T) {
	var calls int
	h := hosted(t, `"cache": {"key": ["first_bytes:0:4", "src_ip"], "max_entries": 1000}`, func(context.Context, *Request) (Answer, error) {
		calls++
		return Answer{Pool: "pool-a"}, nil
	})
	for i := range 10000 {
		r := from("203.0.113.7")
		r.FirstBytes = []byte{byte(i >> 8), byte(i), 0, 0}
		if _, err := h.Resolve(r); err != nil {
			t.Fatal(err)
		}
		if n := h.shared.len(); n > 1000 {
			t.Fatalf("%d answers are kept", n)
		}
	}
	if calls != 10000 || h.shared.len() != 1000 {
		t.Errorf("%d calls, %d answers", calls, h.shared.len())
	}
	r := from("203.0.113.7")
	r.FirstBytes = []byte{0, 0, 0}
	for range 2 {
		h.Resolve(r) // lacks a byte of the key
	}
	if calls != 10002 || h.shared.len() != 1000 {
		t.Errorf("%d calls, %d answers", calls, h.shared.len())
	}
}

func TestPanicIsAnError(t *testing.T) {
	h := hosted(t, `"cache": {"key": ["src_ip"]}`, func(context.Context, *Request) (Answer, error) { panic("at the disco") })
	if _, err := h.Resolve(from("203.0.113.7")); err == nil || !strings.Contains(err.Error(), "at the disco") {
		t.Errorf("%v", err)
	}
	wantCounts(t, h, [numResults]int{0, 0, 0, 1}, [numFound]int{0, 0, 1, 0, 0})
}

// TestSharedOverReloads opens a resolver like another before that one goes.
func TestSharedOverReloads(t *testing.T) {
	calls := 0
	do := func(context.Context, *Request) (Answer, error) { calls++; return Answer{Pool: "pool-a"}, nil }
	first := hosted(t, `"cache": {"key": ["src_ip"]}, "timeout": "1s"`, do)
	first.Resolve(from("203.0.113.7"))
	same := hosted(t, `"timeout": "1s", "cache": {"key": ["src_ip"]}`, do) // in another order
	other := hosted(t, `"cache": {"key": ["src_ip"]}, "timeout": "2s"`, do)
	if same.shared != first.shared || other.shared == first.shared {
		t.Error("what is shared does not go with the config")
	}
	same.Resolve(from("::ffff:203.0.113.7"))
	if calls != 1 {
		t.Errorf("%d calls", calls)
	}
}

func TestCloseWaitsForCalls(t *testing.T) {
	begun, end := make(chan bool), make(chan bool)
	h := hosted(t, `"timeout": "1h"`, func(context.Context, *Request) (Answer, error) {
		begun <- true
		<-end
		return Answer{Pool: "pool-a"}, nil
	})
	f := h.resolver.(*fake)
	result := make(chan error)
	go func() {
		_, err := h.Resolve(from("203.0.113.7"))
		result <- err
	}()
	<-begun
	h.Cleanup() // which hosted calls again
	if f.closed.Load() {
		t.Error("closed under a call")
	}
	end <- true
	if err := <-result; err != nil {
		t.Errorf("the call under way: %v", err)
	}
	if !f.closed.Load() {
		t.Error("not closed after the last call")
	}
	if _, err := h.Resolve(from("203.0.113.7")); !errors.Is(err, errGone) {
		t.Errorf("a call after all: %v", err)
	}
	h.uses.Store(1) // for Cleanup
	if _, err := takeShared(h.key, nil); err != nil {
		t.Fatal(err)
	}
}

// A flow that a reload overtakes before it asks is answered by the resolver that
// has the name now.
func TestOvertakenByReload(t *testing.T) {
	load := func(pool string) *Host {
		does.Store(pool, resolve(func(context.Context, *Request) (Answer, error) { return Answer{Pool: pool}, nil }))
		h, err := open(t, fmt.Sprintf(`{"resolver": "fake", "id": %q}`, pool))
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	old := load("pool-old")
	next := load("pool-new")
	old.Cleanup()
	if a, err := old.Resolve(from("203.0.113.7")); err != nil || a.Pool != "pool-new" {
		t.Errorf("after a reload: %v, %v, want the answer of the new one", a, err)
	}
	next.Cleanup()
	if _, err := old.Resolve(from("203.0.113.7")); !errors.Is(err, errGone) {
		t.Errorf("after the end: %v", err)
	}
}

func TestKey(t *testing.T) {
	all := func(mod func(*Request), parts ...string) cacheKey {
		t.Helper()
		r := from("203.0.113.7")
		r.SNI, r.RoutingKey, r.FirstBytes = "a.example.com", "k", []byte("0123456789")
		mod(r)
		var ps []keyPart
		for _, s := range parts {
			p, err := parseKeyPart(s)
			if err != nil {
				t.Fatal(err)
			}
			ps = append(ps, p)
		}
		k, ok := key(ps, r)
		if !ok {
			return cacheKey{}
		}
		return k
	}
	same := func(*Request) {}
	port := func(r *Request) { r.Client = netip.AddrPortFrom(r.Client.Addr(), 4001) }
	mapped := func(r *Request) { r.Client = netip.MustParseAddrPort("[::ffff:203.0.113.7]:4000") }
	last := func(r *Request) { r.FirstBytes = []byte("012345678x") }
	moved := func(r *Request) { r.SNI, r.RoutingKey = "a.example.co", "mk" }
	for name, tc := range map[string]struct {
		parts string
		mod   func(*Request)
		equal bool
	}{
		"the port of src_ip":              {"src_ip", port, true},
		"the port of src_ip_port":         {"src_ip_port", port, false},
		"an IPv4-mapped address":          {"src_ip_port", mapped, true},
		"a byte behind the span":          {"first_bytes:0:9", last, true},
		"a byte in the span":              {"first_bytes:9:10", last, false},
		"a letter moved to the next part": {"sni routing_key", moved, false},
	} {
		parts := strings.Fields(tc.parts)
		if got := all(same, parts...) == all(tc.mod, parts...); got != tc.equal {
			t.Errorf("%s: equal %v", name, got)
		}
	}
	for parts, mod := range map[string]func(*Request){
		"sni":              func(r *Request) { r.SNI = "" },
		"routing_key":      func(r *Request) { r.RoutingKey = "" },
		"first_bytes:0:11": same,
	} {
		if all(mod, "src_ip", parts) != (cacheKey{}) {
			t.Errorf("%s: a flow that lacks it has a key", parts)
		}
	}
}

func TestMistakes(t *testing.T) {
	for config, want := range map[string]string{
		`null`:                                 "null is not an object",
		`{}`:                                   "resolver: the kind is missing",
		`{"resolver": "htp"}`:                  "resolver: there is no wayhouse.resolvers.htp; did you mean http?",
		`{"resolver": "http", "timeut": "1s"}`: "timeut: unknown key; did you mean timeout?",
		`{"resolver": "http"}`:                 "endpoint: none; give a URL",
		`{"resolver": "http", "endpoint": "matchmaker:80"}`:                                                 "begins with neither http:// nor https://",
		`{"resolver": "http", "endpoint": "https://u:p@h"}`:                                                 "a user in the URL",
		`{"resolver": "http", "endpoint": "http://h", "timeout": "0s"}`:                                     "timeout: 0s is not above zero; leave it out for 40ms",
		`{"resolver": "http", "endpoint": "http://h", "on_error": "ignore"}`:                                `on_error: "ignore" is none of reject, fallback_route, stale_ok`,
		`{"resolver": "http", "endpoint": "http://h", "on_error": "stale_ok"}`:                              "on_error: stale_ok without a cache",
		`{"resolver": "http", "endpoint": "http://h", "cache": {}}`:                                         "cache.key: none",
		`{"resolver": "http", "endpoint": "http://h", "cache": {"key": ["src"]}}`:                           `cache.key[0]: "src" is none of src_ip,`,
		`{"resolver": "http", "endpoint": "http://h", "cache": {"key": ["first_bytes:4:4"]}}`:               `cache.key[0]: "first_bytes:4:4": from byte A up to B`,
		`{"resolver": "http", "endpoint": "http://h", "cache": {"key": ["src_ip", "sni", "src_ip"]}}`:       "cache.key[2]: src_ip is given twice",
		`{"resolver": "http", "endpoint": "http://h", "cache": {"key": ["src_ip"], "max_entries": 0}}`:      "cache.max_entries: 0 is not from 1 to 1000000; leave it out for 200000",
		`{"resolver": "http", "endpoint": "http://h", "cache": {"key": ["src_ip"], "positive_ttl": "-1s"}}`: "cache.positive_ttl: -1s is negative",
		`{"resolver": "http", "endpoint": "http://h", "allow_targets": ["lan"]}`:                            `allow_targets[0]: "lan" is no network`,
		`{"resolver": "http", "endpoint": "http://h", "ca_file": "/x"}`:                                     "ca_file: the endpoint is http://",
		`{"resolver": "http", "endpoint": "https://h", "ca_file": "/no/such"}`:                              "ca_file: open /no/such",
		`{"resolver": "http", "endpoint": "http://h", "headers": {"A B": "x"}}`:                             `headers: "A B" is no name`,
		`{"resolver": "http", "endpoint": "http://h", "headers": {"A": "{env.NO_SUCH_VARIABLE}"}}`:          "headers.A: ",
		`{"resolver": "http", "endpoint": "http://h", "wait_bytes": 20000}`:                                 "wait_bytes: 20000 is not from 0 to 16384",
		`{"resolver": "grpc", "endpoint": "https://h/path"}`:                                                "endpoint: gRPC has no path",
		`{"resolver": "grpc", "endpoint": "https://h", "headers": {"grpc-timeout": "1"}}`:                   "headers: gRPC keeps",
	} {
		h, err := open(t, config)
		if err == nil {
			h.Cleanup()
		}
		if err == nil || !strings.Contains(err.Error(), want) || strings.HasPrefix(err.Error(), "provision ") {
			t.Errorf("%s: %v, want %s", config, err, want)
		}
	}
}
