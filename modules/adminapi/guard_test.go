package adminapi

import (
	"context"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/wayhouse-proxy/wayhouse/internal/tokens"
)

// forget empties the table of guesses for a test, and after it.
func forget(t *testing.T) {
	t.Helper()
	clear := func() { guesses = guessTable{by: make(map[netip.Prefix]*tokens.Bucket)} }
	clear()
	t.Cleanup(clear)
}

// guess asks with a token from an address and returns the status.
func guess(t *testing.T, h *Handler, from, token string) int {
	t.Helper()
	r := httptest.NewRequest("GET", "/pools", nil)
	r.RemoteAddr = from
	r.Header.Set("Authorization", "Bearer "+token)
	w := do(t, h, r)
	if got := w.Header().Get("Retry-After"); (got != "") != (w.Code == 429) {
		t.Errorf("%d with Retry-After %q", w.Code, got)
	}
	return w.Code
}

// TestGuessesAreLimited has one address send wrong tokens until no token of its
// is looked at, the right one neither; others and time are not affected.
func TestGuessesAreLimited(t *testing.T) {
	forget(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHandler(t, &Handler{Tokens: []*Token{{Token: adminToken1}}}, ":443")
		for _, net := range []struct{ one, same, other string }{
			{"192.0.2.1:1000", "192.0.2.1:2000", "192.0.2.2:1000"},
			{"[2001:db8:0:1::1]:1000", "[2001:db8:0:1:ffff::9]:1000", "[2001:db8:0:2::1]:1000"},
			{"[::ffff:192.0.2.9]:1000", "192.0.2.9:1000", "192.0.2.10:1000"},
			{"@", "", "192.0.2.3:1000"},
		} {
			for i := range guessBurst {
				if got := guess(t, h, net.one, fmt.Sprint("wrong-0123456789-", i)); got != 401 {
					t.Fatalf("%s: wrong token %d: %d, want 401", net.one, i, got)
				}
			}
			if got := guess(t, h, net.one, adminToken1); got != 429 {
				t.Errorf("%s: the right token after too many wrong ones: %d, want 429", net.one, got)
			}
			if got := guess(t, h, net.same, "wrong-0123456789"); got != 429 {
				t.Errorf("%s after %s: %d, want 429", net.same, net.one, got)
			}
			if got := guess(t, h, net.other, adminToken1); got != 200 {
				t.Errorf("%s after %s: %d, want 200", net.other, net.one, got)
			}
			r := httptest.NewRequest("GET", "/healthz", nil)
			r.RemoteAddr = net.one
			if got := do(t, h, r).Code; got != 200 {
				t.Errorf("/healthz from %s: %d, want 200", net.one, got)
			}
			time.Sleep(retryAfter * time.Second)
			if got := guess(t, h, net.one, adminToken1); got != 200 {
				t.Errorf("%s, after the wait: %d, want 200", net.one, got)
			}
			r.RemoteAddr = net.other
			for range 3 * guessBurst { // a request without a token is no guess
				r.URL.Path = "/pools"
				do(t, h, r)
			}
			if got := guess(t, h, net.other, adminToken1); got != 200 {
				t.Errorf("%s, after requests without a token: %d, want 200", net.other, got)
			}
		}
	})
}

// TestGuessersBehindABalancer takes the address that Caddy has found out, which
// a client cannot choose.
func TestGuessersBehindABalancer(t *testing.T) {
	forget(t)
	h := newHandler(t, &Handler{Tokens: []*Token{{Token: adminToken1}}}, ":443")
	asked := 0
	ask := func(client, token string) int {
		asked++
		r := httptest.NewRequest("GET", "/pools", nil)
		r.Header.Set("Authorization", "Bearer "+token)
		r.Header.Set("X-Forwarded-For", "203.0.113."+fmt.Sprint(asked))
		r = r.WithContext(context.WithValue(r.Context(), caddyhttp.VarsCtxKey, map[string]any{caddyhttp.ClientIPVarKey: client}))
		return do(t, h, r).Code
	}
	for range guessBurst {
		ask("198.51.100.1", "wrong-0123456789")
	}
	if got := ask("198.51.100.1", adminToken1); got != 429 {
		t.Errorf("the guesser: %d, want 429", got)
	}
	if got := ask("198.51.100.2", adminToken1); got != 200 {
		t.Errorf("another client of the balancer: %d, want 200", got)
	}
}

// TestGuessTableIsBounded fills the table: who finds it full shares one budget,
// and a right token from an address that has guessed nothing still opens.
func TestGuessTableIsBounded(t *testing.T) {
	forget(t)
	synctest.Test(t, func(t *testing.T) {
		h := newHandler(t, &Handler{Tokens: []*Token{{Token: adminToken1}}}, ":443")
		h.guard.logger = zap.NewNop()
		from := func(i int) string { return fmt.Sprintf("10.%d.%d.%d:1", i>>16, i>>8&255, i&255) }
		for i := range maxSources {
			if got := guess(t, h, from(i), "wrong-0123456789"); got != 401 {
				t.Fatalf("guess %d: %d", i, got)
			}
		}
		limited := 0
		for i := range 10 * guessBurst {
			if guess(t, h, from(maxSources+i), "wrong-0123456789") == 429 {
				limited++
			}
		}
		if limited != 9*guessBurst {
			t.Errorf("%d of %d guesses with the table full were limited, want all but %d", limited, 10*guessBurst, guessBurst)
		}
		if n := len(guesses.by); n > maxSources {
			t.Errorf("the table has %d sources, more than %d", n, maxSources)
		}
		time.Sleep((guessBurst + 1) * time.Second)
		if got := guess(t, h, from(1<<20), "wrong-0123456789"); got != 401 || len(guesses.by) != 1 {
			t.Errorf("after a while: %d, and %d sources, want 401 and 1", got, len(guesses.by))
		}
	})
}

