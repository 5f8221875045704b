package consul

import (
	"context"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery/consul/consultest"
)

const canary = "canary-91d2-token"

func provision(t *testing.T, s *Source) *Source {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	t.Cleanup(cancel)
	if err := s.Provision(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func source(t *testing.T, a *consultest.Agent) *Source {
	t.Helper()
	return provision(t, &Source{Service: "game", Addr: a.URL})
}

func list(t *testing.T, s *Source) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Long)
	defer cancel()
	set, err := s.List(ctx)
	if err != nil && strings.Contains(err.Error(), canary) {
		t.Fatalf("the error has the token: %v", err)
	}
	var all []string
	for _, e := range set.Endpoints {
		all = append(all, fmt.Sprintf("%v*%d", e.Addr, e.Weight))
	}
	return strings.Join(all, " "), err
}

func mustList(t *testing.T, s *Source, want string) {
	t.Helper()
	if got, err := list(t, s); err != nil || got != want {
		t.Fatalf("listed %q, %v; want %q", got, err, want)
	}
}

func listFails(t *testing.T, s *Source, want string) {
	t.Helper()
	if got, err := list(t, s); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "listing service ") {
		t.Errorf("listed %q, %v; want an error with %q", got, err, want)
	}
}

// follow does what the host does: it lists at first and whenever Watch has told
// of a change, and counts.
type follow struct {
	lists atomic.Int64
	err   atomic.Pointer[error] // of Watch
}

func startFollow(t *testing.T, s *Source) *follow {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &follow{}
	changed, done := make(chan struct{}, 1), make(chan struct{}, 2)
	changed <- struct{}{}
	go func() {
		defer func() { done <- struct{}{} }()
		for {
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
			if _, err := s.List(ctx); err == nil {
				f.lists.Add(1)
			}
		}
	}()
	go func() {
		defer func() { done <- struct{}{} }()
		err := s.Watch(ctx, func() {
			select {
			case changed <- struct{}{}:
			default:
			}
		})
		f.err.Store(&err)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		<-done
		if err := *f.err.Load(); err != nil && strings.Contains(err.Error(), canary) {
			t.Errorf("the error has the token: %v", err)
		}
	})
	return f
}

func (f *follow) wait(t *testing.T, lists int64) {
	t.Helper()
	kit.Settles(t, "the number of lists", lists, f.lists.Load)
}

func (f *follow) fails(t *testing.T, want string) {
	t.Helper()
	kit.Eventually(t, "the end of the watch", func() bool { return f.err.Load() != nil })
	if err := *f.err.Load(); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "watching service game: ") {
		t.Errorf("Watch returned %v, want an error with %q", err, want)
	}
}

func TestList(t *testing.T) {
	a := consultest.New(t)
	s := source(t, a)
	mustList(t, s, "") // not known
	a.Set("game",
		consultest.Instance{ID: "a", Address: "10.0.0.1", Node: "192.0.2.1", Port: 7777},
		consultest.Instance{ID: "b", Node: "192.0.2.2", Port: 7778, Weight: 5},
		consultest.Instance{ID: "c", Address: "10.0.0.3", Port: 7777, Failing: true},
		consultest.Instance{ID: "d", Address: "fd00::1", Port: 7777},
		consultest.Instance{ID: "e", Address: "10.0.0.5", Port: 7777, Weight: 1 << 20},
	)
	mustList(t, s, "10.0.0.1:7777*1 192.0.2.2:7778*5 [fd00::1]:7777*1 10.0.0.5:7777*65535")
	a.Set("game")
	mustList(t, s, "")
}

