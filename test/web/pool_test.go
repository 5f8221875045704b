package web

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	proxyproto "github.com/pires/go-proxyproto"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// panel is a web server that says its name, and who connects to it.
type panel struct {
	*httptest.Server
	mu    sync.Mutex
	conns map[string]int // by the address that connects
}

func newPanel(t *testing.T, name string, secure bool) *panel {
	t.Helper()
	p := &panel{conns: make(map[string]int)}
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", name, r.RemoteAddr)
	}))
	p.Config.ConnState = func(c net.Conn, s http.ConnState) {
		if s == http.StateNew {
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			p.mu.Lock()
			p.conns[host]++
			p.mu.Unlock()
		}
	}
	if secure {
		p.StartTLS()
	} else {
		p.Start()
	}
	t.Cleanup(p.Close)
	return p
}

func (p *panel) addr() string { return p.Listener.Addr().String() }

// site is a config with a pool behind a site.
func (c *town) site(t *testing.T, pool, proxy string) kit.M {
	t.Helper()
	return adapt(t, fmt.Sprintf(`{
	wayhouse {
		pool panel {
			%s
		}
		listener all tcp/%s {
			route {
				http_front web:443
			}
		}
	}
}
%s {
	bind wayhouse/web
	tls %s %s
	reverse_proxy %s
}
`, pool, c.addr, site, c.cert, c.key, proxy))
}

// answers asks n times, over one connection to the site, and counts who answers.
func answers(t *testing.T, h *http.Client, n int) map[string]int {
	t.Helper()
	by := make(map[string]int)
	for range n {
		body, _ := get(t, h, "https://"+site+"/")
		name, _, _ := strings.Cut(body, " ")
		by[name]++
	}
	return by
}

// TestPoolBehindASite has the pool's weights, states and health hold for a site.
func TestPoolBehindASite(t *testing.T) {
	c := newTown(t)
	a, b := newPanel(t, "a", false), newPanel(t, "b", false)
	for name, proxy := range map[string]string{
		"upstreams":               "{\n\t\tdynamic wayhouse panel\n\t\tlb_policy round_robin\n\t}",
		"upstreams and transport": "{\n\t\tdynamic wayhouse panel\n\t\tlb_policy round_robin\n\t\ttransport wayhouse\n\t}",
	} {
		t.Run(name, func(t *testing.T) {
			p := kit.Start(t, c.site(t, fmt.Sprintf("to %s %s\n\t\t\tbalancer weighted {\n\t\t\t\tweight %[1]s 3\n\t\t\t}", a.addr(), b.addr()), proxy), kit.Options{})
			h := c.client(t, 2, "127.0.0.9", site)
			if by := answers(t, h, 40); by["a"] != 30 || by["b"] != 10 {
				t.Errorf("by weight: %v", by)
			}
			if status, body := p.Do(http.MethodPatch, "/pools/panel/backends/"+a.addr(), []byte(`{"state": "draining"}`)); status/100 != 2 {
				t.Fatal(status, body)
			}
			if by := answers(t, h, 10); by["b"] != 10 {
				t.Errorf("while a drains: %v", by)
			}
		})
	}
}

// TestTransport has connections count as flows of the pool, come from its source
// address and go by its balancer.
func TestTransport(t *testing.T) {
	c := newTown(t)
	a, b := newPanel(t, "a", true), newPanel(t, "b", true)
	p := kit.Start(t, c.site(t, fmt.Sprintf("to %s %s\n\t\t\tsource_addresses 127.0.0.5\n\t\t\tmax_sessions 1", a.addr(), b.addr()),
		"panel:1 {\n\t\ttransport wayhouse panel {\n\t\t\ttls\n\t\t\ttls_insecure_skip_verify\n\t\t\tmax_conns_per_host 2\n\t\t}\n\t}"), kit.Options{})
	h := c.client(t, 1, "127.0.0.9", site)
	answers(t, h, 5)
	if n := p.Metric("backend_active_sessions", "pool", "panel"); n != 1 {
		t.Errorf("%v flows, want the one connection that is used again", n)
	}
	for _, s := range []*panel{a, b} {
		s.mu.Lock()
		for from := range s.conns {
			if from != "127.0.0.1" && from != "127.0.0.5" { // a check, and a flow
				t.Errorf("a connection from %s", from)
			}
		}
		s.mu.Unlock()
	}
	if status, body := p.Do(http.MethodPost, "/pools/panel/backends", []byte(`{"addr": "127.0.0.1:1"}`)); status/100 != 2 {
		t.Fatal(status, body)
	}
	a.Close()
	b.Close()
	r, err := h.Get("https://" + site + "/")
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	if r.StatusCode != http.StatusBadGateway {
		t.Errorf("without a backend: %d", r.StatusCode)
	}
	kit.Settles(t, "flows", 0.0, func() float64 { return p.Metric("backend_active_sessions", "pool", "panel") })
	if n := p.Metrics().Sum("backend_connect_errors_total", "pool", "panel"); n == 0 {
		t.Error("no failed connect is counted")
	}
}

// TestTransportTellsTheClient has backends that take PROXY headers: no two clients
// share a connection, with TLS or without.
func TestTransportTellsTheClient(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "tls": true} {
		t.Run(name, func(t *testing.T) {
			c := newTown(t)
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { ln.Close() })
			var l net.Listener = &proxyproto.Listener{Listener: ln, ConnPolicy: func(proxyproto.ConnPolicyOptions) (proxyproto.Policy, error) { return proxyproto.REQUIRE, nil }}
			transport := "transport wayhouse"
			if secure {
				l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{c.certify(t)}})
				transport += " {\n\t\t\ttls\n\t\t\ttls_insecure_skip_verify\n\t\t}"
			}
			go http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				host, _, _ := net.SplitHostPort(r.RemoteAddr)
				io.WriteString(w, host)
			}))
			kit.Start(t, c.site(t, "to "+ln.Addr().String()+"\n\t\t\thealth none\n\t\t\tproxy_protocol v2", "{\n\t\tdynamic wayhouse panel\n\t\t"+transport+"\n\t}"), kit.Options{})
			for _, from := range []string{"127.0.0.21", "127.0.0.22", "127.0.0.21"} {
				if body, _ := get(t, c.client(t, 2, from, site), "https://"+site+"/"); body != from {
					t.Errorf("%s is told as %q", from, body)
				}
			}
		})
	}
}

// TestTransportMistakes has options that the pool has already.
func TestTransportMistakes(t *testing.T) {
	c := newTown(t)
	p := kit.Start(t, c.config(t, "one"), kit.Options{})
	for proxy, want := range map[string]string{
		"{\n\t\tdynamic wayhouse lobby\n\t}":                                               "in apps.wayhouse.pools; there are panel",
		"127.0.0.1:1 {\n\t\ttransport wayhouse panel {\n\t\t\tdial_timeout 1s\n\t\t}\n\t}": "dial_timeout: leave it out: the pool has connect_timeout",
		"127.0.0.1:1 {\n\t\ttransport wayhouse lobby\n\t}":                                 "in apps.wayhouse.pools; there are panel",
	} {
		if err := p.Load(c.site(t, "to 127.0.0.1:1", proxy)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", proxy, err, want)
		}
	}
}
