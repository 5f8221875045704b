package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	"github.com/wayhouse-proxy/wayhouse/internal/kube/kubetest"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

const (
	things = "/apis/example.com/v1/namespaces/games/things"
	canary = "canary-77ab-token"
)

type thing struct {
	Metadata struct{ Name string }
	N        int
}

func names(found []string, t *thing) []string { return append(found, t.Metadata.Name) }

func follow(t *testing.T, a Access, api *kubetest.API) *Follower {
	t.Helper()
	a.API, a.Namespace = api.URL, "games"
	if a.pod == (pod{}) {
		a.pod = pod{filepath.Join(t.TempDir(), "none"), filepath.Join(t.TempDir(), "none")}
	}
	c, err := a.Connect()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c.Follow(Objects{Group: "example.com/v1", Resource: "things", Labels: "app=game"})
}

func put(api *kubetest.API, name string) {
	api.Put(things, name, map[string]string{"app": "game"}, map[string]any{"n": 1})
}

// mustList fails the test unless the names are those.
func mustList(t *testing.T, f *Follower, want ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Long)
	defer cancel()
	got, err := List(ctx, f, names)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("listed %.300s, %v; want %.300s", fmt.Sprint(got), err, fmt.Sprint(want))
	}
}

func listError(t *testing.T, f *Follower) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Long)
	defer cancel()
	got, err := List(ctx, f, names)
	if err == nil {
		t.Fatalf("listed %v, want an error", got)
	}
	if strings.Contains(err.Error(), canary) {
		t.Fatalf("the error has the token: %v", err)
	}
	return err.Error()
}

// watching is a Watch that runs.
type watching struct {
	changes atomic.Int64
	err     atomic.Pointer[error] // of the end
	cancel  func()
}

