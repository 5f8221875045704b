package admission

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// balancer is the address that tests of PROXY headers trust.
const balancer = "127.0.0.2"

// headed is a connection of a balancer that tells of a client.
func headed(t *testing.T, client, to string) *client {
	t.Helper()
	c := dial(t, "tcp", balancer, to)
	f := proxyproto.Form{Version: proxyproto.V2}
	c.Write(f.Append(nil, &proxyproto.Flow{Client: netip.MustParseAddrPort(client), Local: netip.MustParseAddrPort("198.51.100.2:25565")}))
	return c
}

// server is the backend that a client reaches, with a header in front of what it
// asks.
func server(t *testing.T, c *client, head []byte) uint16 {
	t.Helper()
	q := kit.Frame{Flow: 1, Seq: 1}
	c.Write(q.Append(head))
	c.SetReadDeadline(time.Now().Add(kit.Long))
	buf := make([]byte, 2000)
	n, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	f, _, err := kit.ParseFrame(buf[:n])
	if err != nil {
		t.Fatal(err)
	}
	return f.Backend
}

// TestProxied goes through what operators and pools see of clients behind a
// balancer: the sessions, the refused, hints, hashes, companions and overload.
func TestProxied(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	backends := make([]*kit.TCPBackend, 4)
	var targets []string
	for i := range backends {
		backends[i] = kit.NewTCPBackend(t, uint16(i), "127.0.0.1:0")
		targets = append(targets, backends[i].Addr)
	}
	hinted := kit.NewTCPBackend(t, 99, "127.0.0.1:0")
	pools := kit.M{"many": kit.With(kit.Pool(targets...), kit.M{"balancer": kit.M{"policy": "consistent_hash"}}), "hinted": kit.Pool(hinted.Addr)}
	l := kit.With(kit.ToPool("many", "tcp/"+addr), kit.M{
		"accept_proxy": kit.M{"from": kit.A{balancer}, "require": true},
		"route_hint":   true,
		"filters":      kit.A{kit.M{"filter": "acl", "deny": kit.A{"192.0.2.0/24"}}, kit.M{"filter": "geo", "deny": kit.A{"DE"}}},
	})
	p := kit.Start(t, kit.App(kit.M{"l": l}, pools, kit.M{"geo_db": countries(t, "100.64.0.0/16", "DE")}), kit.Options{})

	type session struct{ Peer, Local, Backend string }
	sessions := func(src string) (list []session) {
		p.JSON("/sessions?src="+src, &list)
		return list
	}
	used := make(map[string]bool)
	for i := range 12 { // the same backend for a client each time, and not for all
		var first string
		for port := range 3 {
			who := fmt.Sprintf("203.0.113.%d:%d", i, 1000+port)
			headed(t, who, addr).served()
			var mine []session
			for _, s := range sessions(fmt.Sprintf("203.0.113.%d", i)) {
				if s.Peer == who {
					mine = append(mine, s)
				}
			}
			if len(mine) != 1 {
				t.Fatalf("%v are the sessions of %s", mine, who)
			}
			if first == "" {
				first = mine[0].Backend
			}
			if mine[0].Backend != first {
				t.Errorf("%s went to %s, its first connection to %s", who, mine[0].Backend, first)
			}
		}
		used[first] = true
	}
	if len(used) < 2 {
		t.Errorf("all clients went to %v", used)
	}
	if list := sessions(balancer); len(list) != 0 {
		t.Errorf("sessions of the balancer: %v", list)
	}

	if status, body := p.Do(http.MethodPost, "/route-hint", []byte(`{"src_ip": "198.18.0.7", "pool": "hinted", "ttl_sec": 600}`)); status/100 != 2 {
		t.Fatal(status, body)
	}
	headed(t, "198.18.0.7:1", addr).served()
	if n := hinted.Conns(); n != 1 {
		t.Errorf("%d connections went where the hint says", n)
	}

	denied := headed(t, "192.0.2.7:7", addr)
	denied.silence()
	if n := refusals(p, "l", "acl"); n != 1 || !strings.Contains(p.Log(), `"remote":"192.0.2.7:7"`) {
		t.Errorf("%v are counted as refused by acl, and the log is %s", n, p.Log())
	}
	headed(t, "100.64.7.7:7", addr).silence()
	if n := refusals(p, "l", "geo"); n != 1 || !strings.Contains(p.Log(), `"remote":"100.64.7.7:7"`) {
		t.Errorf("%v are counted as refused by geo, and the log is %s", n, p.Log())
	}
	dial(t, "tcp", "127.0.0.3", addr).silence()
	if n := refusals(p, "l", "proxy_header"); n != 1 || !strings.Contains(p.Log(), `"rule":"proxy_header"`) {
		t.Errorf("%v are counted as refused by proxy_header, and the log is %s", n, p.Log())
	}
	if n := p.Metric("proxy_protocol_accepted_total", "listener", "l", "result", "client"); n != 37 {
		t.Errorf("%v headers are counted, want 37", n)
	}

	if status, body := p.Do(http.MethodPost, "/admin/overload", []byte(`{"level": 2}`)); status != 200 {
		t.Fatal(status, body)
	}
	headed(t, "203.0.113.1:5", addr).served() // comes back
	headed(t, "198.18.0.99:5", addr).silence()
	if n := refusals(p, "l", "overload"); n != 1 {
		t.Errorf("%v are counted as refused by overload", n)
	}
}

