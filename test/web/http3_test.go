package web

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// caller is a client of HTTP/3 that keeps what it needs to resume a connection.
type caller struct {
	town *town
	at   string
	tls  *tls.Config
}

func (c *town) caller(at string) *caller {
	return &caller{c, at, &tls.Config{RootCAs: c.roots, ServerName: site, ClientSessionCache: tls.NewLRUClientSessionCache(4)}}
}

// connect is a client with a socket of its own and the connection that it gets
// with its first request.
func (c *caller) connect(t *testing.T) (h *http.Client, conn func() *quic.Conn) {
	t.Helper()
	u, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	qt := &quic.Transport{Conn: u}
	var q *quic.Conn
	tr := &http3.Transport{TLSClientConfig: c.tls, Dial: func(ctx context.Context, _ string, conf *tls.Config, qc *quic.Config) (_ *quic.Conn, err error) {
		q, err = qt.DialEarly(ctx, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(c.at)), conf, qc)
		return q, err
	}}
	t.Cleanup(func() { tr.Close(); qt.Close(); u.Close() })
	return &http.Client{Transport: tr, Timeout: kit.Long}, func() *quic.Conn { return q }
}

// TestHTTP3 holds that HTTP/3 behind a front is what it is with Caddy alone: each
// case is tried with a site of the same process that has a port of its own too.
func TestHTTP3(t *testing.T) {
	c := newTown(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	big := make([]byte, 10<<20)
	rng := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	rng.Read(big)
	sum := fmt.Sprintf("%x", sha256.Sum256(big))
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "big"), big, 0o600); err != nil {
		t.Fatal(err)
	}
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		io.Copy(h, r.Body)
		fmt.Fprintf(w, "%x", h.Sum(nil))
	}))
	t.Cleanup(backend.Close)
	port := kit.Port(t)
	config := func(word string) kit.M {
		return adapt(t, fmt.Sprintf(`{
	auto_https disable_redirects
	wayhouse {
		pool game {
			to %s
			health none
		}
		listener all udp/%s {
			@web sni %s
			route @web {
				http_front web:443
			}
			route {
				pool game
			}
		}
	}
}
(site) {
	tls %s %s
	root %s
	reverse_proxy /sum %s
	respond /word %s
	file_server
}
%[3]s {
	bind wayhouse/web
	import site
}
%[3]s:%[9]d {
	bind 127.0.0.1
	import site
}
`, c.game, c.addr, site, c.cert, c.key, dir, backend.Listener.Addr(), word, port))
	}
	p := kit.Start(t, config("one"), kit.Options{})
	for name, at := range map[string]string{"behind a front": c.addr, "Caddy alone": kit.Local(port)} {
		base := "https://" + site
		t.Run(name+"/early data", func(t *testing.T) {
			from := c.caller(at)
			h, _ := from.connect(t)
			get(t, h, base+"/word")
			kit.Eventually(t, "a request is sent with the first datagram", func() bool { // a ticket may be on its way still
				h, conn := from.connect(t)
				req, err := http.NewRequest(http3.MethodGet0RTT, base+"/word", nil)
				if err != nil {
					t.Fatal(err)
				}
				r, err := h.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer r.Body.Close()
				body, _ := io.ReadAll(r.Body)
				return conn().ConnectionState().Used0RTT && (string(body) == "one" || r.StatusCode == http.StatusTooEarly)
			})
		})
		t.Run(name+"/upload", func(t *testing.T) {
			h, _ := c.caller(at).connect(t)
			r, err := h.Post(base+"/sum", "application/octet-stream", bytes.NewReader(big))
			if err != nil {
				t.Fatal(err)
			}
			defer r.Body.Close()
			if got, err := io.ReadAll(r.Body); string(got) != sum {
				t.Errorf("%s, %v; want %s", got, err, sum)
			}
		})
		t.Run(name+"/download over a reload", func(t *testing.T) {
			h, _ := c.caller(at).connect(t)
			r, err := h.Get(base + "/big")
			if err != nil {
				t.Fatal(err)
			}
			defer r.Body.Close()
			got := sha256.New()
			if _, err := io.CopyN(got, r.Body, 1<<20); err != nil {
				t.Fatal(err)
			}
			p.MustLoad(config("two"))
			if _, err := io.Copy(got, r.Body); err != nil || fmt.Sprintf("%x", got.Sum(nil)) != sum {
				t.Errorf("%x, %v; want %s", got.Sum(nil), err, sum)
			}
			if body, _ := get(t, h, base+"/word"); body != "two" {
				t.Errorf("after a reload: %q", body)
			}
			p.MustLoad(config("one"))
		})
	}
	crowd := 200
	if kit.Race {
		crowd = 40 // handshakes take ten times as long
	}
	for name, at := range map[string]string{"behind a front": c.addr, "Caddy alone": kit.Local(port)} {
		t.Run(name+"/many clients at once", func(t *testing.T) { c.crowd(t, at, crowd) })
	}
	if n := p.Metric("active_udp_sessions", "listener", "all"); n < float64(crowd) {
		t.Errorf("%v sessions of %d clients", n, crowd)
	}
}

// crowd has clients with a connection each ask for the word at once.
func (c *town) crowd(t *testing.T, at string, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for range n {
		h, _ := c.caller(at).connect(t)
		wg.Go(func() {
			r, err := h.Get("https://" + site + "/word")
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Body.Close()
			if b, err := io.ReadAll(r.Body); string(b) != "one" {
				t.Errorf("%q, %v", b, err)
			}
		})
	}
	wg.Wait()
}

// contextFor ends with the test, or before long.
func contextFor(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), kit.Long)
}
