package registries

import (
	"encoding/pem"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/kube/kubetest"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery/consul/consultest"
)

const canary = "canary-5e8a-token"

// registry is what knows of the backends.
type registry struct {
	source kit.M
	set    func(addrs ...string)
	broken func(yes bool) // answers 500
	lists  func() int
	waits  func() int // questions that wait for changes
	again  int        // how many there are after a change: Consul is asked anew
}

func newConsul(t *testing.T) *registry {
	a := consultest.NewTLS(t)
	a.Require(canary)
	return &registry{
		source: kit.M{
			"source": "consul", "service": "game", "addr": a.URL, "token_file": file(t, canary+"\n"),
			"ca_file": authority(t, a.Certificate().Raw),
		},
		set: func(addrs ...string) {
			var list []consultest.Instance
			for _, s := range addrs {
				to := netip.MustParseAddrPort(s)
				list = append(list, consultest.Instance{ID: s, Address: to.Addr().String(), Port: int(to.Port())})
			}
			a.Set("game", list...)
		},
		broken: func(yes bool) { a.Look(refusal(yes)) },
		lists:  a.Lists, waits: a.Waits, again: 2,
	}
}

const slices = "/apis/discovery.k8s.io/v1/namespaces/games/endpointslices"

func newKubernetes(t *testing.T) (*registry, *kubetest.API) {
	api := kubetest.NewTLS(t)
	api.Require(canary)
	return &registry{
		source: kit.M{
			"source": "kubernetes", "service": "game", "namespace": "games", "api": api.URL, "token_file": file(t, canary+"\n"),
			"ca_file": authority(t, api.Certificate().Raw),
		},
		set: func(addrs ...string) {
			// A port of one slice is that of all its endpoints: each backend has a
			// slice of its own, and of those that go a slice without endpoints stays.
			for _, name := range []string{"a", "b"} {
				slice := kit.M{"addressType": "IPv4", "endpoints": kit.A{}, "ports": kit.A{}}
				if len(addrs) > 0 {
					to := netip.MustParseAddrPort(addrs[0])
					slice["endpoints"] = kit.A{kit.M{"addresses": kit.A{to.Addr().String()}, "conditions": kit.M{"ready": true}}}
					slice["ports"] = kit.A{kit.M{"name": "game", "port": to.Port()}}
					addrs = addrs[1:]
				}
				api.Put(slices, "game-"+name, map[string]string{"kubernetes.io/service-name": "game"}, slice)
			}
		},
		broken: func(yes bool) { api.Look(refusal(yes)) },
		lists:  api.Lists, waits: api.Watches, again: 1,
	}, api
}

func refusal(yes bool) func(http.ResponseWriter, *http.Request) bool {
	if !yes {
		return nil
	}
	return func(w http.ResponseWriter, r *http.Request) bool {
		http.Error(w, "no leader, says "+r.Header.Get("Authorization")+r.Header.Get("X-Consul-Token"), http.StatusInternalServerError)
		return true
	}
}

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func authority(t *testing.T, raw []byte) string {
	t.Helper()
	return file(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})))
}

// config has a pool that a registry tells the backends of.
func config(r *registry, game, interval string, more ...kit.M) kit.M {
	return kit.App(
		kit.M{"game": kit.ToPool("lobby", "udp/"+game, "tcp/"+game)},
		kit.M{"lobby": kit.M{"source": "match", "health": kit.M{"check": "none"}}},
		append(more, kit.M{"sources": kit.M{"match": kit.With(r.source, kit.M{"refresh_interval": interval})}})...,
	)
}

// server is a game server over TCP and UDP.
type server struct {
	udp *kit.UDPBackend
	tcp *kit.TCPBackend
}

func newServer(t *testing.T, id uint16) server {
	udp := kit.NewUDPBackend(t, id, "127.0.0.1:0")
	return server{udp, kit.NewTCPBackend(t, id, udp.Addr)}
}

func (s server) flows() int { return s.udp.Flows() + s.tcp.Flows() }

func backends(p *kit.Process) func() string {
	return func() string {
		var pool struct{ Backends []struct{ Addr string } }
		p.JSON("/pools/lobby", &pool)
		var all []string
		for _, b := range pool.Backends {
			all = append(all, b.Addr)
		}
		return strings.Join(all, " ")
	}
}

func refreshes(p *kit.Process, kind, result string) func() bool {
	before := p.Metric("discovery_refresh_total", "pool", "lobby", "kind", kind, "result", result)
	return func() bool {
		return p.Metric("discovery_refresh_total", "pool", "lobby", "kind", kind, "result", result) > before
	}
}

