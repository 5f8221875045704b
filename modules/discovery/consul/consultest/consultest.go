// Package consultest is an agent of Consul, as those see it who ask for a
// service's health. Only tests import it. It speaks HTTP over real sockets, and
// does what the public documentation says:
//
//   - GET /v1/health/service/NAME answers an array of {"Node", "Service",
//     "Checks"}; with passing only the instances all of whose checks pass, with
//     tag only those that have it; a service that is not known is an empty array
//     and no error (HTTP API, "Health", "List service instances").
//   - Service.Address is empty for an instance that is at its node's address;
//     Service.Weights.Passing is 1 unless it is said otherwise.
//   - Every answer has X-Consul-Index. A question with that index is answered when
//     there is a later one, or when wait, and up to a sixteenth of it more, is
//     over; that it is answered does not mean that something has changed
//     ("Blocking queries").
//   - The index goes backwards when the servers are restored or made anew; a
//     client then begins again ("Blocking queries", "Implementation details").
//   - A token is in X-Consul-Token; without the right one the status is 403 and
//     the body a line of text ("Authentication", "ACL").
package consultest

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Instance is one of a service.
type Instance struct {
	ID      string
	Address string // "" for the node's
	Node    string // its address
	Port    int
	Weight  int // 0 for none
	Tags    []string
	Failing bool
}

// Agent is the server. Everything may be called while it runs.
type Agent struct {
	*httptest.Server

	mu       sync.Mutex
	index    uint64
	noIndex  bool
	services map[string][]Instance
	moved    chan struct{} // closed by the next change
	closed   chan struct{}
	token    string
	look     func(http.ResponseWriter, *http.Request) bool
	lists    int
	waits    int
	uris     []string
}

// New starts an agent that takes any token.
func New(t testing.TB) *Agent {
	a := unstarted()
	a.Server.Start()
	t.Cleanup(a.stop)
	return a
}

// NewTLS is New over https://, with a certificate of its own authority.
func NewTLS(t testing.TB) *Agent {
	a := unstarted()
	a.Server.StartTLS()
	t.Cleanup(a.stop)
	return a
}

func unstarted() *Agent {
	a := &Agent{index: 100, services: make(map[string][]Instance), moved: make(chan struct{}), closed: make(chan struct{})}
	a.Server = httptest.NewUnstartedServer(a)
	a.Server.Config.ErrorLog = log.New(io.Discard, "", 0)
	return a
}

func (a *Agent) stop() {
	close(a.closed)
	a.Server.CloseClientConnections()
	a.Server.Close()
}

// Set replaces the instances of a service.
func (a *Agent) Set(service string, instances ...Instance) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.services[service] = instances
	a.moveLocked(a.index + 1)
}

// Touch makes the index another one, earlier or later, though nothing changes.
func (a *Agent) Touch(index uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.moveLocked(index)
}

// WithoutIndex has answers without X-Consul-Index, or with it again.
func (a *Agent) WithoutIndex(yes bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.noIndex = yes
	a.moveLocked(a.index + 1)
}

func (a *Agent) moveLocked(index uint64) {
	a.index = index
	close(a.moved)
	a.moved = make(chan struct{})
}

// Require has requests need a token from now on.
func (a *Agent) Require(token string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.token = token
}

// Look has f see each request first; it reports whether it has answered. nil
// ends that.
func (a *Agent) Look(f func(http.ResponseWriter, *http.Request) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.look = f
}

// Lists is how many questions there were that do not wait.
func (a *Agent) Lists() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists
}

// Waits is how many questions there were that wait for a change.
func (a *Agent) Waits() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.waits
}

// URIs are those of all requests.
func (a *Agent) URIs() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.uris)
}

// Waiting reports whether a request waits for a change.
func Waiting(r *http.Request) bool { return r.URL.Query().Has("index") }

// ServeHTTP answers.
func (a *Agent) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	look, token := a.look, a.token
	if Waiting(r) {
		a.waits++
	} else {
		a.lists++
	}
	a.uris = append(a.uris, r.RequestURI)
	a.mu.Unlock()
	service, ok := strings.CutPrefix(r.URL.Path, "/v1/health/service/")
	switch {
	case look != nil && look(w, r):
	case token != "" && r.Header.Get("X-Consul-Token") != token:
		http.Error(w, "Permission denied: token with AccessorID '00000000-0000-0000-0000-000000000002' lacks permission", http.StatusForbidden)
	case !ok:
		http.NotFound(w, r)
	case r.Method != http.MethodGet:
		http.Error(w, "method "+r.Method+" not allowed", http.StatusMethodNotAllowed)
	default:
		a.answer(w, r, service)
	}
}

func (a *Agent) answer(w http.ResponseWriter, r *http.Request, service string) {
	query := r.URL.Query()
	if query.Has("index") {
		index, err := strconv.ParseUint(query.Get("index"), 10, 64)
		wait, err2 := time.ParseDuration(query.Get("wait"))
		if err != nil || err2 != nil {
			http.Error(w, "Invalid index or wait", http.StatusBadRequest)
			return
		}
		a.wait(r, index, wait+wait/16)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	list := []any{}
	for _, i := range a.services[service] {
		if query.Has("passing") && i.Failing || query.Has("tag") && !slices.Contains(i.Tags, query.Get("tag")) {
			continue
		}
		status := "passing"
		if i.Failing {
			status = "critical"
		}
		list = append(list, map[string]any{
			"Node": map[string]any{"ID": "40e4a748-2192-161a-0510-9bf59fe950b5", "Node": "node-of-" + i.ID, "Address": i.Node, "Datacenter": "dc1"},
			"Service": map[string]any{
				"ID": i.ID, "Service": service, "Tags": i.Tags, "Address": i.Address, "Port": i.Port, "Meta": map[string]any{},
				"Weights": map[string]any{"Passing": max(i.Weight, 1), "Warning": 1},
			},
			"Checks": []any{map[string]any{"CheckID": "service:" + i.ID, "Status": status, "Output": ""}},
		})
	}
	w.Header().Set("Content-Type", "application/json")
	if !a.noIndex {
		w.Header().Set("X-Consul-Index", fmt.Sprint(a.index))
	}
	w.Header().Set("X-Consul-Knownleader", "true")
	json.NewEncoder(w).Encode(list)
}

// wait returns when there is another index, or the time is up.
func (a *Agent) wait(r *http.Request, index uint64, long time.Duration) {
	over := time.NewTimer(long)
	defer over.Stop()
	a.mu.Lock()
	later, moved := a.index > index, a.moved
	a.mu.Unlock()
	if later {
		return
	}
	select {
	case <-moved:
	case <-over.C:
	case <-r.Context().Done():
	case <-a.closed:
	}
}