// TestQuestions checks what the agent is asked, to the letter.
func TestQuestions(t *testing.T) {
	a := consultest.New(t)
	t.Setenv("WAYHOUSE_TEST_DC", "eu 1")
	s := provision(t, &Source{
		Service: "a/b game?", Addr: a.URL + "/consul", Tag: "prod&x=y", Namespace: "team", Datacenter: "{env.WAYHOUSE_TEST_DC}",
	})
	a.Look(func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("X-Consul-Index", "7")
		fmt.Fprint(w, "[]")
		return !consultest.Waiting(r)
	})
	mustList(t, s, "")
	startFollow(t, s)
	kit.Eventually(t, "a question that waits", func() bool { return a.Waits() > 0 })
	want := []string{
		"/consul/v1/health/service/a%2Fb%20game%3F?dc=eu+1&index=7&ns=team&passing=true&tag=prod%26x%3Dy&wait=300s",
		"/consul/v1/health/service/a%2Fb%20game%3F?dc=eu+1&ns=team&passing=true&tag=prod%26x%3Dy",
	}
	got := a.URIs()
	slices.Sort(got)
	if got = slices.Compact(got); !slices.Equal(got, want) {
		t.Errorf("asked for\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestTag(t *testing.T) {
	a := consultest.New(t)
	a.Set("game", consultest.Instance{ID: "a", Address: "10.0.0.1", Port: 1, Tags: []string{"prod"}}, consultest.Instance{ID: "b", Address: "10.0.0.2", Port: 1})
	mustList(t, provision(t, &Source{Service: "game", Addr: a.URL, Tag: "prod"}), "10.0.0.1:1*1")
}

// TestWatch has every change told, and nothing asked meanwhile.
func TestWatch(t *testing.T) {
	a := consultest.New(t)
	s := source(t, a)
	f := startFollow(t, s)
	f.wait(t, 1)
	for i := range 3 {
		kit.Settles(t, "the number of questions that wait", i+1, a.Waits)
		a.Set("game", consultest.Instance{ID: "a", Address: "10.0.0.1", Port: i + 1})
		f.wait(t, int64(i+2))
	}
	kit.Settles(t, "the number of questions that wait", 4, a.Waits)
	if n := a.Lists(); n != 4 {
		t.Errorf("the agent was asked %d times, want 4", n)
	}
}

// TestIndex has an index that says less than one should think.
func TestIndex(t *testing.T) {
	t.Run("backwards", func(t *testing.T) {
		a := consultest.New(t)
		f := startFollow(t, source(t, a))
		kit.Settles(t, "the number of questions that wait", 1, a.Waits)
		a.Touch(3)
		f.wait(t, 2)
		kit.Settles(t, "the number of questions that wait", 2, a.Waits)
		if got := a.URIs(); !strings.Contains(got[len(got)-1], "index=3&") {
			t.Errorf("it goes on with %s", got[len(got)-1])
		}
		a.Set("game")
		f.wait(t, 3)
	})
	t.Run("missing", func(t *testing.T) {
		a := consultest.New(t)
		f := startFollow(t, source(t, a))
		kit.Settles(t, "the number of questions that wait", 1, a.Waits)
		a.WithoutIndex(true)
		f.wait(t, 2)
		f.fails(t, "no X-Consul-Index")
	})
	t.Run("zero", func(t *testing.T) {
		a := consultest.New(t)
		f := startFollow(t, source(t, a))
		kit.Settles(t, "the number of questions that wait", 1, a.Waits)
		a.Touch(0) // and a list of it would have one answered at once, for ever
		f.wait(t, 2)
		f.fails(t, "no X-Consul-Index")
	})
	t.Run("missing for a while", func(t *testing.T) {
		a := consultest.New(t)
		a.Look(func(w http.ResponseWriter, r *http.Request) bool {
			if !consultest.Waiting(r) || a.Waits() > 1 {
				return false
			}
			fmt.Fprint(w, "[]")
			return true
		})
		f := startFollow(t, source(t, a))
		f.wait(t, 2)
		kit.Settles(t, "the number of questions that wait", 2, a.Waits)
	})
	t.Run("no change", func(t *testing.T) {
		a := consultest.New(t)
		s := source(t, a)
		s.rhythm.pause = time.Millisecond
		a.Look(func(w http.ResponseWriter, r *http.Request) bool {
			if !consultest.Waiting(r) || a.Waits() > 5 {
				return false
			}
			w.Header().Set("X-Consul-Index", "100")
			fmt.Fprint(w, "[]")
			return true
		})
		f := startFollow(t, s)
		kit.Settles(t, "the number of questions that wait", 6, a.Waits)
		if n := f.lists.Load(); n != 1 {
			t.Errorf("%d lists were made, want 1", n)
		}
	})
}

// TestNoHurry has an agent that answers at once that nothing has changed, though
// it should wait.
func TestNoHurry(t *testing.T) {
	a := consultest.New(t)
	s := source(t, a)
	s.rhythm.pause = time.Hour
	a.Look(func(w http.ResponseWriter, _ *http.Request) bool {
		w.Header().Set("X-Consul-Index", "100")
		fmt.Fprint(w, "[]")
		return true
	})
	f := startFollow(t, s)
	kit.Settles(t, "the number of questions that wait", 1, a.Waits)
	f.wait(t, 1)
	// The source is in its pause, or will be: ask the agent once more, so that
	// something had time to go wrong.
	mustList(t, s, "")
	if n := a.Waits(); n != 1 {
		t.Errorf("%d questions that wait, want 1", n)
	}
}

func TestPatienceEnds(t *testing.T) {
	a := consultest.New(t)
	s := source(t, a)
	s.rhythm.wait, s.rhythm.patience = 10*time.Millisecond, 10*time.Millisecond
	a.Look(func(_ http.ResponseWriter, r *http.Request) bool {
		if consultest.Waiting(r) {
			<-r.Context().Done()
			return true
		}
		return false
	})
	startFollow(t, s).fails(t, "deadline exceeded")
}

// TestBadLists has answers of which nothing must be taken.
func TestBadLists(t *testing.T) {
	const one = `{"Service":{"Address":"10.0.0.1","Port":1}}`
	abort := func(w http.ResponseWriter) {
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	for name, tc := range map[string]struct {
		answer func(http.ResponseWriter)
		want   string
	}{
		"500":        {func(w http.ResponseWriter) { http.Error(w, "rpc error: No cluster leader", 500) }, "status 500: rpc error: No cluster leader"},
		"no JSON":    {func(w http.ResponseWriter) { fmt.Fprint(w, "<html>") }, "invalid character"},
		"object":     {func(w http.ResponseWriter) { fmt.Fprint(w, "{}") }, "where an array belongs"},
		"two":        {func(w http.ResponseWriter) { fmt.Fprint(w, "[][]") }, "more follows"},
		"wrong kind": {func(w http.ResponseWriter) { fmt.Fprint(w, `[{"Service":{"Port":"x"}}]`) }, "cannot unmarshal"},
		"names": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `[{"Node":{"Address":"db.example.com"},"Service":{"Port":1}}]`)
		}, `none of 1 instances has an IP address; one has "db.example.com"`},
		"cut":        {func(w http.ResponseWriter) { fmt.Fprint(w, "["+one+",{"); abort(w) }, "cut off"},
		"cut after":  {func(w http.ResponseWriter) { fmt.Fprint(w, "["+one); abort(w) }, "cut off"},
		"cut at end": {func(w http.ResponseWriter) { fmt.Fprint(w, "["+one+"]"); abort(w) }, "cut off"},
		"1 GiB of one": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `["`)
			flood(w, strings.Repeat("x", 4096))
		}, "more than 1 MiB"},
		"1 GiB of many": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `[{}`)
			flood(w, strings.Repeat(" ", 4094)+",{}")
		}, "more than 32 MiB"},
		"1 GiB of small": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `[{}`)
			flood(w, strings.Repeat(",{}", 1000))
		}, "more than 65536 instances"},
		"redirect": {func(w http.ResponseWriter) {
			w.Header().Set("Location", "http://192.0.2.1/")
			w.WriteHeader(http.StatusFound)
		}, "redirects are not followed"},
	} {
		t.Run(name, func(t *testing.T) {
			a := consultest.New(t)
			a.Look(func(w http.ResponseWriter, _ *http.Request) bool { tc.answer(w); return true })
			listFails(t, source(t, a), tc.want)
		})
	}
}

