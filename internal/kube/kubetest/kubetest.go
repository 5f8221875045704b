// Package kubetest is an API server of Kubernetes, as those see it who list and
// watch. Only tests import it. It speaks HTTP over real sockets, and does what
// the public documentation says:
//
//   - A list has metadata.resourceVersion, with which a watch begins; a watch is
//     a GET of the same path with watch=true, answered by a chunked body of
//     objects {"type", "object"}, one a line; the API ends it after
//     timeoutSeconds (API concepts, "Efficient detection of changes").
//   - The version of an object, of a list and of an event is the one counter of
//     the store; a client takes it as opaque (API concepts, "Resource versions").
//     An event of a deletion has the version of the deletion.
//   - What lies before the last compaction is gone: 410 as the status of the
//     answer, or, when the watch has begun, an event ERROR with a Status whose
//     code is 410 and whose reason is Expired ("410 Gone responses").
//   - With limit, a list is cut into pages, each with metadata.continue but the
//     last, all of the version of the first; a token that was compacted away is
//     answered by 410 and the reason Expired ("Retrieving large results sets in
//     chunks").
//   - BOOKMARK events have an object with nothing but its version, and are sent
//     to those who have asked by allowWatchBookmarks ("Watch bookmarks").
//   - Errors have a Status as their body: kind, status, message, reason, code. A
//     token that is not known is 401, a right that is missing 403 ("Authenticating",
//     "Authorization overview").
//   - A label selector of terms k=v, separated by commas, wants all of them
//     ("Labels and selectors").
package kubetest

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// API is the server. Everything may be called while it runs.
type API struct {
	*httptest.Server

	mu        sync.Mutex
	version   int
	compacted int // what lies before is gone
	objects   map[string]object
	log       []change
	moved     chan struct{}     // closed by the next change
	pages     map[string][]page // what continue tokens stand for
	ended     chan struct{}     // closed when watches have to end
	token     string
	look      func(http.ResponseWriter, *http.Request) bool
	lists     int
	watches   int
	queries   []string
	errEvents bool
}

type object struct {
	path, name string
	labels     map[string]string
	version    int
	body       json.RawMessage
}

type change struct {
	kind string
	object
}

type page struct {
	version int
	objects []object
}

// New starts a server that takes any token.
func New(t testing.TB) *API {
	a := unstarted()
	a.Server.Start()
	t.Cleanup(a.stop)
	return a
}

// NewTLS is New over https://, with a certificate of its own authority.
func NewTLS(t testing.TB) *API {
	a := unstarted()
	a.Server.StartTLS()
	t.Cleanup(a.stop)
	return a
}

func unstarted() *API {
	a := &API{
		version: 1000, objects: make(map[string]object), pages: make(map[string][]page),
		moved: make(chan struct{}), ended: make(chan struct{}),
	}
	a.Server = httptest.NewUnstartedServer(a)
	a.Server.Config.ErrorLog = log.New(io.Discard, "", 0)
	return a
}

func (a *API) stop() {
	a.EndWatches()
	a.Server.CloseClientConnections()
	a.Server.Close()
}

// Put makes or replaces an object of a collection, such as
// /apis/discovery.k8s.io/v1/namespaces/games/endpointslices. Its metadata is
// filled in.
func (a *API) Put(path, name string, labels map[string]string, body map[string]any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	body = maps.Clone(body)
	if body == nil {
		body = make(map[string]any)
	}
	body["metadata"] = map[string]any{"name": name, "labels": labels, "resourceVersion": strconv.Itoa(a.version)}
	b, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	kind := "MODIFIED"
	if _, old := a.objects[path+"/"+name]; !old {
		kind = "ADDED"
	}
	o := object{path, name, labels, a.version, b}
	a.objects[path+"/"+name] = o
	a.changedLocked(kind, o)
}

// Delete takes an object away.
func (a *API) Delete(path, name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o, ok := a.objects[path+"/"+name]
	if !ok {
		panic("there is no " + path + "/" + name)
	}
	delete(a.objects, path+"/"+name)
	a.version++
	var body map[string]any
	if err := json.Unmarshal(o.body, &body); err != nil {
		panic(err)
	}
	body["metadata"].(map[string]any)["resourceVersion"] = strconv.Itoa(a.version)
	o.body, _ = json.Marshal(body)
	o.version = a.version
	a.changedLocked("DELETED", o)
}

func (a *API) changedLocked(kind string, o object) {
	a.log = append(a.log, change{kind, o})
	close(a.moved)
	a.moved = make(chan struct{})
}

// Bookmark tells all watches the version of now.
func (a *API) Bookmark() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.changedLocked("BOOKMARK", object{version: a.version, body: json.RawMessage(
		fmt.Sprintf(`{"kind":"EndpointSlice","metadata":{"resourceVersion":"%d","creationTimestamp":null}}`, a.version))})
}

// Compact forgets what was before now. byEvent has watches told by an event,
// not by the status of their answer.
func (a *API) Compact(byEvent bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++ // something else has changed meanwhile
	a.compacted, a.errEvents = a.version, byEvent
	clear(a.pages)
	a.log = nil
}

// EndWatches ends the watches there are, as API servers do from time to time.
func (a *API) EndWatches() {
	a.mu.Lock()
	defer a.mu.Unlock()
	close(a.ended)
	a.ended = make(chan struct{})
}

