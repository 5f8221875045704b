package admission

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// countries is a database that places one network.
func countries(t *testing.T, network, country string) string {
	t.Helper()
	w, err := mmdbwriter.New(mmdbwriter.Options{DatabaseType: "Test", IncludeReservedNetworks: true})
	if err != nil {
		t.Fatal(err)
	}
	n := netip.MustParsePrefix(network)
	err = w.Insert(&net.IPNet{IP: n.Addr().AsSlice(), Mask: net.CIDRMask(n.Bits(), n.Addr().BitLen())},
		mmdbtype.Map{"country": mmdbtype.Map{"iso_code": mmdbtype.String(country)}})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "countries.mmdb")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := w.WriteTo(f); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestSourceLimitBehindServers holds that what a server of another app ends is
// given back, and that a guest is counted once however much it says.
func TestSourceLimitBehindServers(t *testing.T) {
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			addr := kit.Local(kit.Port(t))
			route := kit.Route(kit.M{"handler": "pool", "pool": network})
			listener := kit.With(kit.Listener([]string{network + "/" + addr}, route), kit.M{"filters": kit.A{kit.M{"filter": "source_limit", "max_per_ip": 2}}})
			p := kit.Start(t, served(kit.App(kit.M{"l": listener}, game(t)), "l", route), kit.Options{})
			one, two := dial(t, network, "127.0.0.1", addr), dial(t, network, "127.0.0.1", addr)
			for range 3 {
				one.served()
				two.served()
			}
			kept := dial(t, network, "127.0.0.1", addr)
			kept.ask()
			kit.Settles(t, "the count", 1.0, func() float64 { return refusals(p, "l", "src_conn_ip") })
			kept.silence()
			dial(t, network, "127.0.0.2", addr).served()
			one.served()
			if network == "tcp" {
				one.Close()
			} else {
				closeSession(t, p, one)
			}
			kit.Settles(t, "the flows there are", 2.0, func() float64 {
				return p.Metric("active_connections", "listener", "l") + p.Metric("active_udp_sessions", "listener", "l")
			})
			dial(t, network, "127.0.0.1", addr).served()
		})
	}
}

// closeSession ends the session of a client by the admin API.
func closeSession(t *testing.T, p *kit.Process, c *client) {
	t.Helper()
	var list []struct{ ID, Peer, Listener string }
	p.JSON("/sessions?proto=udp&listener=l", &list)
	for _, s := range list {
		if s.Peer == c.LocalAddr().String() {
			if status, body := p.Do(http.MethodDelete, "/sessions/"+s.ID, nil); status != http.StatusNoContent {
				t.Fatalf("DELETE /sessions/%s: %d %s", s.ID, status, body)
			}
			return
		}
	}
	t.Fatalf("%s is not listed among %v", c.LocalAddr(), list)
}

// TestFiltersBeforeWebsite has the HTTP server behind filters.
func TestFiltersBeforeWebsite(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.Apps(kit.M{
		"wayhouse": kit.M{"shutdown_grace": "1s", "listeners": kit.M{"web": kit.With(kit.Listener([]string{"tcp/" + addr}), kit.M{"filters": kit.A{
			kit.M{"filter": "acl", "deny": kit.A{"127.0.0.3"}},
			kit.M{"filter": "source_limit", "max_per_ip": 1},
		}})}},
		"http": kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{"wayhouse/web:80"}, "protocols": kit.A{"h1"}, "routes": kit.A{
			kit.M{"handle": kit.A{kit.M{"handler": "static_response", "body": "hello"}}}}}}},
	}), kit.Options{})
	get := func(c *client) string {
		t.Helper()
		fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: here\r\n\r\n")
		b := make([]byte, 2000)
		n, _ := c.Read(b)
		return string(b[:min(n, 15)])
	}
	from := func(a string) *client { return dial(t, "tcp", a, addr) }
	first := from("127.0.0.2")
	for range 3 {
		if got := get(first); got != "HTTP/1.1 200 OK" {
			t.Fatalf("answered %q", got)
		}
	}
	for rule, a := range map[string]string{"acl": "127.0.0.3", "src_conn_ip": "127.0.0.2"} {
		c := from(a)
		if b, err := io.ReadAll(c); len(b) > 0 {
			t.Errorf("%s: answered %q, %v", rule, b, err)
		}
		if n := refusals(p, "web", rule); n != 1 {
			t.Errorf("%v were counted under %s", n, rule)
		}
	}
	first.Close()
	kit.Settles(t, "connections", 0.0, func() float64 { return p.Metric("active_connections") })
	if got := get(from("127.0.0.2")); got != "HTTP/1.1 200 OK" {
		t.Errorf("after the end of the first: answered %q", got)
	}
}

// TestDrainingAdmitsWhoComesBack: a process that ends takes flows of those it
// has, and of nobody else.
func TestDrainingAdmitsWhoComesBack(t *testing.T) {
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			addr := kit.Local(kit.Port(t))
			p := kit.Start(t, kit.App(kit.M{"l": kit.ToPool(network, network+"/"+addr)}, game(t), kit.M{"shutdown_grace": "10m"}), kit.Options{})
			known := dial(t, network, "127.0.0.2", addr)
			known.served()
			set("2")(t, p)
			end(t, p)
			known.served()
			dial(t, network, "127.0.0.2", addr).served()
			c := dial(t, network, "127.0.0.1", addr)
			c.ask()
			kit.Settles(t, "the count of draining", 1.0, func() float64 { return refusals(p, "l", "draining") })
			c.silence()
			explains(t, p, "l", "127.0.0.2:9", `["ascii:x"]`, `"what":"pool"`)
			explains(t, p, "l", "127.0.0.1:9", `["ascii:x"]`, `"what":"refused"`)
			if n := p.Metric("filter_blocked_total", "filter", "overload"); n != 0 {
				t.Errorf("%v were counted as overload", n)
			}
		})
	}
}

// explains asks what would become of a client that sends some pieces of bytes.
func explains(t *testing.T, p *kit.Process, listener, src, pieces, want string) {
	t.Helper()
	if status, body := p.Do(http.MethodPost, "/explain", fmt.Appendf(nil, `{"listener": %q, "src": %q, "bytes": %s}`, listener, src, pieces)); status != 200 || !strings.Contains(body, want) {
		t.Errorf("%s is explained by %d %s, want %s", src, status, body, want)
	}
}
