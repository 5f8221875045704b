package web

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/quic-go/quic-go"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// odd has two sites behind one front, which is called as the listener is, and no
// HTTP/3.
func (c *town) odd(t *testing.T) kit.M {
	t.Helper()
	return adapt(t, fmt.Sprintf(`{
	auto_https disable_redirects
	servers {
		protocols h1 h2
	}
	wayhouse {
		listener web tcp/%s udp/%[1]s {
			@web sni %[2]s %[3]s
			route @web {
				http_front web:443
			}
		}
	}
}
(site) {
	tls %[4]s %[5]s
	respond "this is {http.request.host}"
}
%[2]s {
	bind wayhouse/web
	import site
}
%[3]s {
	bind wayhouse/web
	import site
}
`, c.addr, site, other, c.cert, c.key))
}

// hello is the ClientHello that asks for a name.
func (c *town) hello(t *testing.T, name string) []byte {
	t.Helper()
	near, far := net.Pipe()
	defer far.Close()
	go func() {
		tls.Client(near, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
		near.Close()
	}()
	var head [5]byte
	if _, err := io.ReadFull(far, head[:]); err != nil {
		t.Fatal(err)
	}
	b := append(head[:], make([]byte, int(head[3])<<8|int(head[4]))...)
	if _, err := io.ReadFull(far, b[5:]); err != nil {
		t.Fatal(err)
	}
	return b
}

// send sends bytes to the front and returns what comes until the end. What has
// not ended in time is an error.
func (c *town) send(t *testing.T, p []byte) []byte {
	t.Helper()
	n, err := net.Dial("tcp", c.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	n.SetDeadline(time.Now().Add(kit.Long))
	n.Write(p)
	got, err := io.ReadAll(n)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after % x… there is no end", p[:min(len(p), 16)])
	}
	return got
}

// TestOddClients has clients that do not do what browsers do. None gets more than
// an end, all are counted, and the sites go on.
func TestOddClients(t *testing.T) {
	c := newTown(t)
	p := kit.Start(t, c.odd(t), kit.Options{})
	fine := func(name, host string) {
		t.Helper()
		if body, _ := get(t, c.client(t, 1, "127.0.0.9", name), "https://"+host+"/"); body != "this is "+host {
			t.Errorf("%s: %q", host, body)
		}
	}
	fine(site, site)
	fine(other, other)
	fine(strings.ToUpper(site), site) // names of TLS have no case

	turned := func() float64 { return p.Metric("listener_connections_total", "listener", "web", "result", "no_route") }
	hello := c.hello(t, site)
	dotted := bytes.Replace(c.hello(t, "panel.example.comx"), []byte("comx"), []byte("com."), 1)
	for name, tc := range map[string]struct {
		in     []byte
		turned float64 // away by the routes; else by the site
	}{
		"no name":                        {c.hello(t, ""), 1},
		"a name with a dot at its end":   {dotted, 0},
		"half a ClientHello":             {hello[:len(hello)/2], 1},
		"a PROXY header nobody asked of": {append([]byte("PROXY TCP4 192.0.2.1 192.0.2.2 1 443\r\n"), hello...), 1},
		"plain HTTP":                     {[]byte("GET / HTTP/1.1\r\nHost: " + site + "\r\n\r\n"), 1},
	} {
		before := turned()
		if got := c.send(t, tc.in); len(got) > 0 && got[0] != 21 { // an alert of TLS
			t.Errorf("%s gets % x", name, got)
		}
		kit.Settles(t, name+" is counted", before+tc.turned, turned)
	}
	open := p.Metric("active_connections", "listener", "web") // that are kept for the next request

	for i := range 300 { // and go, with a reset, before and after their route is known
		n, err := net.Dial("tcp", c.addr)
		if err != nil {
			t.Fatal(err)
		}
		n.Write(hello[:len(hello)-i%2*100])
		n.(*net.TCPConn).SetLinger(0)
		n.Close()
	}
	kit.Settles(t, "connections", open, func() float64 { return p.Metric("active_connections", "listener", "web") })
	fine(site, site)

	u, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	to, _ := net.ResolveUDPAddr("udp", c.addr)
	before := p.Metrics().Sum("datagrams_dropped_total", "listener", "web", "reason", "no_route")
	qt := &quic.Transport{Conn: u}
	defer qt.Close()
	ctx, cancel := contextFor(t)
	defer cancel()
	go qt.Dial(ctx, to, &tls.Config{ServerName: site, NextProtos: []string{"h3"}, InsecureSkipVerify: true}, nil)
	kit.Eventually(t, "QUIC without a server for it is counted", func() bool {
		return p.Metrics().Sum("datagrams_dropped_total", "listener", "web", "reason", "no_route") > before
	})
	kit.Settles(t, "sessions", 0.0, func() float64 { return p.Metric("active_udp_sessions", "listener", "web") })
	if _, r := get(t, c.client(t, 1, "127.0.0.9", site), "https://"+site+"/"); r.Header.Get("Alt-Svc") != "" {
		t.Errorf("HTTP/3 is announced: %q", r.Header.Get("Alt-Svc"))
	}
}

// TestTransportOfLongRequests has what is no question with one answer go through a
// pool: a protocol that a client upgrades to, an answer that comes in parts, and
// HTTP/2 without TLS.
func TestTransportOfLongRequests(t *testing.T) {
	c := newTown(t)
	more := make(chan struct{})
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/upgrade":
			conn, rw, err := w.(http.Hijacker).Hijack()
			if err != nil {
				return
			}
			defer conn.Close()
			io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			io.Copy(conn, rw)
		case "/parts":
			io.WriteString(w, "one\n")
			w.(http.Flusher).Flush()
			<-more
			io.WriteString(w, "two\n")
		default:
			io.WriteString(w, r.Proto)
		}
	}))
	srv.Config.Protocols = new(http.Protocols)
	srv.Config.Protocols.SetHTTP1(true)
	srv.Config.Protocols.SetUnencryptedHTTP2(true)
	srv.Start()
	t.Cleanup(srv.Close)
	at := srv.Listener.Addr().String()
	config := c.site(t, "to "+at+"\n\t\t\thealth none\n\t\t\tmax_sessions 2", `{
		dynamic wayhouse panel
		transport wayhouse
	}
	reverse_proxy /h2c {
		dynamic wayhouse panel
		transport wayhouse {
			versions h2c
		}
	}`)
	p := kit.Start(t, config, kit.Options{})
	h := c.client(t, 1, "127.0.0.9", site)
	flows := func() float64 { return p.Metric("backend_active_sessions", "pool", "panel") }

	upgrade := func() (net.Conn, *bufio.Reader, int) {
		t.Helper()
		conn, err := tls.Dial("tcp", c.addr, &tls.Config{RootCAs: c.roots, ServerName: site})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conn.SetDeadline(time.Now().Add(kit.Long))
		fmt.Fprintf(conn, "GET /upgrade HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", site)
		r := bufio.NewReader(conn)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		return conn, r, resp.StatusCode
	}
	first, r, status := upgrade()
	if status != http.StatusSwitchingProtocols {
		t.Fatalf("an upgrade: %d", status)
	}
	echoes := func() {
		t.Helper()
		fmt.Fprintln(first, "hello")
		if got, err := r.ReadString('\n'); got != "hello\n" {
			t.Errorf("after the upgrade: %q, %v", got, err)
		}
	}
	echoes()
	if n := flows(); n != 1 {
		t.Errorf("%v flows with one client that has upgraded", n)
	}

	resp, err := h.Get("https://" + site + "/parts")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	parts := bufio.NewReader(resp.Body)
	if got, err := parts.ReadString('\n'); got != "one\n" { // the second waits for it
		t.Errorf("the first part: %q, %v", got, err)
	}
	if _, _, status := upgrade(); status != http.StatusBadGateway && status != http.StatusServiceUnavailable {
		t.Errorf("above max_sessions: %d", status)
	}
	if status, body := p.Do(http.MethodPatch, "/pools/panel/backends/"+at, []byte(`{"state": "draining"}`)); status/100 != 2 {
		t.Fatal(status, body)
	}
	echoes()
	close(more)
	if got, err := parts.ReadString('\n'); got != "two\n" {
		t.Errorf("the second part, while the backend drains: %q, %v", got, err)
	}
	if status, body := p.Do(http.MethodPatch, "/pools/panel/backends/"+at, []byte(`{"state": "enabled"}`)); status/100 != 2 {
		t.Fatal(status, body)
	}
	first.Close()
	kit.Settles(t, "flows, of which one is kept for the next request", 1, flows)
	if body, _ := get(t, h, "https://"+site+"/h2c"); body != "HTTP/2.0" {
		t.Errorf("h2c: %q", body)
	}
}
