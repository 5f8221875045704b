package filter

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus/testutil"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// replace puts another file in the place of one, as an editor would.
func replace(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func start(t *testing.T, c *Chain) {
	t.Helper()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
}

// TestFileIsWatched changes a file under a running filter, for the better and
// for the worse.
func TestFileIsWatched(t *testing.T) {
	path := write(t, "192.0.2.1")
	c := mustChain(t, `[{"filter": "acl", "files": ["`+path+`"]}]`)
	start(t, c)
	defer c.Stop()
	denied := func(client string) bool { return c.Check(from(t, client)) == RuleACL }
	if !denied("192.0.2.1") || denied("192.0.2.2") {
		t.Fatal("the first content does not hold")
	}
	replace(t, path, "192.0.2.2\n")
	kit.Eventually(t, "the second content holds", func() bool { return denied("192.0.2.2") && !denied("192.0.2.1") })
	errors := func() float64 { return testutil.ToFloat64(listRefresh.WithLabelValues(path, "error")) }
	for n, content := range []string{"192.0.2.3\nnonsense\n", ""} {
		replace(t, path, content)
		kit.Settles(t, "the number of failures", float64(n+1), errors)
		if !denied("192.0.2.2") || denied("192.0.2.3") {
			t.Errorf("after %q the content before does not hold", content)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	kit.Settles(t, "the number of failures", 3.0, errors)
	if !denied("192.0.2.2") {
		t.Error("without the file the content before does not hold")
	}
	replace(t, path, "# nobody\n")
	kit.Eventually(t, "an empty list holds", func() bool { return !denied("192.0.2.2") })
}

// feed is a list on a server of the test.
type feed struct {
	*httptest.Server
	asked  atomic.Int64
	answer atomic.Pointer[http.HandlerFunc]
}

func newFeed(t *testing.T, answer http.HandlerFunc) *feed {
	t.Setenv("XDG_DATA_HOME", t.TempDir()) // for what is kept of it
	f := new(feed)
	f.answer.Store(&answer)
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.asked.Add(1)
		(*f.answer.Load())(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

func says(content string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { w.Write([]byte(content)) }
}

// again has the list of a feed fetched once more.
func again(t *testing.T, url string) error {
	t.Helper()
	l, err := takeList(urlList, url)
	if err != nil {
		t.Fatal(err)
	}
	defer giveList(l)
	return l.ask(t.Context())
}

// TestFeed starts with a good answer and then gets bad ones.
func TestFeed(t *testing.T) {
	elsewhere := newFeed(t, says("198.51.100.1\n"))
	f := newFeed(t, says("192.0.2.1\n"))
	c := mustChain(t, `[{"filter": "acl", "urls": ["`+f.URL+`/list?key=secret"]}]`)
	if f.asked.Load() > 0 {
		t.Error("it was asked before the start")
	}
	start(t, c)
	defer c.Stop()
	denied := func() bool { return c.Check(from(t, "192.0.2.1")) == RuleACL }
	if !denied() {
		t.Fatal("the first answer was not waited for")
	}
	for name, tc := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"an error":     {func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(500) }, "status 500"},
		"a redirect":   {func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, elsewhere.URL, http.StatusFound) }, "status 302: redirects are not followed"},
		"no networks":  {says("# none\n"), "the answer has no networks"},
		"nothing":      {says(""), "the answer has no networks"},
		"a wrong line": {says("192.0.2.9\n<html>\n"), `line 2: "<html>" is no network`},
		"too much":     {says(strings.Repeat("# all comment\n", maxList/10)), "the answer has more than"},
		"half of it": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "99")
			w.Write([]byte("192.0.2.9\n"))
		}, "unexpected EOF"},
		"not asked with": {func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(304) }, "status 304"},
	} {
		f.answer.Store(&tc.answer)
		if err := again(t, f.URL+"/list?key=secret"); err == nil || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %s", name, err, tc.want)
		}
		if !denied() {
			t.Errorf("after %s the list before does not hold", name)
		}
	}
	if elsewhere.asked.Load() > 0 {
		t.Error("the redirect was followed")
	}
	if n := testutil.ToFloat64(listNetworks.WithLabelValues(f.URL + "/list")); n != 1 {
		t.Errorf("filter_list_networks is %v", n)
	}
	tagged := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Etag", `"one"`)
		if r.Header.Get("If-None-Match") == `"one"` {
			w.WriteHeader(304)
			return
		}
		w.Write([]byte("192.0.2.2\n"))
	})
	f.answer.Store(&tagged)
	for range 2 {
		if err := again(t, f.URL+"/list?key=secret"); err != nil {
			t.Error(err)
		}
		if denied() {
			t.Error("the new list does not hold")
		}
	}
}

