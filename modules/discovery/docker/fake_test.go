package docker

import (
	"cmp"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// fake is a Docker daemon as far as this source can see one. What it does is
// what the reference of the Engine API, versions 1.41 to 1.52, says:
//
//   - It serves HTTP/1.1 over a unix socket, or TCP with or without TLS.
//   - GET /_ping answers 200 with the newest version that it speaks in the field
//     Api-Version. It has no version in its path.
//   - Every other path begins with /vMAJOR.MINOR, or has no version and then
//     means the newest. A version that the daemon does not speak is answered with
//     400, an unknown path with 404, and errors are {"message": "…"}.
//   - GET /containers/json is an array of summaries. filters is a JSON object of
//     arrays: label (NAME or NAME=VALUE, all of them), status, health (healthy,
//     starting, unhealthy, none) and id (any of them, by its beginning). A summary
//     has the names with a slash in front; a port that is published on every
//     address is listed for 0.0.0.0 and for ::, one that is only exposed has
//     neither IP nor PublicPort; a container on the host's network or on that of
//     another has no address of its own.
//   - GET /events never ends by itself. The header is sent at once; each event is
//     an object and a newline in a chunk of its own. filters has type (exact) and
//     event, by the beginning where health_status is among them, as that has the
//     result behind a colon. An event of a container has its labels among the
//     attributes of the actor, one of a network has the container's ID there.
//
// It refuses everything but GET, as a proxy that lets only reads through does.
type fake struct {
	t *testing.T

	mu         sync.Mutex
	api        int // the newest minor version
	least      int // the oldest
	noPing     bool
	containers map[string]*running
	lists      int
	asked      []string // methods and paths without filters
	streams    map[chan map[string]any]bool
	answer     http.HandlerFunc // instead of everything else
	server     *httptest.Server
	listener   func() net.Listener
	tls        *tls.Config
}

// running is a container of the fake.
type running struct {
	id, name string
	state    string // running, paused, exited
	health   string // healthy, starting, unhealthy, none
	labels   map[string]string
	mode     string // of the network
	networks map[string]attachment
	ports    []exposed
}

// newFake starts a daemon on a unix socket. Its endpoint is the second value.
func newFake(t *testing.T) (*fake, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "docker.sock")
	f := &fake{t: t, listener: func() net.Listener {
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}}
	f.start()
	return f, "unix://" + path
}

// newTCPFake starts one on loopback, with TLS when config is not nil.
func newTCPFake(t *testing.T, config *tls.Config) (*fake, string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{t: t, tls: config, listener: func() net.Listener { return l }}
	f.start()
	return f, "tcp://" + l.Addr().String()
}

func (f *fake) start() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.containers == nil {
		f.api, f.least = 47, 24
		f.containers, f.streams = make(map[string]*running), make(map[chan map[string]any]bool)
		f.t.Cleanup(f.stop)
	}
	f.server = &httptest.Server{Listener: f.listener(), Config: &http.Server{Handler: f, ErrorLog: log.New(io.Discard, "", 0)}}
	if f.tls == nil {
		f.server.Start()
		return
	}
	f.server.TLS = f.tls
	f.server.StartTLS()
}

// stop ends the daemon; start starts it again, on the same socket.
func (f *fake) stop() {
	f.mu.Lock()
	s := f.server
	f.mu.Unlock()
	s.CloseClientConnections()
	s.Close()
}

// run starts a container, or replaces it, and tells of it.
func (f *fake) run(c running) {
	f.mu.Lock()
	c.state = cmp.Or(c.state, "running")
	c.health = cmp.Or(c.health, "none")
	c.mode = cmp.Or(c.mode, "bridge")
	c.id = cmp.Or(c.id, fullID(c.name))
	f.containers[c.id] = &c
	f.mu.Unlock()
	f.tell("container", "start", c.name)
}

// fullID is the ID of a container of that name.
func fullID(name string) string { return fmt.Sprintf("%064x", name) }

// change changes a container and tells of it.
func (f *fake) change(name, action string, how func(*running)) {
	f.mu.Lock()
	how(f.containers[fullID(name)])
	f.mu.Unlock()
	f.tell("container", action, name)
}

// tell sends an event to whoever listens.
func (f *fake) tell(kind, action, name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	attributes := map[string]string{"image": "game:1", "name": name}
	if kind == "container" {
		maps.Copy(attributes, f.containers[fullID(name)].labels)
	} else {
		attributes["container"] = fullID(name)
	}
	e := map[string]any{
		"Type": kind, "Action": action, "scope": "local", "time": 1764500000, "timeNano": 1764500000000000000,
		"Actor": map[string]any{"ID": fullID(name), "Attributes": attributes},
	}
	for ch := range f.streams {
		ch <- e
	}
}

