package recipes

import (
	"bufio"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"

	"github.com/wayhouse-proxy/wayhouse/internal/kube/kubetest"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// listen is a TCP listener in a namespace.
func (s *site) listen(ns *kit.Netns, addr string) (ln net.Listener) {
	s.Helper()
	var err error
	ns.Do(s.T, func() { ln, err = net.Listen("tcp", addr) })
	if err != nil {
		s.Fatal(err)
	}
	return ln
}

// handle runs an HTTP service of inside.
func (s *site) handle(addr string, h http.Handler) {
	s.Helper()
	srv := &httptest.Server{Listener: s.listen(s.inside, addr), Config: &http.Server{Handler: h}}
	srv.Start()
	s.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
}

// inCluster makes edge a pod of a cluster: with the API's address in its
// environment, and a service account.
func (s *site) inCluster() *kubetest.API {
	s.Helper()
	api := kubetest.New(s.T) // its own server is not used
	srv := &httptest.Server{Listener: s.listen(s.edge, "127.0.0.1:6443"), Config: &http.Server{Handler: api}}
	srv.StartTLS()
	s.Cleanup(func() {
		api.EndWatches()
		srv.CloseClientConnections()
		srv.Close()
	})
	const account = "run/secrets/kubernetes.io/serviceaccount/"
	s.file(account+"token", "the-token-of-the-pod")
	s.file(account+"ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})))
	s.file("env", "export KUBERNETES_SERVICE_HOST=127.0.0.1 KUBERNETES_SERVICE_PORT=6443\n")
	api.Require("the-token-of-the-pod")
	return api
}

// dockerd is as much of a Docker daemon as the source of that name asks for: a
// list of running containers, and events that say that it has changed.
type dockerd struct {
	mu         sync.Mutex
	containers map[string]container
	events     map[chan string]bool
	refused    []string
}

type container struct {
	addr   string
	labels map[string]string
	health string
}

func (d *dockerd) set(name, action string, c *container) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if c == nil {
		delete(d.containers, name)
	} else {
		d.containers[name] = *c
	}
	for ch := range d.events {
		ch <- fmt.Sprintf(`{"Type": "container", "Action": %q, "Actor": {"ID": %q, "Attributes": {"name": %q, "wayhouse.pool": "arena"}}}`, action, name, name)
	}
}

func (d *dockerd) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	_, path, versioned := strings.Cut(r.URL.Path, "/v1.")
	if versioned {
		_, path, _ = strings.Cut(path, "/")
		path = "/" + path
	} else {
		path = r.URL.Path
	}
	switch {
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
	case path == "/_ping":
		w.Header().Set("Api-Version", "1.47")
		return
	case path == "/containers/json":
		d.list(w, r)
		return
	case path == "/events":
		d.follow(w, r)
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refused = append(d.refused, r.Method+" "+r.URL.Path)
	http.Error(w, `{"message": "only reads are let through"}`, http.StatusForbidden)
}

func (d *dockerd) list(w http.ResponseWriter, r *http.Request) {
	var filters struct{ Label, Health, ID []string }
	json.Unmarshal([]byte(r.URL.Query().Get("filters")), &filters)
	d.mu.Lock()
	defer d.mu.Unlock()
	list := kit.A{}
	for name, c := range d.containers {
		ok := true
		for _, l := range filters.Label {
			k, v, valued := strings.Cut(l, "=")
			have, has := c.labels[k]
			ok = ok && has && (!valued || v == have)
		}
		if len(filters.Health) > 0 {
			ok = ok && strings.Contains(" "+strings.Join(filters.Health, " ")+" ", " "+c.health+" ")
		}
		if ok {
			list = append(list, kit.M{"Id": name, "Names": kit.A{"/" + name}, "Labels": c.labels, "State": "running", "Status": "Up (" + c.health + ")",
				"Ports": kit.A{}, "HostConfig": kit.M{"NetworkMode": "demo_games"},
				"NetworkSettings": kit.M{"Networks": kit.M{"demo_games": kit.M{"NetworkID": "n", "IPAddress": c.addr}}}})
		}
	}
	json.NewEncoder(w).Encode(list)
}

func (d *dockerd) follow(w http.ResponseWriter, r *http.Request) {
	ch := make(chan string, 64)
	d.mu.Lock()
	d.events[ch] = true
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		delete(d.events, ch)
		d.mu.Unlock()
	}()
	w.WriteHeader(http.StatusOK)
	b := bufio.NewWriter(w)
	for {
		b.Flush()
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case e := <-ch:
			b.WriteString(e + "\n")
		}
	}
}