// Require has requests need a token from now on.
func (a *API) Require(token string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.token = token
}

// Look has f see each request first; it reports whether it has answered. nil
// ends that.
func (a *API) Look(f func(http.ResponseWriter, *http.Request) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.look = f
}

// Lists is how many lists were asked for; pages are counted one by one.
func (a *API) Lists() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists
}

// Watches is how many watches were asked for.
func (a *API) Watches() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.watches
}

// Queries are those of all requests.
func (a *API) Queries() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.queries)
}

// IsWatch reports whether a request is for a watch.
func IsWatch(r *http.Request) bool { return r.URL.Query().Get("watch") == "true" }

// ServeHTTP answers.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	look, token := a.look, a.token
	if IsWatch(r) {
		a.watches++
	} else {
		a.lists++
	}
	a.queries = append(a.queries, r.URL.RawQuery)
	a.mu.Unlock()
	switch {
	case token != "" && r.Header.Get("Authorization") != "Bearer "+token:
		Refuse(w, http.StatusUnauthorized, "Unauthorized", "Unauthorized")
	case look != nil && look(w, r):
	case r.Method != http.MethodGet:
		Refuse(w, http.StatusMethodNotAllowed, "MethodNotAllowed", "only GET is known here")
	case IsWatch(r):
		a.watch(w, r)
	default:
		a.list(w, r)
	}
}

// Refuse answers with a Status.
func Refuse(w http.ResponseWriter, code int, reason, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	w.Write(status(code, reason, message))
}

func status(code int, reason, message string) []byte {
	b, _ := json.Marshal(map[string]any{
		"kind": "Status", "apiVersion": "v1", "metadata": map[string]any{}, "status": "Failure",
		"message": message, "reason": reason, "code": code,
	})
	return b
}

func (a *API) list(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	a.mu.Lock()
	var p page
	if token := query.Get("continue"); token != "" {
		left := a.pages[token]
		if len(left) == 0 {
			a.mu.Unlock()
			Refuse(w, http.StatusGone, "Expired", "The provided continue parameter is too old to display a consistent list result.")
			return
		}
		p = left[0]
	} else {
		p.version = a.version
		for _, key := range slices.Sorted(maps.Keys(a.objects)) {
			if o := a.objects[key]; o.path == r.URL.Path && selected(query.Get("labelSelector"), o.labels) {
				p.objects = append(p.objects, o)
			}
		}
	}
	next := ""
	if limit, _ := strconv.Atoi(query.Get("limit")); limit > 0 && len(p.objects) > limit {
		next = fmt.Sprintf("v%d.%d/%s==", p.version, len(p.objects), query.Get("labelSelector"))
		a.pages[next] = []page{{p.version, p.objects[limit:]}}
		p.objects = p.objects[:limit]
	}
	a.mu.Unlock()
	items := make([]json.RawMessage, len(p.objects))
	for i, o := range p.objects {
		items[i] = o.body
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{
		"kind": "List", "apiVersion": "v1", "items": items,
		"metadata": map[string]any{"resourceVersion": strconv.Itoa(p.version), "continue": next},
	})
}

func selected(selector string, labels map[string]string) bool {
	if selector == "" {
		return true
	}
	for term := range strings.SplitSeq(selector, ",") {
		k, v, _ := strings.Cut(term, "=")
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

func (a *API) watch(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	from, err := strconv.Atoi(query.Get("resourceVersion"))
	if err != nil {
		Refuse(w, http.StatusBadRequest, "BadRequest", "this server begins a watch at a version only")
		return
	}
	within, _ := strconv.Atoi(query.Get("timeoutSeconds"))
	if within <= 0 {
		within = 1800
	}
	a.mu.Lock()
	compacted, byEvent, ended := a.compacted, a.errEvents, a.ended
	a.mu.Unlock()
	if from < compacted && !byEvent {
		Refuse(w, http.StatusGone, "Expired", "too old resource version")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	flush := func() { _ = http.NewResponseController(w).Flush() }
	flush()
	if from < compacted {
		fmt.Fprintf(w, "{\"type\":\"ERROR\",\"object\":%s}\n", status(http.StatusGone, "Expired", fmt.Sprintf("too old resource version: %d (%d)", from, compacted)))
		return
	}
	over := time.NewTimer(time.Duration(within) * time.Second)
	defer over.Stop()
	for {
		a.mu.Lock()
		var news []change
		for _, c := range a.log {
			mine := c.path == r.URL.Path && selected(query.Get("labelSelector"), c.labels) && c.version > from
			if c.kind == "BOOKMARK" {
				mine = query.Get("allowWatchBookmarks") == "true" && c.version > from
			}
			if mine {
				news = append(news, c)
			}
		}
		moved := a.moved
		a.mu.Unlock()
		for _, c := range news {
			if _, err := fmt.Fprintf(w, "{\"type\":%q,\"object\":%s}\n", c.kind, c.body); err != nil {
				return
			}
			from = max(from, c.version)
		}
		flush()
		select {
		case <-moved:
		case <-ended:
			return
		case <-over.C:
			return
		case <-r.Context().Done():
			return
		}
	}
}
