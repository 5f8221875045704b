package docker

import (
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// server is a container with a game in it, over TCP and UDP.
type server struct {
	running
	udp *kit.UDPBackend
	tcp *kit.TCPBackend
}

func newServer(t *testing.T, id uint16, name string) *server {
	t.Helper()
	s := &server{running: game(name, "127.0.0.1"), udp: kit.NewUDPBackend(t, id, "127.0.0.1:0")}
	s.tcp = kit.NewTCPBackend(t, id, s.udp.Addr)
	_, s.labels["wayhouse.port"], _ = strings.Cut(s.udp.Addr, ":")
	return s
}

// flows is how many players it has seen.
func (s *server) flows() int { return s.udp.Flows() + s.tcp.Flows() }

// Players follow containers: those of one that has stopped stay until they are
// done, new ones go to the one that has started.
func TestPlayersFollowContainers(t *testing.T) {
	f, endpoint := newFake(t)
	one, two := newServer(t, 1, "one"), newServer(t, 2, "two")
	f.run(one.running)
	game := kit.Local(7777)
	p := kit.Start(t, kit.App(
		kit.M{"game": kit.ToPool("lobby", "udp/"+game, "tcp/"+game)},
		kit.M{"lobby": kit.M{
			"source": kit.M{"source": "docker", "endpoint": endpoint, "labels": kit.A{"wayhouse.pool=lobby"}, "refresh_interval": "1h"},
			"health": kit.M{"check": "none"},
		}},
	), kit.Options{})
	backends := func() string {
		var pool struct {
			Source   string
			Backends []struct{ Addr string }
		}
		p.JSON("/pools/lobby", &pool)
		if pool.Source != "docker" {
			t.Errorf("the source is %q", pool.Source)
		}
		var s []string
		for _, b := range pool.Backends {
			s = append(s, b.Addr)
		}
		return strings.Join(s, " ")
	}
	kit.Settles(t, "backends", one.udp.Addr, backends)
	kit.Settles(t, "streams of events", 1, f.listening)

	const conns, sessions = 3, 3
	players := func() *kit.Load {
		l := kit.StartLoad(t, kit.LoadOptions{TCP: game, UDP: game, Conns: conns, Flows: sessions, Rate: 200})
		l.Round(t)
		return l
	}
	before := players()
	f.run(two.running)
	f.change("one", "die", func(c *running) { c.state = "exited" })
	kit.Settles(t, "backends afterwards", two.udp.Addr, backends)
	after := players()
	before.Round(t)
	for name, l := range map[string]*kit.Load{"before": before, "after": after} {
		if r := l.Stop(); !r.Perfect() {
			t.Errorf("the players from %s: %s", name, &r)
		}
	}
	if one.flows() != conns+sessions || two.flows() != conns+sessions {
		t.Errorf("the servers have seen %d and %d players, want %d each", one.flows(), two.flows(), conns+sessions)
	}
	if n := p.Metric("discovery_backends", "pool", "lobby"); n != 1 {
		t.Errorf("discovery_backends is %v", n)
	}
	if n := p.Metric("discovery_refresh_total", "pool", "lobby", "kind", "docker", "result", "ok"); n < 2 {
		t.Errorf("discovery_refresh_total is %v", n)
	}
}
