package listener_test

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	wl "github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// notes is a shield that only listens.
type notes struct {
	mu       sync.Mutex
	admitted []string
	refused  []string
}

func (n *notes) Refused(source netip.Addr, rule string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.refused = append(n.refused, source.String()+" "+rule)
}

func (n *notes) Admitted(client netip.AddrPort) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.admitted = append(n.admitted, client.String())
}

// TestShieldHearsOfSessions holds that a shield is told of sessions that come to
// be, at once or held for a handler, and not of those that get no socket or that
// a filter keeps out.
func TestShieldHearsOfSessions(t *testing.T) {
	backend := testkit.NewUDPBackend(t, 1, "127.0.0.1:0")
	route := func(more string) string {
		return fmt.Sprintf(`"routes": [{"handle": [%s]}]`, more)
	}
	pool := func(more string) string {
		return fmt.Sprintf(`{"handler": "pool", "targets": [%q], "health": {"check": "none"}%s}`, backend.Addr, more)
	}
	load(t, `{"listeners": {
		"served": `+listener("udp/127.0.0.1:0", "", route(pool("")))+`,
		"held":   `+listener("udp/127.0.0.1:0", "", route(`{"handler": "echo"}`))+`,
		"short":  `+listener("udp/127.0.0.1:0", "", route(pool(`, "source_addresses": ["192.0.2.1"]`)))+`,
		"closed": `+listener("udp/127.0.0.1:0", `"filters": [{"filter": "acl", "deny": ["127.0.0.0/8"]}],`, route(pool("")))+`}}`)
	all := map[string]*notes{}
	for name, l := range proxy.Running().Listeners {
		all[name] = new(notes)
		l.SetShield(all[name])
	}
	wl.Running().UDP.Flows(func(*relay.Info) bool { return true }) // every worker has seen that
	clients := map[string]net.Conn{}
	for name := range all {
		clients[name] = dial(t, "udp", addr(t, name))
		send(t, clients[name], "ping")
	}
	for _, name := range []string{"served", "held"} {
		expect(t, clients[name], "ping")
	}
	dropped := func(name string, why relay.Drop) (n uint64) {
		for i := range flow.ListenerOf(name).Workers(wl.Running().UDP.Workers()) {
			n += flow.ListenerOf(name).Workers(wl.Running().UDP.Workers())[i].Dropped[why].Load()
		}
		return n
	}
	testkit.Settles(t, "datagrams without a socket", true, func() bool { return dropped("short", relay.UpstreamBind) > 0 })
	testkit.Settles(t, "datagrams kept out", true, func() bool { return dropped("closed", relay.Filtered) > 0 })
	for name, n := range all {
		var admitted, refused []string
		switch name {
		case "served", "held":
			admitted = []string{clients[name].LocalAddr().String()}
		case "closed":
			refused = []string{"127.0.0.1 acl"}
		}
		n.mu.Lock()
		if !slices.Equal(n.admitted, admitted) || !slices.Equal(n.refused, refused) {
			t.Errorf("%s: admitted %v, refused %v, want %v and %v", name, n.admitted, n.refused, admitted, refused)
		}
		n.mu.Unlock()
	}
}
