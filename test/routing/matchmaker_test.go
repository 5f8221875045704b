package routing

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	resolverv1 "github.com/wayhouse-proxy/wayhouse/modules/resolver/proto"
)

// matchmaker knows the pools and targets of sessions by their tokens, and
// speaks HTTP and gRPC.
type matchmaker struct {
	resolverv1.UnimplementedResolverServer

	mu     sync.Mutex
	places map[string]answer // by token
	down   bool
	asked  map[string]int // by token
	wrong  []string       // requests that lack something
}

type answer struct {
	Pool   string `json:"pool,omitempty"`
	Target string `json:"target,omitempty"`
}

// decide answers one request; ok is false when the matchmaker is down.
func (m *matchmaker) decide(listener, src, dst string, first []byte) (a answer, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.down {
		return a, false
	}
	if !strings.HasPrefix(src, "127.0.0.1:") || !strings.HasPrefix(dst, "127.0.0.1:") || len(first) < tokenLen || listener == "" {
		m.wrong = append(m.wrong, fmt.Sprintf("listener %q src %q dst %q first bytes %q", listener, src, dst, first))
		return a, true
	}
	token := string(first[:tokenLen])
	m.asked[token]++
	return m.places[token], true
}

func (m *matchmaker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Listener, Src, Dst string
		First              []byte `json:"first_bytes_b64"`
	}
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.Method != http.MethodPost {
		http.Error(w, fmt.Sprint(err), http.StatusBadRequest)
		return
	}
	a, ok := m.decide(q.Listener, q.Src, q.Dst, q.First)
	if !ok {
		http.Error(w, "down", http.StatusServiceUnavailable)
		return
	}
	json.NewEncoder(w).Encode(a)
}

// Resolve is the gRPC method.
func (m *matchmaker) Resolve(_ context.Context, q *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
	a, ok := m.decide(q.Listener, q.Src, q.Dst, q.FirstBytes)
	if !ok {
		return nil, fmt.Errorf("down")
	}
	return &resolverv1.ResolveResponse{Pool: a.Pool, Target: a.Target}, nil
}

func (m *matchmaker) times(token string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.asked[token]
}

const tokenLen = 16

// token is one of 16 bytes.
func token(name string) string { return (name + strings.Repeat(".", tokenLen))[:tokenLen] }

// Example A: one port, many instances, and a matchmaker that decides by the
// token with which a session begins. The proxy keeps its answers and, when it
// has none, turns the client away.
func TestMatchmaker(t *testing.T) {
	for _, kind := range []string{"http", "grpc"} {
		t.Run(kind, func(t *testing.T) { matchmaking(t, kind) })
	}
}

func matchmaking(t *testing.T, kind string) {
	town := newTown(t, "eu", "us", "instance")
	m := &matchmaker{asked: map[string]int{}, places: map[string]answer{
		token("u-eu"): {Pool: "eu-udp"}, token("u-us"): {Pool: "us-udp"}, token("u-inst"): {Target: town["instance"].udp},
		token("t-eu"): {Pool: "eu"}, token("t-us"): {Pool: "us"}, token("t-inst"): {Target: town["instance"].tcp},
		token("t-gone"): {Pool: "no-such-pool"}, token("t-far"): {Target: "198.51.100.7:7777"},
	}}
	var endpoint string
	if kind == "http" {
		s := httptest.NewServer(m)
		t.Cleanup(s.Close)
		endpoint = s.URL
	} else {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		resolverv1.RegisterResolverServer(s, m)
		go s.Serve(ln)
		t.Cleanup(s.Stop)
		endpoint = "http://" + ln.Addr().String()
	}
	addr, btcp, budp := bind(t)
	peek := kit.M{"peek": kit.M{"timeout": "20s"}}
	resolve := kit.Route(kit.M{"handler": "resolve", "resolver": "matchmaker"})
	p := kit.Start(t, kit.App(kit.M{
		"public-udp": kit.With(kit.Listener([]string{budp}, resolve), peek),
		"public-tcp": kit.With(kit.Listener([]string{btcp}, resolve), peek),
	}, town.pools(), kit.M{"resolvers": kit.M{"matchmaker": kit.M{
		"resolver": kind, "endpoint": endpoint, "timeout": "20s", "on_error": "reject",
		"allow_targets": kit.A{"127.0.0.0/8"},
		"cache":         kit.M{"key": kit.A{"first_bytes:0:16"}, "positive_ttl": "10m", "negative_ttl": "10m"},
	}}}), kit.Options{})

	for name, want := range map[string]string{"eu": "eu", "us": "us", "inst": "instance"} {
		for i := range 3 { // of the second and third the proxy knows already
			what := fmt.Sprintf("%s, client %d", name, i)
			b := []byte(token("u-"+name) + fmt.Sprint("hello from ", i))
			reaches(t, what, addr, want, b, []byte("again"))
			s := []byte(token("t-"+name) + fmt.Sprint("hello from ", i))
			goes(t, what, addr, want, s[:5], s[5:tokenLen-1], s[tokenLen-1:])
		}
		for _, tok := range []string{token("u-" + name), token("t-" + name)} {
			if n := m.times(tok); n != 1 {
				t.Errorf("%s: asked %d times, want once", tok, n)
			}
		}
	}
	for i := range 2 { // the second is turned away by what is known
		dropped(t, p, "a token that nobody knows", "public-udp", addr, "no_route", []byte(token("u-unknown")))
		cutOff(t, p, "a token that nobody knows", "public-tcp", addr, "no_route", []byte(token("t-unknown")))
		if n := m.times(token("t-unknown")); n != 1 {
			t.Errorf("after client %d: asked %d times, want once", i, n)
		}
	}
	cutOff(t, p, "a pool that there is not", "public-tcp", addr, "no_route", []byte(token("t-gone")))
	cutOff(t, p, "a target that is not allowed", "public-tcp", addr, "no_route", []byte(token("t-far")))

	m.mu.Lock()
	m.down = true
	m.mu.Unlock()
	reaches(t, "a known token without a matchmaker", addr, "eu", []byte(token("u-eu")))
	goes(t, "a known token without a matchmaker", addr, "us", []byte(token("t-us")))
	dropped(t, p, "a new token without a matchmaker", "public-udp", addr, "no_route", []byte(token("u-new")))
	cutOff(t, p, "a new token without a matchmaker", "public-tcp", addr, "no_route", []byte(token("t-new")))
	m.mu.Lock()
	m.down = false
	m.places[token("t-new")] = answer{Pool: "eu"}
	m.mu.Unlock()
	goes(t, "the new token, the matchmaker being back", addr, "eu", []byte(token("t-new")))

	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.wrong) > 0 {
		t.Errorf("requests without what they should have: %q", m.wrong)
	}
}