var versioned = regexp.MustCompile(`^/v1\.([0-9]+)(/.*)$`)

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.asked = append(f.asked, r.Method+" "+r.URL.Path)
	answer, path := f.answer, r.URL.Path
	if answer != nil {
		f.mu.Unlock()
		answer(w, r)
		return
	}
	defer f.mu.Unlock()
	if r.Method != http.MethodGet {
		f.t.Errorf("%s %s, where only GET is allowed", r.Method, path)
		fail(w, http.StatusForbidden, "only reads are allowed")
		return
	}
	if path == "/_ping" {
		if f.noPing {
			fail(w, http.StatusForbidden, "not allowed")
			return
		}
		w.Header().Set("Api-Version", "1."+strconv.Itoa(f.api))
		fmt.Fprint(w, "OK")
		return
	}
	if m := versioned.FindStringSubmatch(path); m != nil {
		path = m[2]
		if n, _ := strconv.Atoi(m[1]); n > f.api {
			fail(w, http.StatusBadRequest, fmt.Sprintf("client version 1.%d is too new. Maximum supported API version is 1.%d", n, f.api))
			return
		} else if n < f.least {
			fail(w, http.StatusBadRequest, fmt.Sprintf("client version 1.%d is too old. Minimum supported API version is 1.%d", n, f.least))
			return
		}
	}
	filters := make(map[string][]string)
	if s := r.URL.Query().Get("filters"); s != "" {
		if err := json.Unmarshal([]byte(s), &filters); err != nil {
			fail(w, http.StatusBadRequest, "invalid filter")
			return
		}
	}
	switch path {
	case "/containers/json":
		f.list(w, filters)
	case "/events":
		f.events(w, r, filters)
	default:
		fail(w, http.StatusNotFound, "page not found")
	}
}

func fail(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(map[string]string{"message": message})
}

func (f *fake) list(w http.ResponseWriter, filters map[string][]string) {
	f.lists++
	list := []map[string]any{} // an empty array, not null
	for _, id := range slices.Sorted(maps.Keys(f.containers)) {
		c := f.containers[id]
		if !c.matches(filters) {
			continue
		}
		networks := make(map[string]any)
		for name, a := range c.networks {
			networks[name] = map[string]any{"NetworkID": "n-" + name, "IPAddress": a.IPAddress, "GlobalIPv6Address": a.GlobalIPv6Address}
		}
		ports := []map[string]any{}
		for _, p := range c.ports {
			m := map[string]any{"PrivatePort": p.PrivatePort, "Type": p.Type}
			if p.PublicPort != 0 {
				m["IP"], m["PublicPort"] = p.IP, p.PublicPort
			}
			ports = append(ports, m)
		}
		list = append(list, map[string]any{
			"Id": c.id, "Names": []string{"/" + c.name}, "Image": "game:1", "Command": "/server", "Created": 1764500000,
			"Labels": c.labels, "State": c.state, "Status": "Up 3 minutes", "Ports": ports, "Mounts": []any{},
			"HostConfig": map[string]any{"NetworkMode": c.mode}, "NetworkSettings": map[string]any{"Networks": networks},
		})
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(list)
}

func (c *running) matches(filters map[string][]string) bool {
	for _, l := range filters["label"] {
		name, want, valued := strings.Cut(l, "=")
		if v, ok := c.labels[name]; !ok || valued && v != want {
			return false
		}
	}
	any := func(key string, ok func(string) bool) bool {
		return len(filters[key]) == 0 || slices.ContainsFunc(filters[key], ok)
	}
	status := filters["status"]
	if len(status) == 0 && c.state != "running" && c.state != "paused" { // all is not given
		return false
	}
	return any("status", func(s string) bool { return s == c.state }) &&
		any("health", func(s string) bool { return s == c.health }) &&
		any("id", func(s string) bool { return strings.HasPrefix(c.id, s) })
}

// events is called with the lock, and gives it back while it waits.
func (f *fake) events(w http.ResponseWriter, r *http.Request, filters map[string][]string) {
	ch := make(chan map[string]any, 4096)
	f.streams[ch] = true
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		delete(f.streams, ch)
	}()
	flusher := w.(http.Flusher)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	flusher.Flush()
	prefix := slices.Contains(filters["event"], "health_status")
	for {
		select {
		case <-r.Context().Done():
			return
		case e := <-ch:
			action := e["Action"].(string)
			if !slices.Contains(filters["type"], e["Type"].(string)) || !slices.ContainsFunc(filters["event"], func(s string) bool {
				return s == action || prefix && strings.HasPrefix(action, s)
			}) {
				continue
			}
			if json.NewEncoder(w).Encode(e) != nil {
				return
			}
			flusher.Flush()
		}
	}
}

// set changes the fake.
func (f *fake) set(how func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	how()
}

// requests are the methods and paths of what it was asked.
func (f *fake) requests() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.asked)
}

// listening is how many streams of events there are.
func (f *fake) listening() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.streams)
}

// listed is how often containers were asked for.
func (f *fake) listed() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lists
}
