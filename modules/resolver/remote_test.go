package resolver

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	resolverv1 "github.com/wayhouse-proxy/wayhouse/modules/resolver/proto"
)

// remote is a host for a service.
func remote(t *testing.T, kind, url, options string) *Host {
	t.Helper()
	config := fmt.Sprintf(`{"resolver": %q, "endpoint": %q, "timeout": "1m"`, kind, url)
	if options != "" {
		config = strings.Replace(config, `, "timeout": "1m"`, "", strings.Count(options, `"timeout"`)) + ", " + options
	}
	h, err := open(t, config+"}")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.Cleanup() })
	return h
}

// caFile has the certificate of a test server.
func caFile(t *testing.T, s *httptest.Server) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "ca.pem")
	b := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func serveHTTP(t *testing.T, f http.HandlerFunc) *httptest.Server {
	s := httptest.NewServer(f)
	t.Cleanup(s.Close)
	return s
}

func TestHTTPRequest(t *testing.T) {
	t.Setenv("RESOLVER_TOKEN", "secret")
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("from file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var conns atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		const want = `{"listener":"l","src":"203.0.113.7:4000","dst":"192.0.2.1:7777","sni":"a.example.com","first_bytes_b64":"AAEC/w==","routing_key":"k"}`
		if string(b) != want || r.Method != "POST" || r.URL.Path != "/resolve" || r.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s %s %v %s", r.Method, r.URL, r.Header, b)
		}
		if r.Header.Get("Authorization") != "Bearer secret" || r.Header.Get("X-File") != "from file" || r.Host != "mm.example.com" {
			t.Errorf("headers %v, host %s", r.Header, r.Host)
		}
		io.WriteString(w, `{"pool": "pool-a", "more": [1, {}]}`)
	}))
	s.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateNew {
			conns.Add(1)
		}
	}
	s.Start()
	t.Cleanup(s.Close)
	h := remote(t, "http", s.URL+"/resolve", `"headers": {"Authorization": "Bearer {env.RESOLVER_TOKEN}", "X-File": "{file.`+token+`}", "Host": "mm.example.com"}`)
	r := from("203.0.113.7")
	r.SNI, r.RoutingKey, r.FirstBytes = "a.example.com", "k", []byte{0, 1, 2, 255}
	for range 5 {
		if a, err := h.Resolve(r); err != nil || a.Pool != "pool-a" {
			t.Errorf("%v, %v", a, err)
		}
	}
	if n := conns.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