// TestProxiedFollow: a session goes where the client's connection is, by the
// addresses that the headers of both tell.
func TestProxiedFollow(t *testing.T) {
	login, game := kit.Local(kit.Port(t)), kit.Local(kit.Port(t))
	var targets []string
	for i := range 4 {
		at := kit.Local(kit.Port(t))
		kit.NewTCPBackend(t, uint16(i+1), at)
		kit.NewUDPBackend(t, uint16(i+1), at)
		targets = append(targets, at)
	}
	accept := kit.M{"accept_proxy": kit.M{"from": kit.A{balancer}, "require": true}}
	kit.Start(t, kit.App(kit.M{
		"login": kit.With(kit.ToPool("p", "tcp/"+login), accept),
		"game":  kit.With(kit.Listener([]string{"udp/" + game}, kit.Route(kit.M{"handler": "pool", "pool": "q", "follow": kit.M{"listener": "login"}})), accept),
	}, kit.M{"p": kit.Pool(targets...), "q": kit.Pool(targets...)}), kit.Options{})
	form := proxyproto.Form{Version: proxyproto.V2UDP, Mode: proxyproto.First}
	for i := range 8 { // by turns, so that the balancer alone would not agree
		who := fmt.Sprintf("203.0.113.%d", i)
		first := headed(t, who+":1000", login)
		want := server(t, first, nil)
		if i%2 == 0 {
			headed(t, "198.18.0.1:1", login).served() // takes a turn
		}
		c := dial(t, "udp", balancer, game)
		head := form.Append(nil, &proxyproto.Flow{Client: netip.MustParseAddrPort(who + ":2000"), Local: netip.MustParseAddrPort("198.51.100.2:7777")})
		if got := server(t, c, head); got != want {
			t.Errorf("%s has its session on %d, its connection on %d", who, got, want)
		}
	}
}

// TestProxiedGate: under overload the gate looks at what is behind the header,
// and who gets through has the address of the header.
func TestProxiedGate(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	l := kit.With(kit.Listener([]string{"tcp/" + addr}, kit.Match(kit.M{"first_bytes": kit.M{"prefix": "ascii:WH"}}, kit.M{"handler": "pool", "pool": "tcp"})),
		kit.M{"accept_proxy": kit.M{"from": kit.A{balancer}}, "peek": kit.M{"timeout": "100ms"}})
	p := kit.Start(t, kit.App(kit.M{"l": l}, game(t)), kit.Options{})
	if status, body := p.Do(http.MethodPost, "/admin/overload", []byte(`{"level": 1}`)); status != 200 {
		t.Fatal(status, body)
	}
	headed(t, "203.0.113.7:7", addr).served()
	if _, body := p.Get("/sessions?src=203.0.113.7"); !strings.Contains(body, `"peer":"203.0.113.7:7"`) {
		t.Errorf("sessions: %s", body)
	}
	c := headed(t, "203.0.113.8:8", addr)
	io.WriteString(c, "XY")
	c.silence()
	kit.Settles(t, "the count of overload", 1.0, func() float64 { return refusals(p, "l", "overload") })
	if n := p.Metric("active_connections"); n != 1 {
		t.Errorf("%v connections are there", n)
	}
}
