package agones

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/kube/kubetest"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// Players follow the states of game servers: those of one that shuts down stay
// until they are done, new ones go to the one that is ready.
func TestPlayersFollowGameServers(t *testing.T) {
	api := kubetest.New(t)
	one, two := kit.NewUDPBackend(t, 1, "127.0.0.1:0"), kit.NewUDPBackend(t, 2, "127.0.0.1:0")
	at := func(b *kit.UDPBackend, state string) server {
		return server{state: state, address: "127.0.0.1", port: int(netip.MustParseAddrPort(b.Addr).Port())}
	}
	put(api, "one", at(one, "Allocated"))
	game := kit.Local(7777)
	p := kit.Start(t, kit.App(
		kit.M{"game": kit.ToPool("arena", "udp/"+game)},
		kit.M{"arena": kit.M{
			"source": options(api, kit.M{"source": "agones", "refresh_interval": "1h"}),
			"health": kit.M{"check": "none"},
		}},
	), kit.Options{})
	backends := func() string {
		var pool struct{ Backends []struct{ Addr string } }
		p.JSON("/pools/arena", &pool)
		var s []string
		for _, b := range pool.Backends {
			s = append(s, b.Addr)
		}
		return strings.Join(s, " ")
	}
	kit.Settles(t, "backends", one.Addr, backends)
	kit.Settles(t, "watches", 1, api.Watches)
	const sessions = 4
	players := func() *kit.Load {
		l := kit.StartLoad(t, kit.LoadOptions{UDP: game, Flows: sessions, Rate: 200})
		l.Round(t)
		return l
	}
	before := players()
	put(api, "two", at(two, "Ready"))
	put(api, "one", at(one, "Shutdown"))
	kit.Settles(t, "backends afterwards", two.Addr, backends)
	after := players()
	before.Round(t)
	for name, l := range map[string]*kit.Load{"before": before, "after": after} {
		if r := l.Stop(); !r.Perfect() {
			t.Errorf("the players from %s: %s", name, &r)
		}
	}
	if one.Flows() != sessions || two.Flows() != sessions {
		t.Errorf("the servers have seen %d and %d players, want %d each", one.Flows(), two.Flows(), sessions)
	}
	if n := p.Metric("discovery_refresh_total", "pool", "arena", "kind", "agones", "result", "ok"); n < 2 {
		t.Errorf("discovery_refresh_total is %v", n)
	}
}