func TestHTTPS(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"pool": "pool-a"}`) }))
	s.Config.ErrorLog = nil
	t.Cleanup(s.Close)
	h := remote(t, "http", s.URL, `"ca_file": "`+caFile(t, s)+`"`)
	if a, err := h.Resolve(from("203.0.113.7")); err != nil || a.Pool != "pool-a" {
		t.Errorf("%v, %v", a, err)
	}
	h = remote(t, "http", s.URL, "")
	if _, err := h.Resolve(from("203.0.113.7")); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate that nobody vouches for: %v", err)
	}
}

// endless is a service that sends without end until nobody reads.
func endless(each int, pause time.Duration, stopped chan<- int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		b := []byte(strings.Repeat(" ", each))
		sent := 0
		tick := time.NewTicker(max(pause, 1))
		defer tick.Stop()
		for sent < 1<<30 {
			n, err := w.Write(b)
			sent += n
			if err == nil {
				err = http.NewResponseController(w).Flush()
			}
			if err != nil || r.Context().Err() != nil {
				break
			}
			if pause > 0 {
				select {
				case <-tick.C:
				case <-r.Context().Done():
				}
			}
		}
		stopped <- sent
	}
}

// TestBodies has answers that are too large, too slow or none at all.
func TestBodies(t *testing.T) {
	stopped := make(chan int, 1)
	s := serveHTTP(t, endless(64<<10, 0, stopped))
	h := remote(t, "http", s.URL, "")
	if _, err := h.Resolve(from("203.0.113.7")); err == nil || !strings.Contains(err.Error(), "larger than 64 KiB") {
		t.Errorf("1 GiB: %v", err)
	}
	if sent := <-stopped; sent >= 1<<30 {
		t.Errorf("%d bytes were taken", sent)
	}
	wantCounts(t, h, [numResults]int{0, 0, 0, 1}, [numFound]int{})

	s = serveHTTP(t, endless(1, time.Millisecond, stopped))
	h = remote(t, "http", s.URL, `"timeout": "50ms"`)
	if _, err := h.Resolve(from("203.0.113.7")); err == nil {
		t.Error("a drip was an answer")
	}
	<-stopped // and the service was let go
	wantCounts(t, h, [numResults]int{0, 0, 1, 0}, [numFound]int{})

	gone := make(chan bool, 1)
	s = serveHTTP(t, func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
		gone <- true
	})
	h = remote(t, "http", s.URL, `"timeout": "51ms"`)
	if _, err := h.Resolve(from("203.0.113.7")); err == nil {
		t.Error("a service that hangs has answered")
	}
	<-gone
	wantCounts(t, h, [numResults]int{0, 0, 1, 0}, [numFound]int{})
}

// server is a gRPC service.
type server struct {
	resolverv1.UnimplementedResolverServer
	resolve func(context.Context, *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error)
}

func (s *server) Resolve(ctx context.Context, r *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
	return s.resolve(ctx, r)
}

// serveGRPC serves at addr and returns where, and how to stop it.
func serveGRPC(t *testing.T, addr string, s *server, o ...grpc.ServerOption) (at string, stop func()) {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(o...)
	resolverv1.RegisterResolverServer(g, s)
	done := make(chan bool)
	go func() { defer close(done); _ = g.Serve(ln) }()
	stop = func() { g.Stop(); <-done }
	t.Cleanup(stop)
	return ln.Addr().String(), stop
}

func TestGRPC(t *testing.T) {
	ttl := uint32(7)
	s := &server{resolve: func(ctx context.Context, r *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		if got := md.Get("authorization"); len(got) != 1 || got[0] != "Bearer x" {
			t.Errorf("metadata %v", md)
		}
		if r.Listener != "l" || r.Src != "203.0.113.7:4000" || r.Dst != "192.0.2.1:7777" || r.Sni != "a.example.com" || string(r.FirstBytes) != "\x00\xff" || r.RoutingKey != "k\uFFFD" {
			t.Errorf("request %v", r)
		}
		return &resolverv1.ResolveResponse{Pool: "pool-a", Target: "[::ffff:10.1.0.5]:7777", TtlSec: &ttl}, nil
	}}
	at, _ := serveGRPC(t, "127.0.0.1:0", s)
	h := remote(t, "grpc", "http://"+at, `"headers": {"Authorization": "Bearer x"}, "allow_targets": ["10.1.0.0/16"]`)
	r := from("203.0.113.7")
	r.SNI, r.RoutingKey, r.FirstBytes = "a.example.com", "k\xff", []byte{0, 255}
	a, err := h.Resolve(r)
	if err != nil || a.Target.String() != "10.1.0.5:7777" || a.Pool != "" || !a.HasTTL || a.TTL != 7*time.Second {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestGRPCOverTLS(t *testing.T) {
	certs := httptest.NewTLSServer(nil) // for its certificate
	t.Cleanup(certs.Close)
	s := &server{resolve: func(context.Context, *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
		return &resolverv1.ResolveResponse{Pool: "pool-a"}, nil
	}}
	at, _ := serveGRPC(t, "127.0.0.1:0", s, grpc.Creds(credentials.NewServerTLSFromCert(&certs.TLS.Certificates[0])))
	h := remote(t, "grpc", "https://"+at, `"ca_file": "`+caFile(t, certs)+`"`)
	if a, err := h.Resolve(from("203.0.113.7")); err != nil || a.Pool != "pool-a" || a.HasTTL {
		t.Errorf("%v, %v", a, err)
	}
	h = remote(t, "grpc", "https://"+at, "")
	if _, err := h.Resolve(from("203.0.113.7")); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate that nobody vouches for: %v", err)
	}
}

func TestGRPCFaults(t *testing.T) {
	s := &server{resolve: func(ctx context.Context, r *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
		switch r.RoutingKey {
		case "hang":
			<-ctx.Done()
			return nil, ctx.Err()
		case "large":
			return &resolverv1.ResolveResponse{Pool: strings.Repeat("x", 65<<10)}, nil
		case "error":
			return nil, status.Error(codes.Internal, "no")
		case "late":
			return nil, status.Error(codes.DeadlineExceeded, "it took me too long")
		case "empty":
			return &resolverv1.ResolveResponse{}, nil
		case "target":
			return &resolverv1.ResolveResponse{Target: "localhost:80"}, nil
		}
		return &resolverv1.ResolveResponse{Pool: "pool-a"}, nil
	}}
	at, stop := serveGRPC(t, "127.0.0.1:0", s)
	h := remote(t, "grpc", "http://"+at, "")
	ask := func(key string) error {
		r := from("203.0.113.7")
		r.RoutingKey = key
		_, err := h.Resolve(r)
		return err
	}
	for _, key := range []string{"large", "error", "target", "empty"} {
		if ask(key) == nil {
			t.Errorf("%s: an answer", key)
		}
	}
	wantCounts(t, h, [numResults]int{0, 1, 0, 3}, [numFound]int{})
	if ask("late") == nil {
		t.Error("an answer of a service whose time was over")
	}
	wantCounts(t, h, [numResults]int{0, 1, 1, 3}, [numFound]int{})
	if err := ask(""); err != nil {
		t.Errorf("after the faults: %v", err)
	}
	patient := h
	h = remote(t, "grpc", "http://"+at, `"timeout": "50ms"`)
	if ask("hang") == nil {
		t.Error("a service that hangs has answered")
	}
	wantCounts(t, h, [numResults]int{0, 0, 1, 0}, [numFound]int{})
	h = patient
	stop()
	if ask("") == nil {
		t.Error("an answer of nobody")
	}
	serveGRPC(t, at, s)
	deadline := time.Now().Add(time.Minute)
	for err := ask(""); err != nil; err = ask("") {
		if time.Now().After(deadline) {
			t.Fatalf("a service that is back is not asked: %v", err)
		}
	}
}
