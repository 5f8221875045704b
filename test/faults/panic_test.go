package faults

import (
	"net"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestPanics has a matcher and a handler panic, on connections and on sessions.
// Each panic costs its own flow and is counted.
func TestPanics(t *testing.T) {
	b := newGame(t)
	addr := b.addr()
	routes := func(pool string) []kit.M {
		return []kit.M{kit.Match(kit.M{"panicky": kit.M{}}, kit.M{"handler": "panicky"}), kit.Route(kit.M{"handler": "pool", "pool": pool})}
	}
	p := kit.Start(t, kit.App(kit.M{
		"t": kit.Listener([]string{"tcp/" + addr}, routes("tcp")...),
		"u": kit.Listener([]string{"udp/" + addr}, routes("udp")...),
	}, kit.M{"tcp": kit.Pool(b.tcp.Addr), "udp": kit.Pool(b.udp.Addr)}), kit.Options{Package: "./test/panicky", Broken: true})
	load := b.load(t, 20) // its frames begin with a W
	before := p.Usage()
	const each = 50
	for range each {
		for _, first := range []string{"P", "M"} {
			for _, network := range []string{"tcp", "udp"} {
				c, err := net.Dial(network, addr)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := c.Write([]byte(first)); err != nil {
					t.Fatal(err)
				}
				if network == "tcp" {
					c.SetDeadline(time.Now().Add(kit.Long))
					if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
						t.Errorf("after %s: %d bytes, %v", first, n, err)
					}
				}
				c.Close()
			}
		}
	}
	for _, l := range []string{"t", "u"} {
		kit.Settles(t, "panics_total of "+l, 2.0*each, func() float64 { return p.Metric("panics_total", "listener", l) })
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