func watch(t *testing.T, f *Follower) *watching {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	w := &watching{cancel: cancel}
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := f.Watch(ctx, func() { w.changes.Add(1) })
		w.err.Store(&err)
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

func (w *watching) waitChanges(t *testing.T, n int64) {
	t.Helper()
	kit.Settles(t, "the number of changes", n, w.changes.Load)
}

func (w *watching) end(t *testing.T) string {
	t.Helper()
	kit.Eventually(t, "the end of the watch", func() bool { return w.err.Load() != nil })
	if err := *w.err.Load(); err != nil {
		if strings.Contains(err.Error(), canary) {
			t.Fatalf("the error has the token: %v", err)
		}
		return err.Error()
	}
	return ""
}

func TestListSelects(t *testing.T) {
	api := kubetest.New(t)
	f := follow(t, Access{}, api)
	mustList(t, f)
	put(api, "b")
	put(api, "a")
	api.Put(things, "other", map[string]string{"app": "web"}, nil)
	api.Put("/apis/example.com/v1/namespaces/web/things", "elsewhere", map[string]string{"app": "game"}, nil)
	mustList(t, f, "a", "b")
	api.Delete(things, "b")
	mustList(t, f, "a")
}

func TestListInPages(t *testing.T) {
	api := kubetest.New(t)
	f := follow(t, Access{}, api)
	var want []string
	for i := range 2*pageSize + 1 {
		want = append(want, fmt.Sprintf("t%05d", i))
		put(api, want[i])
	}
	mustList(t, f, want...)
	if n := api.Lists(); n != 3 {
		t.Errorf("%d pages were asked for, want 3", n)
	}
	for _, q := range api.Queries() {
		if !strings.Contains(q, "limit=500") || !strings.Contains(q, "labelSelector=app%3Dgame") {
			t.Errorf("asked with %s", q)
		}
	}
}

// TestCompactionBetweenPages has the version of the first page gone when the
// second is asked for: the list begins again.
func TestCompactionBetweenPages(t *testing.T) {
	for _, times := range []int{1, 2} {
		api := kubetest.New(t)
		f := follow(t, Access{}, api)
		for i := range pageSize + 1 {
			put(api, fmt.Sprintf("t%05d", i))
		}
		left := times
		api.Look(func(_ http.ResponseWriter, r *http.Request) bool {
			if r.URL.Query().Has("continue") && left > 0 {
				left--
				api.Compact(false)
			}
			return false
		})
		found, err := List(context.Background(), f, names)
		if times == 1 && (err != nil || len(found) != pageSize+1) {
			t.Errorf("compacted once: listed %d, %v; want %d", len(found), err, pageSize+1)
		}
		if times == 2 && err == nil {
			t.Error("compacted twice: no error; a list must not begin again for ever")
		}
	}
}

func TestPagesWithoutEnd(t *testing.T) {
	api := kubetest.New(t)
	api.Look(func(w http.ResponseWriter, _ *http.Request) bool {
		fmt.Fprint(w, `{"metadata":{"resourceVersion":"1","continue":"more"},"items":[]}`)
		return true
	})
	if got := listError(t, follow(t, Access{}, api)); !strings.Contains(got, "more than 4096 pages") {
		t.Error(got)
	}
}

// TestBadLists has answers of which nothing must be taken.
func TestBadLists(t *testing.T) {
	for name, tc := range map[string]struct{ body, want string }{
		"no JSON":            {`<html>`, "invalid character"},
		"nothing":            {``, "cut off"},
		"cut in an item":     {`{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"a"}},{"meta`, "cut off"},
		"cut behind an item": {`{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"a"}}`, "cut off"},
		"no items":           {`{"kind":"Status","metadata":{}}`, "no items"},
		"another array":      {`[]`, "where an object belongs"},
		"items no array":     {`{"items":{"a":1}}`, "where an array belongs"},
		"two":                {`{"metadata":{"resourceVersion":"1"},"items":[]}{}`, "more follows"},
		"wrong kind":         {`{"items":[{"metadata":{"name":7}}]}`, "cannot unmarshal"},
	} {
		t.Run(name, func(t *testing.T) {
			api := kubetest.New(t)
			api.Look(func(w http.ResponseWriter, _ *http.Request) bool {
				fmt.Fprint(w, tc.body)
				return true
			})
			if got := listError(t, follow(t, Access{}, api)); !strings.Contains(got, tc.want) || !strings.HasPrefix(got, "listing things in namespace games: ") {
				t.Errorf("the error is %q, want one with %q", got, tc.want)
			}
		})
	}
}

// TestTruncatedChunk has a connection that ends within the chunked body of a
// list, behind what looks like all of it.
func TestTruncatedChunk(t *testing.T) {
	api := kubetest.New(t)
	api.Look(func(w http.ResponseWriter, _ *http.Request) bool {
		fmt.Fprint(w, `{"metadata":{"resourceVersion":"1"},"items":[]}`)
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	if got := listError(t, follow(t, Access{}, api)); !strings.Contains(got, "cut off") {
		t.Error(got)
	}
}

func TestHugeLists(t *testing.T) {
	for name, tc := range map[string]struct{ head, again, want string }{
		"one object":      {`{"items":[{"metadata":{"name":"`, strings.Repeat("x", 4096), "an object has more than 4 MiB"},
		"many objects":    {`{"items":[{}`, strings.Repeat(" ", 4094) + ",{}", "all together more than 64 MiB"},
		"too many things": {`{"items":[{}`, strings.Repeat(",{}", 1000), "more than 65536"},
		"another field":   {`{"other":[{}`, strings.Repeat(",{}", 1000), "an object has more than 4 MiB"},
	} {
		t.Run(name, func(t *testing.T) {
			api := kubetest.New(t)
			var sent atomic.Int64
			done := make(chan struct{})
			api.Look(func(w http.ResponseWriter, _ *http.Request) bool {
				defer close(done)
				fmt.Fprint(w, tc.head)
				for sent.Load() < 1<<30 {
					n, err := fmt.Fprint(w, tc.again)
					if sent.Add(int64(n)); err != nil {
						break
					}
				}
				panic(http.ErrAbortHandler)
			})
			before := resident(t, "VmRSS:")
			forgetPeak(t)
			if got := listError(t, follow(t, Access{}, api)); !strings.Contains(got, tc.want) {
				t.Errorf("the error is %q, want one with %q", got, tc.want)
			}
			<-done
			if n := sent.Load(); n > maxList+32<<20 { // buffers of sockets
				t.Errorf("%d MiB were taken", n>>20)
			}
			if grown := resident(t, "VmHWM:") - before; grown > 64<<20 && !kit.Race {
				t.Errorf("the process has grown by %d MiB", grown>>20)
			}
		})
	}
}

// resident is the memory of the process: VmRSS now, VmHWM at most.
func resident(t *testing.T, which string) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), which)
	n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n << 10
}

