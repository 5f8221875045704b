// Package deploy holds the tests of what operators do while players play: swap
// backends, drain one or the whole instance, and restart it in between.
package deploy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// servers are a generation of game servers, one of TCP and one of UDP.
type servers struct {
	tcp *kit.TCPBackend
	udp *kit.UDPBackend
}

func newServers(t *testing.T, id uint16) servers {
	return servers{kit.NewTCPBackend(t, id, "127.0.0.1:0"), kit.NewUDPBackend(t, id, "127.0.0.1:0")}
}

// each calls do for both, with the pool they are in.
func (s servers) each(do func(pool, addr string)) {
	do("tcp", s.tcp.Addr)
	do("udp", s.udp.Addr)
}

// flows is how many flows both have seen.
func (s servers) flows() int { return s.tcp.Flows() + s.udp.Flows() }

// config has the pools tcp and udp behind one address.
func (s servers) config(addr string, options kit.M) kit.M {
	tcp := kit.With(kit.M{"targets": kit.A{s.tcp.Addr}, "health": kit.M{"check": "tcp_connect", "interval": "100ms", "timeout": "10s"}}, options)
	udp := kit.With(kit.Pool(s.udp.Addr), options)
	return kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr), "u": kit.ToPool("udp", "udp/"+addr)}, kit.M{"tcp": tcp, "udp": udp})
}

// call asks the admin API and expects a status.
func call(t *testing.T, p *kit.Process, method, path, body string, want int) string {
	t.Helper()
	status, answer := p.Do(method, path, []byte(body))
	if status != want {
		t.Fatalf("%s %s: %d %s, want %d", method, path, status, answer, want)
	}
	return answer
}

func backendPath(pool, addr string) string {
	return "/pools/" + url.PathEscape(pool) + "/backends/" + url.PathEscape(addr)
}

// add adds servers and waits until they are healthy.
func (s servers) add(t *testing.T, p *kit.Process) {
	t.Helper()
	s.each(func(pool, addr string) {
		call(t, p, "POST", "/pools/"+pool+"/backends", fmt.Sprintf(`{"addr": %q}`, addr), http.StatusCreated)
		kit.Eventually(t, addr+" is healthy", func() bool { return backendOf(t, p, pool, addr).Healthy })
	})
}

func (s servers) set(t *testing.T, p *kit.Process, state string) {
	t.Helper()
	s.each(func(pool, addr string) {
		call(t, p, "PATCH", backendPath(pool, addr), fmt.Sprintf(`{"state": %q}`, state), http.StatusOK)
	})
}

// backend is what /pools tells of one.
type backend struct {
	Addr, Origin, State string
	Healthy             bool
	Active              int
}

func backendOf(t *testing.T, p *kit.Process, pool, addr string) backend {
	t.Helper()
	var v struct{ Backends []backend }
	p.JSON("/pools/"+pool, &v)
	for _, b := range v.Backends {
		if b.Addr == addr {
			return b
		}
	}
	return backend{}
}

// overlay is /overlay without what a reload may change.
func overlay(t *testing.T, p *kit.Process) string {
	t.Helper()
	var list []struct{ Pool, Addr, Change, State, Actor, At string }
	p.JSON("/overlay", &list)
	b, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// restart ends the process by a signal and runs it again.
func restart(t *testing.T, p *kit.Process, s syscall.Signal) {
	t.Helper()
	p.Signal(s)
	p.Exit()
	os.Remove(filepath.Join(p.Dir, "admin.sock")) // SIGKILL leaves it
	p.Begin()
	kit.Eventually(t, "the process answers", func() bool {
		status, body := p.Get("/readyz")
		return status == http.StatusOK || strings.Contains(body, "drained by") || p.Ended()
	})
	if p.Ended() {
		t.Fatalf("the process has ended: %s", p.Log())
	}
}