// TestPlayersFollow has the backend of a pool replaced in the registry: who
// plays stays, who comes goes to the new one, an hour before the source would be
// asked again. Then the registry forgets everything, and fails.
func TestPlayersFollow(t *testing.T) {
	for _, kind := range []string{"consul", "kubernetes"} {
		t.Run(kind, func(t *testing.T) {
			var r *registry
			if kind == "consul" {
				r = newConsul(t)
			} else {
				r, _ = newKubernetes(t)
			}
			one, two := newServer(t, 1), newServer(t, 2)
			r.set(one.udp.Addr)
			game := kit.Local(kit.Port(t))
			p := kit.Start(t, config(r, game, "1h"), kit.Options{})
			kit.Settles(t, "backends", one.udp.Addr, backends(p))
			kit.Settles(t, "questions that wait", 1, r.waits)

			const conns, sessions = 3, 3
			players := func() *kit.Load {
				l := kit.StartLoad(t, kit.LoadOptions{TCP: game, UDP: game, Conns: conns, Flows: sessions, Rate: 200})
				l.Round(t)
				return l
			}
			before := players()
			r.set(two.udp.Addr)
			kit.Settles(t, "backends afterwards", two.udp.Addr, backends(p))
			after := players()

			// A reload that leaves the source alone asks nothing.
			kit.Settles(t, "questions that wait", r.again, r.waits)
			lists := r.lists()
			p.MustLoad(config(r, game, "1h", kit.M{"limits": kit.M{"max_connections": 1000}}))
			if got := backends(p)(); got != two.udp.Addr {
				t.Errorf("after a reload the backends are %q, want %q", got, two.udp.Addr)
			}
			if n := r.lists(); n != lists {
				t.Errorf("a reload has asked %d times", n-lists)
			}

			// Nothing of what follows changes the set.
			empty := refreshes(p, kind, "empty")
			r.set()
			kit.Eventually(t, "an empty answer", empty)
			failed := refreshes(p, kind, "error")
			r.broken(true)
			r.set(one.udp.Addr)
			p.MustLoad(config(r, game, "1m")) // another source, which asks at once
			kit.Eventually(t, "a failure", failed)
			r.broken(false)
			kit.Settles(t, "backends when it works again", one.udp.Addr, backends(p))

			before.Round(t)
			for name, l := range map[string]*kit.Load{"before": before, "after": after} {
				if report := l.Stop(); !report.Perfect() {
					t.Errorf("the players from %s: %s", name, &report)
				}
			}
			if one.flows() != conns+sessions || two.flows() != conns+sessions {
				t.Errorf("the servers have seen %d and %d players, want %d each", one.flows(), two.flows(), conns+sessions)
			}
			for _, path := range []string{"/pools", "/config/", "/metrics", "/debug/pprof/cmdline"} {
				if _, text := p.Get(path); strings.Contains(text, canary) {
					t.Errorf("GET %s shows the token", path)
				}
			}
			if log := p.Log(); strings.Contains(log, canary) {
				t.Errorf("the log shows the token: %s", log)
			} else if !strings.Contains(log, "no leader, says") {
				t.Error("the log does not tell of the failure, so that it proves nothing")
			}
		})
	}
}

// TestWithoutTheRightToWatch has a service account that may list only: there is
// one warning, and the pool follows by asking.
func TestWithoutTheRightToWatch(t *testing.T) {
	r, api := newKubernetes(t)
	api.Look(func(w http.ResponseWriter, req *http.Request) bool {
		if !kubetest.IsWatch(req) {
			return false
		}
		kubetest.Refuse(w, http.StatusForbidden, "Forbidden", `endpointslices is forbidden: User "x" cannot watch resource "endpointslices"`)
		return true
	})
	one, two := newServer(t, 1), newServer(t, 2)
	r.set(one.udp.Addr)
	p := kit.Start(t, config(r, kit.Local(kit.Port(t)), "1s"), kit.Options{})
	kit.Settles(t, "backends", one.udp.Addr, backends(p))
	kit.Eventually(t, "a second try to watch", func() bool { return r.waits() > 2 }) // each is tried again with its token, once
	r.set(two.udp.Addr)
	kit.Settles(t, "backends afterwards", two.udp.Addr, backends(p))
	const warning = "discovery source does not tell of changes"
	if n := strings.Count(p.Log(), warning); n != 1 {
		t.Errorf("there are %d warnings, want 1", n)
	}
	if !strings.Contains(p.Log(), "cannot watch resource") {
		t.Error("the warning does not say what is missing")
	}
}
