// Package faults holds the tests of what the product does when something it
// depends on fails or somebody means it ill: backends that die, hang or flap,
// descriptors, ports and memory that run out, clients that send too much.
package faults

import (
	"fmt"
	"net"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// quick is a check that finds a backend down, or up again, soon.
func quick(check kit.M) kit.M {
	return kit.With(check, kit.M{"interval": "50ms", "timeout": "500ms", "rise": 2, "fall": 2})
}

var tcpCheck = quick(kit.M{"check": "tcp_connect"})

// healthy counts a pool's backends that are.
func healthy(p *kit.Process, pool string) int {
	return int(p.Metric("pool_backends", "pool", pool, "state", "healthy"))
}

// game is one port of TCP and UDP with a backend that answers.
type game struct {
	port int
	tcp  *kit.TCPBackend
	udp  *kit.UDPBackend
}

func newGame(t *testing.T) *game {
	return &game{kit.Port(t), kit.NewTCPBackend(t, 1, "127.0.0.1:0"), kit.NewUDPBackend(t, 1, "127.0.0.1:0")}
}

func (g *game) addr() string { return kit.Local(g.port) }

// config has the port's listeners, tcp and udp, and more.
func (g *game) config(listeners, pools kit.M, options ...kit.M) kit.M {
	return kit.App(
		kit.With(kit.M{"tcp": kit.ToPool("tcp", "tcp/"+g.addr()), "udp": kit.ToPool("udp", "udp/"+g.addr())}, listeners),
		kit.With(kit.M{"tcp": kit.Pool(g.tcp.Addr), "udp": kit.Pool(g.udp.Addr)}, pools), options...)
}

func (g *game) load(t *testing.T, n int) *kit.Load {
	return kit.StartLoad(t, kit.LoadOptions{TCP: g.addr(), UDP: g.addr(), Conns: n, Flows: n, Rate: 10 * n, Body: 20})
}

// perfect ends a load that must have noticed nothing.
func perfect(t *testing.T, l *kit.Load) {
	t.Helper()
	if r := l.Stop(); !r.Perfect() {
		t.Errorf("the load noticed: %v", &r)
	}
}

// attempt asks one question over a new connection and tells who answered.
func attempt(addr string) (backend uint16, err error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	q := kit.Frame{Flow: 1 << 31, Seq: 1}
	c.SetDeadline(time.Now().Add(kit.Long))
	if _, err := c.Write(q.Append(nil)); err != nil {
		return 0, err
	}
	a, _, err := kit.ReadFrame(c, nil)
	return a.Backend, err
}

// answered reports whether a new UDP client gets an answer.
func answered(t *testing.T, addr string) bool {
	t.Helper()
	c, err := net.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(100 * time.Millisecond))
	fmt.Fprint(c, "ping")
	n, err := c.Read(make([]byte, 10))
	return err == nil && n == 4
}
