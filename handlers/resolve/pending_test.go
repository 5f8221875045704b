package resolve_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// gate is a resolver that answers when it is opened.
func gate(t *testing.T, answer string) (url string, open func()) {
	t.Helper()
	opened := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		select {
		case <-opened:
			io.WriteString(w, answer)
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(s.Close)
	return s.URL, func() { close(opened) }
}

func pendingFull(t *testing.T) float64 {
	return value(t, "wayhouse_datagrams_dropped_total", "listener", "udp", "reason", "pending_full")
}

func passedOn(t *testing.T) float64 {
	return value(t, "wayhouse_packets_total", "listener", "udp", "dir", "c2s")
}

// TestDatagramsWait has a client go on while its session waits for an answer:
// the first four datagrams arrive, in order.
func TestDatagramsWait(t *testing.T) {
	url, open := gate(t, `{"pool": "a"}`)
	load(t, both(kit.M{"endpoint": url}, kit.M{"a": kit.Pool(named(t, "a:"))}))
	c := newClient(t, addr(t, "udp"))
	before := pendingFull(t)
	for i := range 10 {
		fmt.Fprintf(c, "%d", i)
	}
	kit.Settles(t, "what was dropped", before+6, func() float64 { return pendingFull(t) })
	open()
	for i := range 4 {
		receive(t, c, fmt.Sprintf("a:%d", i))
	}
	exchange(t, c, "later", "a:later")
}

// receive wants what comes next without having sent.
func receive(t *testing.T, c net.Conn, want string) {
	t.Helper()
	b := make([]byte, 64)
	if n, err := c.Read(b); string(b[:n]) != want {
		t.Fatalf("received %q, %v; want %q", b[:n], err, want)
	}
}

// TestSessionsWait has more sessions wait than a worker lets, while a flow that
// needs no answer is served.
func TestSessionsWait(t *testing.T) {
	const limit, over = 1024, 50
	url, open := gate(t, `{"pool": "a"}`)
	pools := kit.M{"a": kit.Pool(named(t, "a:"))}
	config := both(kit.M{"endpoint": url, "cache": kit.M{"key": kit.A{"src_ip"}}}, pools)
	app := config["apps"].(kit.M)["wayhouse"].(kit.M)
	app["workers"] = 1
	app["listeners"].(kit.M)["free"] = kit.ToPool("a", "udp/127.0.0.1:0")
	// The number of workers is that of the engines, which flows of an earlier test
	// may still hold.
	kit.Eventually(t, "the engines of earlier tests are gone", func() bool { return listener.Running() == nil })
	load(t, config)
	before := pendingFull(t)

	conns := make([]net.Conn, limit+over)
	for i := range conns {
		conns[i] = dial(t, "udp", addr(t, "udp"))
		fmt.Fprintf(conns[i], "%d", i)
		if n := i + 1; n <= limit && n%64 == 0 { // a burst that the socket's buffer has room for
			kit.Settles(t, "the sessions that wait", int64(n), sessions)
		}
	}
	kit.Settles(t, "what was dropped", before+over, func() float64 { return pendingFull(t) })
	exchange(t, newClient(t, addr(t, "free")), "x", "a:x")
	passed := passedOn(t)
	open()
	// All at once they are more than the backend's socket has room for.
	kit.Settles(t, "what was passed on", passed+limit, func() float64 { return passedOn(t) })
	exchange(t, conns[limit], "again", "a:again")
}

func sessions() int64 {
	_, n := flow.Live()
	return n
}

// TestSlowResolverDelaysNobody has flows that ask a resolver that hangs beside
// some that do not.
func TestSlowResolverDelaysNobody(t *testing.T) {
	url, open := gate(t, "")
	defer open()
	config := both(kit.M{"endpoint": url, "timeout": "1m"}, kit.M{"a": kit.Pool(named(t, "a:"))})
	listeners := config["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"].(kit.M)
	for _, network := range networks {
		listeners["free-"+network] = kit.ToPool("a", network+"/127.0.0.1:0")
	}
	load(t, config)
	for i := range 300 { // more than calls may be under way
		io.WriteString(dial(t, networks[i%2], addr(t, networks[i%2])), "x")
	}
	began := time.Now()
	for range 100 {
		for _, network := range networks {
			exchange(t, dial(t, network, addr(t, "free-"+network)), "x", "a:x")
		}
	}
	t.Logf("200 flows beside 300 that wait: %v", time.Since(began))
}
