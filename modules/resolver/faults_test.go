package resolver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	_ "google.golang.org/grpc/encoding/gzip" // as another module of a build may have it
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	resolverv1 "github.com/wayhouse-proxy/wayhouse/modules/resolver/proto"
)

// TestHTTPFaults has every kind of answer that is none, and one that says
// nothing is known, over one connection after the other.
func TestHTTPFaults(t *testing.T) {
	var elsewhere atomic.Int64
	other := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		elsewhere.Add(1)
		io.WriteString(w, `{"pool": "pool-a"}`)
	})
	const good = `{"pool": "pool-a"}`
	cases := map[string]struct {
		serve http.HandlerFunc
		want  string
	}{
		"201":          {answers(201, good), "status 201"},
		"400":          {answers(400, good), "status 400"},
		"404":          {answers(404, good), "status 404"},
		"429":          {answers(429, good), "status 429"},
		"500":          {answers(500, good), "status 500"},
		"503":          {answers(503, good), "status 503"},
		"204":          {answers(204, ""), ErrNoPlace.Error()},
		"nothing":      {answers(200, ""), "the answer: "},
		"half":         {answers(200, good[:9]), "the answer: "},
		"no JSON":      {answers(200, "<html>"), "the answer: "},
		"a list":       {answers(200, "["+good+"]"), "the answer: "},
		"no keys":      {answers(200, `{}`), ErrNoPlace.Error()},
		"no pool":      {answers(200, `{"pool": "nobody"}`), `no pool is named "nobody"`},
		"a name":       {answers(200, `{"target": "localhost:7777"}`), "is not ip:port"},
		"admin":        {answers(200, `{"target": "127.0.0.1:2019"}`), "the target 127.0.0.1:2019 is not allowed"},
		"depth":        {answers(200, `{"x": `+strings.Repeat("[", 30000)+strings.Repeat("]", 30000)+`}`), "the answer: "},
		"deep, at end": {answers(200, strings.Repeat(`{"x": `, 10001)), "the answer: "},
		"redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
		}, "status 307"},
		"packed": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			io.WriteString(w, "\x1f\x8b\x08\x00\x00\x00\x00\x00")
		}, "the answer: "},
		"a long header": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Long", strings.Repeat("x", 100<<10))
			io.WriteString(w, good)
		}, "exceeded"},
		"a short body": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			io.WriteString(w, good)
		}, "unexpected EOF"},
		"hang up": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, "EOF"},
	}
	s := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		name := r.URL.Query().Get("case")
		if tc, ok := cases[name]; ok {
			tc.serve(w, r)
			return
		}
		io.WriteString(w, good)
	})
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			h := remote(t, "http", s.URL+"/?case="+strings.ReplaceAll(name, " ", "+"), `"allow_targets": ["10.0.0.0/8"]`)
			a, err := h.Resolve(from("203.0.113.7"))
			if err == nil || !strings.Contains(err.Error(), tc.want) || !a.Empty() {
				t.Errorf("%+v, %v; want %s", a, err, tc.want)
			}
			counts := [numResults]int{0, 0, 0, 1}
			if errors.Is(err, ErrNoPlace) {
				counts = [numResults]int{0, 1, 0, 0}
			}
			wantCounts(t, h, counts, [numFound]int{})
		})
	}
	if n := elsewhere.Load(); n != 0 {
		t.Errorf("the redirect was followed %d times", n)
	}
	if _, err := remote(t, "http", s.URL, "").Resolve(from("203.0.113.7")); err != nil {
		t.Errorf("after all of them: %v", err)
	}
}

// answers is a service that always says the same.
func answers(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// TestGRPCCodes has a service fail with every code there is. None of them is an
// answer, whatever stands beside it, and one says that time was over.
func TestGRPCCodes(t *testing.T) {
	s := &server{resolve: func(_ context.Context, r *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
		var code codes.Code
		if _, err := fmt.Sscan(r.RoutingKey, &code); err != nil {
			t.Error(err)
		}
		return &resolverv1.ResolveResponse{Pool: "pool-a"}, status.Error(code, "of the test")
	}}
	at, _ := serveGRPC(t, "127.0.0.1:0", s)
	h := remote(t, "grpc", "http://"+at, "")
	n := 0
	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		r := from("203.0.113.7")
		r.RoutingKey = fmt.Sprint(uint32(code))
		a, err := h.Resolve(r)
		if status.Code(err) != code || !a.Empty() {
			t.Errorf("%v: %+v, %v", code, a, err)
		}
		n++
	}
	wantCounts(t, h, [numResults]int{0, 0, 1, n - 1}, [numFound]int{})
}

// TestGRPCDeadline has the service told how long it is waited for, and left
// when that is over.
func TestGRPCDeadline(t *testing.T) {
	const timeout = 50 * time.Millisecond
	left, ended := make(chan time.Duration, 1), make(chan error, 1)
	s := &server{resolve: func(ctx context.Context, _ *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
		deadline, ok := ctx.Deadline()
		if !ok {
			t.Error("the service is not told of a deadline")
		}
		left <- time.Until(deadline)
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	}}
	at, _ := serveGRPC(t, "127.0.0.1:0", s)
	h := remote(t, "grpc", "http://"+at, `"timeout": "`+timeout.String()+`"`)
	if _, err := h.Resolve(from("203.0.113.7")); err == nil {
		t.Error("a service that hangs has answered")
	}
	if d := <-left; d > timeout {
		t.Errorf("the service is told of %v, want at most %v", d, timeout)
	}
	<-ended // and the call was let go of there
	wantCounts(t, h, [numResults]int{0, 0, 1, 0}, [numFound]int{})
}

