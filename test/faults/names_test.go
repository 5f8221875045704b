package faults

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// nameServer answers for game.test on 127.0.0.1 of a namespace whose processes
// ask it.
type nameServer struct {
	answer atomic.Pointer[string] // nil: it fails
	asked  atomic.Int64           // for IPv4 addresses
}

func newNameServer(t *testing.T, ns *kit.Netns) *nameServer {
	t.Helper()
	dir := filepath.Join("/etc/netns", ns.Name) // `ip netns exec` puts its files over those of /etc
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		os.RemoveAll(dir)
		os.Remove(filepath.Dir(dir)) // unless it has others
	})
	if err := os.WriteFile(filepath.Join(dir, "resolv.conf"), []byte("nameserver 127.0.0.1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	var pc net.PacketConn
	ns.Do(t, func() {
		var err error
		if pc, err = net.ListenPacket("udp", "127.0.0.1:53"); err != nil {
			t.Fatal(err)
		}
	})
	s, started := new(nameServer), make(chan struct{})
	server := &dns.Server{PacketConn: pc, Handler: s, NotifyStartedFunc: func() { close(started) }}
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.ActivateAndServe()
	}()
	<-started
	t.Cleanup(func() {
		server.Shutdown()
		<-done
	})
	return s
}

func (s *nameServer) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(q)
	addr := s.answer.Load()
	if addr == nil {
		m.Rcode = dns.RcodeServerFailure
	} else if q.Question[0].Qtype == dns.TypeA {
		m.Answer = append(m.Answer, &dns.A{
			Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1},
			A:   net.ParseIP(*addr),
		})
	}
	w.WriteMsg(m)
	if q.Question[0].Qtype == dns.TypeA {
		s.asked.Add(1)
	}
}

// TestNameMoves has a target whose name stands for another address after a
// while. New connections follow it, the old one stays, and a name server that
// fails takes nothing away.
func TestNameMoves(t *testing.T) {
	ns := kit.NewNetns(t)
	names := newNameServer(t, ns)
	first, second := "127.0.0.1", "127.0.0.2"
	names.answer.Store(&first)
	ns.Do(t, func() {
		kit.NewTCPBackend(t, 1, first+":9001")
		kit.NewTCPBackend(t, 2, second+":9001")
	})
	kit.Start(t, kit.App(kit.M{"t": kit.ToPool("p", "tcp/127.0.0.1:9000")}, kit.M{"p": kit.Pool("game.test:9001")}), kit.Options{Netns: ns})
	served := func() (backend uint16, err error) {
		ns.Do(t, func() { backend, err = attempt("127.0.0.1:9000") })
		return backend, err
	}
	if b, err := served(); b != 1 || err != nil {
		t.Fatalf("backend %d, %v, want 1", b, err)
	}
	var old net.Conn
	ns.Do(t, func() {
		var err error
		if old, err = net.Dial("tcp", "127.0.0.1:9000"); err != nil {
			t.Fatal(err)
		}
	})
	defer old.Close()
	ask := func() (backend uint16, err error) {
		q := kit.Frame{Flow: 1, Seq: 1}
		old.SetDeadline(time.Now().Add(kit.Long))
		old.Write(q.Append(nil))
		a, _, err := kit.ReadFrame(old, nil)
		return a.Backend, err
	}
	if b, err := ask(); b != 1 || err != nil {
		t.Fatalf("the connection that stays: backend %d, %v, want 1", b, err)
	}
	names.answer.Store(&second)
	kit.Settles(t, "the backend of a new connection", 2, func() uint16 { b, _ := served(); return b })
	names.answer.Store(nil)
	asked := names.asked.Load()
	kit.Eventually(t, "the failing name server is asked again", func() bool { return names.asked.Load() > asked+1 })
	if b, err := served(); b != 2 || err != nil {
		t.Errorf("while the name server fails: backend %d, %v, want 2", b, err)
	}
	if b, err := ask(); b != 1 || err != nil {
		t.Errorf("the connection that stays: backend %d, %v, want 1", b, err)
	}
}

// TestHTTPCheck has a backend whose health somebody else tells by HTTP, to those
// who ask for the right host.
func TestHTTPCheck(t *testing.T) {
	var up atomic.Bool
	up.Store(true)
	beside := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if up.Load() && r.Host == "game.example" && r.URL.Path == "/alive" {
			w.WriteHeader(http.StatusNoContent)
		}
	}))
	defer beside.Close()
	g := newGame(t)
	check := quick(kit.M{"check": "http", "path": "/alive", "port": beside.Listener.Addr().(*net.TCPAddr).Port, "host": "game.example", "status": 204})
	p := kit.Start(t, g.config(nil, kit.M{
		"tcp":   kit.With(kit.Pool(g.tcp.Addr), kit.M{"health": check}),
		"other": kit.With(kit.Pool(g.tcp.Addr), kit.M{"health": kit.With(check, kit.M{"host": "other.example"})}),
	}), kit.Options{})
	kit.Settles(t, "healthy backends, asked about by another name", 0, func() int { return healthy(p, "other") })
	for range 2 {
		kit.Settles(t, "healthy backends", 1, func() int { return healthy(p, "tcp") })
		if b, err := attempt(g.addr()); b != 1 || err != nil {
			t.Errorf("while it is up: backend %d, %v", b, err)
		}
		up.Store(false)
		kit.Settles(t, "healthy backends", 0, func() int { return healthy(p, "tcp") })
		if b, err := attempt(g.addr()); err == nil {
			t.Errorf("while it is down: backend %d answered", b)
		}
		up.Store(true)
	}
}
