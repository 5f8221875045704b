// Package web holds the tests of the web front door: sites of Caddy's HTTP server
// behind the ports of games.
package web

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	_ "github.com/wayhouse-proxy/wayhouse"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

const (
	site  = "panel.example.com"
	other = "other.example.com"
)

// town is a config with a site, a game and somebody else's TLS on one port.
type town struct {
	cert, key   string
	roots       *x509.CertPool
	addr, plain string
	game, tls   string // backends
}

func newTown(t *testing.T) *town {
	t.Helper()
	c := &town{addr: kit.Local(kit.Port(t)), plain: kit.Local(kit.Port(t)), roots: x509.NewCertPool()}
	pair := c.certify(t)
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "passed through") }))
	c.tls = ln.Addr().String()
	c.game = kit.NewUDPBackend(t, 1, "127.0.0.1:0").Addr
	return c
}

// certify makes a certificate for both names.
func (c *town) certify(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{site, other}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	k, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	c.cert, c.key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, b := range map[string]*pem.Block{c.cert: {Type: "CERTIFICATE", Bytes: der}, c.key: {Type: "PRIVATE KEY", Bytes: k}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	leaf, _ := x509.ParseCertificate(der)
	c.roots.AddCert(leaf)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// config has the site answer with its client, the protocol and a word.
func (c *town) config(t *testing.T, word string) kit.M {
	t.Helper()
	return adapt(t, fmt.Sprintf(`{
	wayhouse {
		pool pass {
			to %s
			health none
		}
		pool game {
			to %s
			health none
		}
		listener all tcp/%[3]s udp/%[3]s {
			@web sni %[4]s
			@pass sni %[5]s
			route @web {
				http_front web
			}
			route @pass {
				pool pass
			}
			route {
				pool game
			}
		}
		listener plain tcp/%[6]s {
			route {
				http_front web:80
			}
		}
	}
}
%[4]s {
	bind wayhouse/web
	tls %[7]s %[8]s
	respond "{http.request.remote.host} {http.request.proto} %[9]s"
}
`, c.tls, c.game, c.addr, site, other, c.plain, c.cert, c.key, word))
}

func adapt(t *testing.T, caddyfile string) (config kit.M) {
	t.Helper()
	b, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &config); err != nil {
		t.Fatal(err)
	}
	return config
}

// client speaks one version of HTTP to a port, from an address of loopback.
func (c *town) client(t *testing.T, version int, from, name string) *http.Client {
	t.Helper()
	conf := &tls.Config{RootCAs: c.roots, ServerName: name}
	if version == 3 {
		u, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)})
		if err != nil {
			t.Fatal(err)
		}
		qt := &quic.Transport{Conn: u}
		to := net.UDPAddrFromAddrPort(netip.MustParseAddrPort(c.addr))
		tr := &http3.Transport{TLSClientConfig: conf, Dial: func(ctx context.Context, _ string, conf *tls.Config, q *quic.Config) (*quic.Conn, error) {
			return qt.DialEarly(ctx, to, conf, q)
		}}
		t.Cleanup(func() { tr.Close(); qt.Close(); u.Close() })
		return &http.Client{Transport: tr, Timeout: kit.Long}
	}
	d := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	tr := &http.Transport{TLSClientConfig: conf, ForceAttemptHTTP2: version == 2, DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		to := c.addr
		if strings.HasSuffix(addr, ":80") {
			to = c.plain
		}
		return d.DialContext(ctx, "tcp", to)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: kit.Long, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func get(t *testing.T, c *http.Client, url string) (body string, r *http.Response) {
	t.Helper()
	r, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b), r
}

var versions = map[int]string{1: "HTTP/1.1", 2: "HTTP/2.0", 3: "HTTP/3.0"}

// TestFront has a site on the ports of a game and of somebody else's TLS: by
// every version of HTTP it sees who the client is, and a reload is nothing to
// connections that are there.
func TestFront(t *testing.T) {
	c := newTown(t)
	p := kit.Start(t, c.config(t, "one"), kit.Options{})
	clients := map[int]*http.Client{}
	for v, proto := range versions {
		from := fmt.Sprintf("127.0.0.%d", 10+v)
		clients[v] = c.client(t, v, from, site)
		body, r := get(t, clients[v], "https://"+site+"/")
		if want := from + " " + proto + " one"; body != want {
			t.Errorf("HTTP %d: %q, want %q", v, body, want)
		}
		if v < 3 {
			want := fmt.Sprintf(`h3=":%d"; ma=2592000`, netip.MustParseAddrPort(c.addr).Port())
			kit.Settles(t, "what is announced", want, func() string { // the server for it may begin a moment later
				_, r = get(t, clients[v], "https://"+site+"/")
				return r.Header.Get("Alt-Svc")
			})
		}
	}
	var list []struct{ Proto, Listener, Peer string }
	p.JSON("/sessions", &list)
	if len(list) != 3 {
		t.Errorf("sessions: %v", list)
	}
	if body, _ := get(t, c.client(t, 1, "127.0.0.9", other), "https://"+other+"/"); body != "passed through" {
		t.Errorf("what is passed through answers %q", body)
	}
	load := kit.StartLoad(t, kit.LoadOptions{UDP: c.addr, Flows: 4, Rate: 400})
	load.Round(t)
	if _, r := get(t, c.client(t, 1, "127.0.0.9", site), "http://"+site+"/"); r.StatusCode != http.StatusPermanentRedirect || r.Header.Get("Location") != "https://"+site+"/" {
		t.Errorf("port 80: %d to %q", r.StatusCode, r.Header.Get("Location"))
	}

	if err := p.Load(c.config(t, "two")); err != nil {
		t.Fatal(err)
	}
	load.Round(t)
	for v, proto := range versions {
		want := fmt.Sprintf("127.0.0.%d %s two", 10+v, proto)
		if body, _ := get(t, clients[v], "https://"+site+"/"); body != want {
			t.Errorf("after a reload, HTTP %d: %q, want %q", v, body, want)
		}
	}
	if r := load.Stop(); r.Lost+r.Moved+r.Reset > 0 {
		t.Errorf("the game: %v", &r)
	}
}