// TestGuessesAtOnce has many guesses arrive together: no more are looked at
// than one after the other.
func TestGuessesAtOnce(t *testing.T) {
	forget(t)
	h := newHandler(t, &Handler{Tokens: []*Token{{Token: adminToken1}}}, ":443")
	h.guard.logger = zap.NewNop()
	var mu sync.Mutex
	looked := 0
	from := netip.MustParsePrefix("192.0.2.5/32")
	var wg sync.WaitGroup
	began := time.Now()
	for range 2000 {
		wg.Go(func() {
			guesses.judge(from, func() *secret {
				mu.Lock()
				looked++
				mu.Unlock()
				return nil
			})
		})
	}
	wg.Wait()
	if most := guessBurst + guessRate*(1+int(time.Since(began)/time.Second)); looked > most {
		t.Errorf("%d guesses were looked at, more than %d", looked, most)
	}
}

// TestTokenInAFileChanges changes the file under a running handler.
func TestTokenInAFileChanges(t *testing.T) {
	forget(t)
	path := filepath.Join(t.TempDir(), "token")
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const one, two = "first-0123456789", "second-0123456789"
	write(one)
	count := func(result string) int {
		return int(testutil.ToFloat64(tokenReads.WithLabelValues(result)))
	}
	synctest.Test(t, func(t *testing.T) {
		h := newHandler(t, &Handler{Tokens: []*Token{{Token: adminToken1}, {Token: "{file." + path + "}", Role: "read", Name: "scraper"}}}, ":443")
		core, logs := observer.New(zap.InfoLevel)
		h.guard.logger = zap.New(core)
		ok, bad := count("ok"), count("error")
		look := func(what string, first, second, oks, bads int) {
			t.Helper()
			if got := guess(t, h, "192.0.2.1:1", one); got != first {
				t.Errorf("%s: the first token: %d, want %d", what, got, first)
			}
			if got := guess(t, h, "192.0.2.1:1", two); got != second {
				t.Errorf("%s: the second token: %d, want %d", what, got, second)
			}
			if got := guess(t, h, "192.0.2.1:1", adminToken1); got != 200 {
				t.Errorf("%s: another token: %d, want 200", what, got)
			}
			if o, b := count("ok")-ok, count("error")-bad; o != oks || b != bads {
				t.Errorf("%s: read again %d times, and %d times in vain; want %d and %d", what, o, b, oks, bads)
			}
		}
		later := func() { time.Sleep(rereadEvery) }
		look("at first", 200, 401, 0, 0)
		write(two + "\n")
		look("changed a moment ago", 200, 401, 0, 0)
		later()
		look("a minute later", 401, 200, 1, 0)
		write("short")
		later()
		look("with a short one", 401, 200, 1, 1)
		os.Remove(path)
		later()
		look("with the file gone", 401, 200, 1, 2)
		write(adminToken1)
		later()
		look("with that of an admin", 401, 200, 1, 3)
		write(one)
		later()
		look("in order again", 200, 401, 2, 3)
		later()
		look("unchanged", 200, 401, 3, 3)
		for _, e := range logs.All() {
			line := fmt.Sprint(e.Message, e.ContextMap())
			for _, s := range []string{one, two, adminToken1} {
				if strings.Contains(line, s) {
					t.Errorf("the log tells a token: %s", line)
				}
			}
		}
		if n := logs.FilterMessage("token changed").FilterField(zap.String("token", "scraper")).Len(); n != 2 {
			t.Errorf("%d lines tell of a changed token, want 2", n)
		}
	})
}

// TestRefusedIsCounted has every reason.
func TestRefusedIsCounted(t *testing.T) {
	forget(t)
	site := newHandler(t, &Handler{Tokens: []*Token{{Token: readToken1, Role: "read"}}}, ":443")
	open := newHandler(t, new(Handler), "127.0.0.1:80")
	ask := func(h *Handler, method, path, host string, headers ...string) {
		r := httptest.NewRequest(method, path, nil)
		r.Host = host
		for i := 0; i < len(headers); i += 2 {
			r.Header.Set(headers[i], headers[i+1])
		}
		do(t, h, r)
	}
	for reason, provoke := range map[string]func(){
		"no_token":    func() { ask(site, "GET", "/pools", "x") },
		"wrong_token": func() { ask(site, "GET", "/pools", "x", "Authorization", "Bearer wrong-0123456789") },
		"role":        func() { ask(site, "POST", "/admin/reload", "x", "Authorization", "Bearer "+readToken1) },
		"host":        func() { ask(open, "GET", "/pools", "evil.example") },
		"cross_site":  func() { ask(open, "GET", "/pools", "localhost", "Sec-Fetch-Site", "cross-site") },
		"limited": func() {
			for range guessBurst + 1 {
				ask(site, "GET", "/pools", "x", "Authorization", "Bearer wrong-0123456789")
			}
		},
	} {
		forget(t)
		before := gather(t)
		provoke()
		after := gather(t)
		for other := range after {
			want := before[other]
			switch {
			case other == reason:
				want++
			case other == "wrong_token" && reason == "limited":
				want += guessBurst
			}
			if after[other] != want {
				t.Errorf("provoking %s: %s is %v, want %v", reason, other, after[other], want)
			}
		}
		if _, ok := after[reason]; !ok {
			t.Errorf("%s is not counted", reason)
		}
	}
}

// gather is the counter of refused requests by reason.
func gather(t *testing.T) map[string]float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(refused)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			values[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
		}
	}
	return values
}