// flood sends a gibibyte, to those who take it.
func flood(w http.ResponseWriter, again string) {
	for n := 0; n < 1<<30; n += len(again) {
		if _, err := fmt.Fprint(w, again); err != nil {
			return
		}
	}
}

// TestRedirectWithToken has an agent that sends its askers elsewhere.
func TestRedirectWithToken(t *testing.T) {
	var strayed atomic.Int64
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { strayed.Add(1) }))
	defer other.Close()
	a := consultest.New(t)
	a.Look(func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, other.URL+r.RequestURI, http.StatusTemporaryRedirect)
		return true
	})
	s := provision(t, &Source{Service: "game", Addr: a.URL, TokenFile: file(t, canary)})
	listFails(t, s, "status 307")
	if n := strayed.Load(); n != 0 {
		t.Errorf("%d requests went where the redirect points to", n)
	}
}

func file(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestTokenRotates has the token replaced while the source waits for changes.
func TestTokenRotates(t *testing.T) {
	a := consultest.New(t)
	a.Require(canary + "-1")
	path := file(t, canary+"-1\n")
	s := provision(t, &Source{Service: "game", Addr: a.URL, TokenFile: path})
	f := startFollow(t, s)
	kit.Settles(t, "the number of questions that wait", 1, a.Waits)
	if err := os.WriteFile(path, []byte(canary+"-2"), 0o600); err != nil {
		t.Fatal(err)
	}
	a.Require(canary + "-2")
	a.Set("game", consultest.Instance{ID: "a", Address: "10.0.0.1", Port: 1})
	f.wait(t, 2)
	a.Require(canary + "-3")
	listFails(t, s, "status 403: Permission denied")
}

func TestPrivateAuthority(t *testing.T) {
	a := consultest.NewTLS(t)
	a.Require(canary)
	ca := file(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw})))
	mustList(t, provision(t, &Source{Service: "game", Addr: a.URL, TokenFile: file(t, canary), CAFile: ca}), "")
	listFails(t, provision(t, &Source{Service: "game", Addr: a.URL, TokenFile: file(t, canary)}), "certificate")
	if n := a.Lists(); n != 1 {
		t.Errorf("the agent was asked %d times, want 1: the other asker does not know it", n)
	}
}

