package faults

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestPanics has a matcher, a handler and a balancer panic, on connections and on
// sessions.
// Each panic costs its own flow and is counted.
func TestPanics(t *testing.T) {
	b := newGame(t)
	addr := b.addr()
	routes := func(pool string) []kit.M {
		return []kit.M{kit.Match(kit.M{"panicky": kit.M{}}, kit.M{"handler": "panicky"}), kit.Route(kit.M{"handler": "pool", "pool": pool})}
	}
	picks := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{
		"t":      kit.Listener([]string{"tcp/" + addr}, routes("tcp")...),
		"u":      kit.Listener([]string{"udp/" + addr}, routes("udp")...),
		"picks":  kit.ToPool("picks", "tcp/"+picks),
		"upicks": kit.ToPool("picks", "udp/"+picks),
	}, kit.M{
		"tcp": kit.Pool(b.tcp.Addr), "udp": kit.Pool(b.udp.Addr),
		"picks": kit.With(kit.Pool(b.tcp.Addr), kit.M{"balancer": kit.M{"policy": "panicky"}}),
	}), kit.Options{Package: "./test/panicky", Broken: true})
	load := b.load(t, 20) // its frames begin with a W
	before := p.Usage()
	const each = 50
	for range each {
		for _, network := range []string{"tcp", "udp"} {
			send(t, network, addr, "P")
			send(t, network, addr, "M")
			send(t, network, picks, "x")
		}
	}
	for l, n := range map[string]float64{"t": 2 * each, "u": 2 * each, "picks": each, "upicks": each} {
		kit.Settles(t, "panics_total of "+l, n, func() float64 { return p.Metric("panics_total", "listener", l) })
	}
	load.Round(t)
	kit.Settles(t, "active_connections", 20.0, func() float64 { return p.Metric("active_connections", "listener", "t") })
	kit.Settles(t, "active_udp_sessions", 20.0, func() float64 { return p.Metric("active_udp_sessions", "listener", "u") })
	perfect(t, load)
	kit.Eventually(t, "goroutines and descriptors are back", func() bool {
		now := p.Usage()
		return now.Goroutines <= before.Goroutines+2 && now.Files <= before.Files+2
	})
}

// send sends the first bytes of a flow that is to hear nothing, and waits for
// the end of a connection.
func send(t *testing.T, network, addr, first string) {
	t.Helper()
	c, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(kit.Long))
	// A connection may have been reset by now.
	if _, err := c.Write([]byte(first)); err != nil && network == "udp" {
		t.Fatal(err)
	}
	if network == "udp" {
		return
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after %s: %d bytes, %v", first, n, err)
	}
}