// roamer is a client's socket that may become another one.
type roamer struct {
	net.PacketConn // the first
	now            atomic.Pointer[net.UDPConn]
	in             chan gram
}

type gram struct {
	p    []byte
	from net.Addr
}

func newRoamer(t *testing.T, from string) *roamer {
	r := &roamer{in: make(chan gram, 256)}
	r.PacketConn = r.move(t, from)
	return r
}

// move gives the client another address.
func (r *roamer) move(t *testing.T, from string) *net.UDPConn {
	t.Helper()
	u, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	r.now.Store(u)
	go func() {
		for {
			b := make([]byte, 2000)
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			select {
			case r.in <- gram{b[:n], from}:
			default:
			}
		}
	}()
	return u
}

func (r *roamer) WriteTo(p []byte, to net.Addr) (int, error) { return r.now.Load().WriteTo(p, to) }

func (r *roamer) ReadFrom(p []byte) (int, net.Addr, error) {
	g, ok := <-r.in
	if !ok {
		return 0, nil, net.ErrClosed
	}
	return copy(p, g.p), g.from, nil
}

func (r *roamer) SetReadDeadline(time.Time) error { return nil }

// TestRebinding has a NAT give a client of HTTP/3 another port in the middle of a
// connection: the server goes on with it, and the session that the game has got by
// its first datagram ends.
func TestRebinding(t *testing.T) {
	c := newTown(t)
	p := kit.Start(t, c.config(t, "one"), kit.Options{})
	r := newRoamer(t, "127.0.0.13")
	defer close(r.in)
	qt := &quic.Transport{Conn: r}
	var dials int
	tr := &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: c.roots, ServerName: site}, Dial: func(ctx context.Context, _ string, conf *tls.Config, q *quic.Config) (*quic.Conn, error) {
		dials++
		return qt.DialEarly(ctx, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(c.addr)), conf, q)
	}}
	h := &http.Client{Transport: tr, Timeout: kit.Long}
	defer tr.Close()
	get(t, h, "https://"+site+"/")
	r.move(t, "127.0.0.14")
	for range 3 {
		get(t, h, "https://"+site+"/")
	}
	if dials != 1 {
		t.Errorf("%d connections", dials)
	}
	kit.Settles(t, "sessions of the game", 0.0, func() float64 { return p.Metric("backend_active_sessions", "pool", "game") })
	if n := p.Metric("active_udp_sessions", "listener", "all"); n != 2 {
		t.Errorf("%v sessions, want one of each address", n)
	}
}

// TestBehindOthers has a front behind another handler, and in a server of the app
// layer4.
func TestBehindOthers(t *testing.T) {
	c := newTown(t)
	config := adapt(t, fmt.Sprintf(`{
	wayhouse {
		listener all tcp/%s udp/%[1]s {
			@web sni %[2]s
			route @web {
				throttle {
					read_bytes_per_second 1000000
					read_burst_size 1000000
				}
				http_front web
			}
		}
	}
	layer4 {
		tcp/%[3]s {
			route {
				http_front web:443
			}
		}
	}
}
%[2]s {
	bind wayhouse/web
	tls %[4]s %[5]s
	respond "{http.request.remote.host} {http.request.proto}"
}
`, c.addr, site, c.plain, c.cert, c.key))
	p := kit.Start(t, config, kit.Options{})
	for v, proto := range versions {
		if body, _ := get(t, c.client(t, v, "127.0.0.9", site), "https://"+site+"/"); body != "127.0.0.9 "+proto {
			t.Errorf("HTTP %d: %q", v, body)
		}
	}
	c.addr = c.plain
	if body, _ := get(t, c.client(t, 2, "127.0.0.9", site), "https://"+site+"/"); body != "127.0.0.9 HTTP/2.0" {
		t.Errorf("by a layer4 server: %q", body)
	}
	kit.Settles(t, "connections", 2.0, func() float64 { return p.Metric("active_connections", "listener", "all") })
}

// TestNobodyListens refuses a front that no site is behind, and ends a
// connection that would be passed on without end.
func TestNobodyListens(t *testing.T) {
	c := newTown(t)
	front := kit.Route(kit.M{"handler": "http_front", "name": "web"})
	p := kit.Start(t, c.config(t, "one"), kit.Options{})
	err := p.Load(kit.App(kit.M{"all": kit.Listener([]string{"tcp/" + c.addr}, front)}, nil))
	if err == nil || !strings.Contains(err.Error(), "http_front web: no server of the apps http and layer4 listens on wayhouse/web") {
		t.Errorf("a front without a site: %v", err)
	}
	loop := kit.App(kit.M{"all": kit.Listener([]string{"tcp/" + c.addr}, front)}, nil)
	loop["apps"].(kit.M)["layer4"] = kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{"wayhouse/web"}, "routes": kit.A{front}}}}
	if err := p.Load(loop); err != nil {
		t.Fatal(err)
	}
	n, err := net.Dial("tcp", c.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	n.SetDeadline(time.Now().Add(kit.Long))
	if got, err := io.ReadAll(n); len(got) != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%q, %v; want an end", got, err)
	}
}
