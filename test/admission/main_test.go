// Package admission holds the tests of who gets in: filters, limits, the
// first-packet gate and overload, on real sockets of the real process.
package admission

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// client is a connection or session from one of the addresses of loopback.
type client struct {
	net.Conn
	t      *testing.T
	udp    bool
	ticket []byte // in what it asks, from ticketAt on
}

func dial(t *testing.T, network, from, to string) *client {
	t.Helper()
	var local net.Addr = &net.TCPAddr{IP: net.ParseIP(from)}
	if network == "udp" {
		local = &net.UDPAddr{IP: net.ParseIP(from)}
	}
	d := net.Dialer{LocalAddr: local, Timeout: kit.Long}
	c, err := d.Dial(network, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &client{Conn: c, t: t, udp: network == "udp"}
}

// ticketAt is where the body of a frame begins.
var ticketAt = bytes.Index((&kit.Frame{Body: []byte("body")}).Append(nil), []byte("body"))

// ask sends a question.
func (c *client) ask() {
	q := kit.Frame{Flow: 1, Seq: 1, Body: c.ticket}
	c.Write(q.Append(nil)) // who is refused may be reset by now
}

// served wants an answer.
func (c *client) served() {
	c.t.Helper()
	c.ask()
	c.SetReadDeadline(time.Now().Add(kit.Long))
	if n, err := c.Read(make([]byte, 2000)); n == 0 || err != nil {
		c.t.Fatalf("no answer: %d bytes, %v", n, err)
	}
}

// silence wants not a byte, and of a connection its end.
func (c *client) silence() {
	c.t.Helper()
	wait := kit.Long
	if c.udp {
		wait = 50 * time.Millisecond // it has been counted as refused already
	}
	c.SetReadDeadline(time.Now().Add(wait))
	n, err := c.Read(make([]byte, 2000))
	ended := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
	if c.udp {
		ended = errors.Is(err, os.ErrDeadlineExceeded)
	}
	if n != 0 || !ended {
		c.t.Errorf("%d bytes, %v; want silence", n, err)
	}
}

var networks = []string{"tcp", "udp"}

// game has a pool for each protocol.
func game(t *testing.T) kit.M {
	return kit.M{"tcp": kit.Pool(kit.NewTCPBackend(t, 1, "127.0.0.1:0").Addr), "udp": kit.Pool(kit.NewUDPBackend(t, 1, "127.0.0.1:0").Addr)}
}

// refusals is what the process has counted under a rule on a listener.
func refusals(p *kit.Process, listener, rule string) float64 {
	m := p.Metrics()
	return m.Sum("filter_blocked_total", "listener", listener, "filter", rule) +
		m.Sum("datagrams_dropped_total", "listener", listener, "reason", rule) +
		m.Sum("listener_connections_total", "listener", listener, "result", rule)
}