// TestGRPCSizes has answers that are larger than one may be: the message as it
// is sent, as it is when it is unpacked, and what is sent beside it.
func TestGRPCSizes(t *testing.T) {
	s := &server{resolve: func(ctx context.Context, r *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
		switch r.RoutingKey {
		case "most":
			return &resolverv1.ResolveResponse{Pool: "pool-" + strings.Repeat("x", 60<<10)}, nil
		case "large":
			return &resolverv1.ResolveResponse{Pool: "pool-" + strings.Repeat("x", 64<<10)}, nil
		case "packed":
			if err := grpc.SetSendCompressor(ctx, "gzip"); err != nil {
				t.Error(err)
			}
			return &resolverv1.ResolveResponse{Pool: "pool-" + strings.Repeat("x", 16<<20)}, nil
		case "header":
			if err := grpc.SetHeader(ctx, metadata.Pairs("x-long", strings.Repeat("x", 100<<10))); err != nil {
				t.Error(err)
			}
		case "trailer":
			if err := grpc.SetTrailer(ctx, metadata.Pairs("x-long", strings.Repeat("x", 100<<10))); err != nil {
				t.Error(err)
			}
		}
		return &resolverv1.ResolveResponse{Pool: "pool-a"}, nil
	}}
	at, _ := serveGRPC(t, "127.0.0.1:0", s)
	h := remote(t, "grpc", "http://"+at, "")
	for key, ok := range map[string]bool{"most": true, "large": false, "packed": false, "header": false, "trailer": false} {
		r := from("203.0.113.7")
		r.RoutingKey = key
		if a, err := h.Resolve(r); (err == nil) != ok || a.Empty() == ok {
			t.Errorf("%s: an answer of %d bytes, %v", key, len(a.Pool), err)
		}
	}
	if _, err := h.Resolve(from("203.0.113.7")); err != nil {
		t.Errorf("after all of them: %v", err)
	}
}

// TestGRPCNames has a certificate that a private authority vouches for, of
// another host than the endpoint's.
func TestGRPCNames(t *testing.T) {
	certs := httptest.NewTLSServer(nil) // for its certificate, of 127.0.0.1 and example.com
	t.Cleanup(certs.Close)
	s := &server{resolve: func(context.Context, *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
		return &resolverv1.ResolveResponse{Pool: "pool-a"}, nil
	}}
	creds := grpc.Creds(credentials.NewServerTLSFromCert(&certs.TLS.Certificates[0]))
	ca := `"ca_file": "` + caFile(t, certs) + `"`
	at, _ := serveGRPC(t, "127.0.0.1:0", s, creds)
	if _, err := remote(t, "grpc", "https://"+at, ca).Resolve(from("203.0.113.7")); err != nil {
		t.Errorf("of the endpoint: %v", err)
	}
	other, _ := serveGRPC(t, "127.0.0.2:0", s, creds)
	if _, err := remote(t, "grpc", "https://"+other, ca).Resolve(from("203.0.113.7")); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("of another host: %v", err)
	}
	if _, err := remote(t, "grpc", "http://"+at, "").Resolve(from("203.0.113.7")); err == nil {
		t.Error("without TLS, to a service that has it: an answer")
	}
}

// TestNegativeTTL has services of both kinds know of no place: that is
// remembered for negative_ttl, and with zero not at all.
func TestNegativeTTL(t *testing.T) {
	var asked atomic.Int64
	web := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) { asked.Add(1); w.WriteHeader(http.StatusNoContent) })
	at, _ := serveGRPC(t, "127.0.0.1:0", &server{resolve: func(context.Context, *resolverv1.ResolveRequest) (*resolverv1.ResolveResponse, error) {
		asked.Add(1)
		return &resolverv1.ResolveResponse{}, nil
	}})
	for kind, url := range map[string]string{"http": web.URL, "grpc": "http://" + at} {
		t.Run(kind, func(t *testing.T) {
			ask := func(ttl string) (again func()) {
				h := remote(t, kind, url, `"cache": {"key": ["src_ip"], "negative_ttl": "`+ttl+`"}`)
				return func() {
					t.Helper()
					if a, err := h.Resolve(from("203.0.113.7")); !errors.Is(err, ErrNoPlace) {
						t.Fatalf("%+v, %v", a, err)
					}
				}
			}
			calls := func(ttl string, times int) int64 {
				before, again := asked.Load(), ask(ttl)
				for range times {
					again()
				}
				return asked.Load() - before
			}
			if n := calls("1h", 5); n != 1 {
				t.Errorf("asked %d times within the hour, want once", n)
			}
			if n := calls("0s", 5); n != 5 {
				t.Errorf("asked %d times of 5 without a time", n)
			}
			before, again := asked.Load(), ask("1ms")
			for deadline := time.Now().Add(time.Minute); asked.Load() < before+2; again() {
				if time.Now().After(deadline) {
					t.Fatal("the time is never over")
				}
			}
		})
	}
}