// forgetPeak has VmHWM begin at what it is now.
func forgetPeak(t *testing.T) {
	t.Helper()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
}

func TestWatchTells(t *testing.T) {
	api := kubetest.New(t)
	f := follow(t, Access{}, api)
	w := watch(t, f) // waits for a list
	mustList(t, f)
	put(api, "a")
	w.waitChanges(t, 1)
	put(api, "a")
	w.waitChanges(t, 2)
	api.Put(things, "other", map[string]string{"app": "web"}, nil)
	api.Delete(things, "a")
	w.waitChanges(t, 3)
	w.cancel()
	if got := w.end(t); got != "" {
		t.Errorf("at the end of its context Watch returned %s", got)
	}
	for _, q := range api.Queries() {
		if strings.Contains(q, "watch=true") && (!strings.Contains(q, "resourceVersion=1000") || !strings.Contains(q, "allowWatchBookmarks=true") ||
			!strings.Contains(q, "timeoutSeconds=") || !strings.Contains(q, "labelSelector=app%3Dgame")) {
			t.Errorf("watched with %s", q)
		}
	}
	if n := api.Watches(); n != 1 {
		t.Errorf("%d watches were opened, want 1", n)
	}
}

// TestWatchConcerns leaves out what is no news, and goes on behind it.
func TestWatchConcerns(t *testing.T) {
	api := kubetest.New(t)
	f := follow(t, Access{}, api)
	type seen struct {
		name    string
		deleted bool
	}
	var asked []seen // by Watch alone, until the end
	f.concerns = func(deleted bool, object json.RawMessage) bool {
		var o thing
		if err := json.Unmarshal(object, &o); err != nil {
			t.Errorf("%s: %v", object, err)
		}
		asked = append(asked, seen{o.Metadata.Name, deleted})
		return o.Metadata.Name != "dull"
	}
	w := watch(t, f)
	mustList(t, f)
	put(api, "dull")
	put(api, "dull")
	put(api, "a")
	api.Delete(things, "dull")
	api.Delete(things, "a")
	w.waitChanges(t, 2)
	w.cancel()
	w.end(t)
	if want := []seen{{"dull", false}, {"dull", false}, {"a", false}, {"dull", true}, {"a", true}}; !slices.Equal(asked, want) {
		t.Errorf("asked about %v, want %v", asked, want)
	}
}

// TestWatchGoesOn has the API end a watch: the next goes on where it was, and
// tells nothing twice and leaves nothing out.
func TestWatchGoesOn(t *testing.T) {
	api := kubetest.New(t)
	f := follow(t, Access{}, api)
	mustList(t, f)
	w := watch(t, f)
	put(api, "a")
	w.waitChanges(t, 1)
	api.EndWatches()
	put(api, "b")
	w.waitChanges(t, 2)
	kit.Settles(t, "the number of watches", 2, api.Watches)
}