// TestFeedThatIsDown starts with and without an answer that was kept.
func TestFeedThatIsDown(t *testing.T) {
	down := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(500) })
	f := newFeed(t, down)
	deny := `[{"filter": "source_limit", "max_per_ip": 9}, {"filter": "acl", "urls": ["` + f.URL + `?key=secret"]}]`
	allow := `[{"filter": "acl", "allow_urls": ["` + f.URL + `?key=secret"], "allow": ["192.0.2.7"]}]`
	run := func(config string) (*Chain, func(), error) { // as a process does that starts and ends
		ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
		c, err := Load(ctx, t.Name(), rawList(t, config))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			cancel()
			return nil, nil, err
		}
		return c, func() { c.Stop(); cancel() }, nil
	}
	unknown := func(what string) {
		t.Helper()
		for config, path := range map[string]string{deny: "filters[1]: urls[0]", allow: "filters[0]: allow_urls[0]"} {
			if _, _, err := run(config); err == nil || err.Error() != path+": "+f.URL+" cannot be fetched, and no earlier answer is kept: status 500" {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
	unknown("never fetched")

	good := says("192.0.2.1\n")
	f.answer.Store(&good)
	_, end, err := run(deny)
	if err != nil {
		t.Fatal(err)
	}
	end()
	f.answer.Store(&down)
	for config, want := range map[string][2]string{deny: {RuleACL, ""}, allow: {"", RuleACL}} {
		c, end, err := run(config)
		if err != nil {
			t.Fatal(err)
		}
		for i, client := range []string{"192.0.2.1", "192.0.2.2"} {
			if rule := c.Check(from(t, client)); rule != want[i] {
				t.Errorf("%s by what was kept: %q, want %q", client, rule, want[i])
			}
		}
		if n := testutil.ToFloat64(listLastOK.WithLabelValues(f.URL)); n > float64(time.Now().Unix()) || n < float64(time.Now().Add(-time.Minute).Unix()) {
			t.Errorf("filter_list_last_ok is %v", n)
		}
		end()
	}

	l := &list{kind: urlList, where: f.URL + "?key=secret"}
	for _, broken := range []string{"192.0.2.1\nnonsense\n", "", "# none\n", strings.Repeat("# all comment\n", maxList/10)} {
		if err := l.keep([]byte(broken)); err != nil {
			t.Fatal(err)
		}
		unknown(fmt.Sprintf("%.20q is kept", broken))
	}
	if err := os.Remove(l.kept()); err != nil {
		t.Fatal(err)
	}
	unknown("removed")
}

// TestListIsShared holds that filters with the same list, and a reload, leave
// one worker and ask once.
func TestListIsShared(t *testing.T) {
	f := newFeed(t, says("192.0.2.1\n"))
	config := `[{"filter": "acl", "urls": ["` + f.URL + `"]}, {"filter": "acl", "urls": ["` + f.URL + `"]}]`
	old := mustChain(t, config)
	start(t, old)
	for range 3 { // reloads: the new one starts before the old one stops
		c := mustChain(t, config)
		start(t, c)
		old.Stop()
		old = c
	}
	if n := f.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	if old.Check(from(t, "192.0.2.1")) != RuleACL {
		t.Error("the list was lost")
	}
	old.Stop()
}

func FuzzParseList(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8\n", "# x\n\n::1 ; y\r\n2001:db8::/32", "10.0.0.1/8", "\x00", "1.2.3.4 5.6.7.8\n"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		set, err := parseList(content)
		if err == nil && set.Len() > 0 && len(content) < 2 {
			t.Errorf("%q has %d networks", content, set.Len())
		}
	})
}