func TestProvisionRefuses(t *testing.T) {
	token := file(t, canary)
	for name, tc := range map[string]struct {
		s    *Source
		want string
	}{
		"no service":     {&Source{}, "service: none"},
		"a path":         {&Source{Service: ".."}, "service: \"..\" is a part of paths"},
		"no URL":         {&Source{Service: "a", Addr: "127.0.0.1:8500"}, "addr: this is not a URL"},
		"a user":         {&Source{Service: "a", Addr: "http://u:" + canary + "@127.0.0.1"}, "addr: a user in the URL"},
		"in the clear":   {&Source{Service: "a", Addr: "http://192.0.2.1:8500", TokenFile: token}, "addr: \"http://192.0.2.1:8500\" is http:// to another host"},
		"no token":       {&Source{Service: "a", TokenFile: token + "x"}, "token_file: open " + token + "x: no such file"},
		"an empty token": {&Source{Service: "a", TokenFile: file(t, "\n")}, "token_file: "},
		"no authority":   {&Source{Service: "a", Addr: "https://a", CAFile: token}, "ca_file: " + token + " has no certificate in PEM"},
		"CA over http":   {&Source{Service: "a", CAFile: token}, "ca_file: the addr is http://"},
		"placeholder":    {&Source{Service: "a", Tag: "{env.WAYHOUSE_TEST_NONE}"}, "tag: "},
		"interval":       {&Source{Service: "a", Settings: discovery.Settings{RefreshInterval: new(caddy.Duration)}}, "refresh_interval: 0s is less than 1s"},
	} {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
		err := tc.s.Provision(ctx)
		if err == nil {
			err = tc.s.Validate()
		}
		if err == nil || !strings.HasPrefix(err.Error(), tc.want) || strings.Contains(err.Error(), canary) {
			t.Errorf("%s: %v, want %s…", name, err, tc.want)
		}
		tc.s.Close()
		cancel()
	}
	s := provision(t, &Source{Service: "a"})
	if got := s.url.String(); got != "http://127.0.0.1:8500" {
		t.Errorf("the default is %s", got)
	}
	provision(t, &Source{Service: "a", Addr: "http://192.0.2.1:8500"}) // no token, no secret
}

func TestCaddyfile(t *testing.T) {
	var s Source
	d := caddyfile.NewTestDispenser("consul game {\n addr https://a:8501\n tag prod\n namespace n\n datacenter dc\n token_file /t\n ca_file /c\n refresh_interval 20s\n}")
	if err := s.UnmarshalCaddyfile(d); err != nil {
		t.Fatal(err)
	}
	interval := caddy.Duration(20 * time.Second)
	if s.RefreshInterval == nil || *s.RefreshInterval != interval || s.Service != "game" || s.Addr != "https://a:8501" || s.Tag != "prod" ||
		s.Namespace != "n" || s.Datacenter != "dc" || s.TokenFile != "/t" || s.CAFile != "/c" {
		t.Errorf("read %v %v %v %v %v %v %v %v", s.RefreshInterval, s.Service, s.Addr, s.Tag, s.Namespace, s.Datacenter, s.TokenFile, s.CAFile)
	}
	for text, want := range map[string]string{
		"consul":                   "the service is missing",
		"consul a b":               `unexpected argument "b" of the source consul`,
		"consul a {\n token x\n}":  `unrecognized option "token" of the source consul; did you mean token_file?`,
		"consul a {\n tag a b\n}":  `tag: unexpected argument "b"`,
		"consul a {\n tag a {\n}}": "tag: takes no block",
	} {
		if err := new(Source).UnmarshalCaddyfile(caddyfile.NewTestDispenser(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{
		`[{"Node":{"Node":"n","Address":"192.0.2.1"},"Service":{"ID":"a","Address":"10.0.0.1","Port":7777,"Weights":{"Passing":3,"Warning":1}},"Checks":[]}]`,
		`[{"Node":{"Address":"::ffff:192.0.2.1"},"Service":{"Port":1}},null,{}]`, `null`, `[`, `[]]`, `[{"Service":{"Port":-1,"Weights":{"Passing":-9}}}]`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		found, err := decode(fetch.NewDecoder(strings.NewReader(string(b)), 1<<12, 1<<16))
		if err != nil && found != nil {
			t.Errorf("%d were found in what is wrong: %v", len(found), err)
		}
		for _, e := range found {
			if e.Addr.IsValid() && (e.Addr.Port() == 0 || e.Weight == 0) || e.Addr != (netip.AddrPort{}) && !e.Addr.IsValid() {
				t.Errorf("found %+v", e)
			}
		}
	})
}