// TestBookmark has a watch begin at the version of a bookmark, when what was
// before it is forgotten.
func TestBookmark(t *testing.T) {
	api := kubetest.New(t)
	f := follow(t, Access{}, api)
	mustList(t, f)
	w := watch(t, f)
	kit.Settles(t, "the number of watches", 1, api.Watches)
	for range 5 { // of others
		api.Put(things, "other", map[string]string{"app": "web"}, nil)
	}
	api.Bookmark()
	kit.Settles(t, "the version", "1005", f.current)
	put(api, "a")
	w.waitChanges(t, 1)
}

func (f *Follower) current() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.version
}

// TestGone has the version of a watch forgotten, told in both ways: a list is
// wanted at once, and the watch goes on from it.
func TestGone(t *testing.T) {
	for _, byEvent := range []bool{false, true} {
		t.Run(fmt.Sprint("by event ", byEvent), func(t *testing.T) {
			api := kubetest.New(t)
			f := follow(t, Access{}, api)
			mustList(t, f)
			api.Compact(byEvent)
			w := watch(t, f)
			w.waitChanges(t, 1)
			mustList(t, f)
			put(api, "a")
			w.waitChanges(t, 2)
			if n := api.Watches(); n != 2 {
				t.Errorf("%d watches were opened, want 2", n)
			}
		})
	}
}

// TestGoneAgain has every version gone, of lists that have just been made: the
// watch ends with an error, so that its caller waits.
func TestGoneAgain(t *testing.T) {
	api := kubetest.New(t)
	f := follow(t, Access{}, api)
	api.Look(func(w http.ResponseWriter, r *http.Request) bool {
		if kubetest.IsWatch(r) {
			kubetest.Refuse(w, http.StatusGone, "Expired", "too old resource version")
			return true
		}
		return false
	})
	mustList(t, f)
	w := watch(t, f)
	w.waitChanges(t, 1)
	mustList(t, f)
	if got := w.end(t); !strings.Contains(got, "has just been made is gone") {
		t.Errorf("Watch returned %q", got)
	}
	if n := api.Watches(); n != 2 {
		t.Errorf("%d watches were opened, want 2", n)
	}
}

// TestBadWatches has what ends a Watch with an error.
func TestBadWatches(t *testing.T) {
	line := func(s string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) { fmt.Fprint(w, s) }
	}
	for name, tc := range map[string]struct {
		answer func(http.ResponseWriter)
		want   string
	}{
		"no right": {func(w http.ResponseWriter) {
			kubetest.Refuse(w, http.StatusForbidden, "Forbidden", `things is forbidden: User "x" cannot watch`)
		}, `status 403: things is forbidden: User "x" cannot watch`},
		"500":           {func(w http.ResponseWriter) { kubetest.Refuse(w, 500, "InternalError", "etcd") }, "status 500: etcd"},
		"ends at once":  {func(http.ResponseWriter) {}, "ends it at once"},
		"another error": {line(`{"type":"ERROR","object":{"kind":"Status","code":500,"reason":"InternalError","message":"x ` + canary + `"}}`), "status 500 InternalError: x …"},
		"another type":  {line(`{"type":"RENAMED","object":{}}`), `an event of type "RENAMED"`},
		"no JSON":       {line(`MODIFIED`), "invalid character"},
		"cut in an event": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `{"type":"MODIFIED","object":{"meta`)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}, "cut off"},
		"cut behind an event": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"1"}}}`+"\n")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}, "cut off"},
		"an event without end": {func(w http.ResponseWriter) {
			fmt.Fprint(w, `{"type":"MODIFIED","object":{"x":"`)
			for n := 0; n < 1<<30; n += 4096 {
				if _, err := fmt.Fprint(w, strings.Repeat("x", 4096)); err != nil {
					return
				}
			}
		}, "an object has more than 4 MiB"},
		"redirect": {func(w http.ResponseWriter) {
			w.Header().Set("Location", "http://192.0.2.1/")
			w.WriteHeader(http.StatusTemporaryRedirect)
		}, "redirects are not followed"},
	} {
		t.Run(name, func(t *testing.T) {
			api := kubetest.New(t)
			token := filepath.Join(t.TempDir(), "token")
			writeFile(t, token, canary)
			f := follow(t, Access{TokenFile: token}, api)
			mustList(t, f)
			api.Look(func(w http.ResponseWriter, _ *http.Request) bool { tc.answer(w); return true })
			w := watch(t, f)
			if got := w.end(t); !strings.Contains(got, tc.want) || !strings.HasPrefix(got, "watching things in namespace games: ") {
				t.Errorf("Watch returned %q, want an error with %q", got, tc.want)
			}
		})
	}
}

func TestNoVersion(t *testing.T) {
	api := kubetest.New(t)
	api.Look(func(w http.ResponseWriter, _ *http.Request) bool { fmt.Fprint(w, `{"items":[]}`); return true })
	f := follow(t, Access{}, api)
	w := watch(t, f)
	kit.Poll(kit.Long, func() bool { mustList(t, f); return w.err.Load() != nil })
	if got := w.end(t); !strings.Contains(got, "no resourceVersion") {
		t.Errorf("Watch returned %q", got)
	}
}

// TestSilentAPI has an API that does not answer.
func TestSilentAPI(t *testing.T) {
	api := kubetest.New(t)
	api.Look(func(_ http.ResponseWriter, r *http.Request) bool { <-r.Context().Done(); return true })
	f := follow(t, Access{headerTimeout: 10 * time.Millisecond}, api)
	if got := listError(t, f); !strings.Contains(got, "timeout awaiting response headers") {
		t.Error(got)
	}
}

// TestTokenRotates has a service account's token replaced while a watch runs.
func TestTokenRotates(t *testing.T) {
	api := kubetest.New(t)
	token := filepath.Join(t.TempDir(), "token")
	writeFile(t, token, canary+"-1")
	api.Require(canary + "-1")
	f := follow(t, Access{TokenFile: token}, api)
	mustList(t, f)
	w := watch(t, f)
	put(api, "a")
	w.waitChanges(t, 1)
	api.Require(canary + "-2")
	if got := listError(t, f); !strings.Contains(got, "status 401: Unauthorized") {
		t.Error(got)
	}
	writeFile(t, token, canary+"-2")
	api.EndWatches() // the next has the new token
	put(api, "b")
	w.waitChanges(t, 2)
	mustList(t, f, "a", "b")
}

func FuzzDecodePage(f *testing.F) {
	for _, s := range []string{
		`{"kind":"List","metadata":{"resourceVersion":"12","continue":"x"},"items":[{"metadata":{"name":"a"},"n":1},{}]}`,
		`{"items":null}`, `{"items":[{"metadata":`, `{"metadata":null,"items":[null]}`, `{"items":[{}]}x`, `[]`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var p page
		found, err := decodePage(fetch.NewDecoder(strings.NewReader(string(b)), 1<<12, 1<<16), &p, nil, names)
		if err != nil && found != nil {
			t.Errorf("%d were found in what is wrong: %v", len(found), err)
		}
		if len(found) > len(b) {
			t.Errorf("%d were found in %d bytes", len(found), len(b))
		}
	})
}

func FuzzNextEvent(f *testing.F) {
	for _, s := range []string{
		`{"type":"ADDED","object":{"metadata":{"resourceVersion":"12"}}}`,
		`{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"13"}}}{"type":"ERROR","object":{"code":410,"reason":"Expired"}}`,
		`{"type":"ERROR","object":{"code":500,"message":"x"}}`, `{"type":"DELETED"`, `null`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		d := fetch.NewDecoder(strings.NewReader(string(b)), 1<<12, fetch.Unlimited)
		for n := 0; ; n++ {
			if _, err := nextEvent(d); err != nil {
				return
			}
			if n > len(b) {
				t.Fatalf("%d events in %d bytes", n, len(b))
			}
		}
	})
}
