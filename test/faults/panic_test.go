package faults

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestPanics has a module of each kind panic, on connections and on sessions.
// Each panic costs its own flow and is counted.
func TestPanics(t *testing.T) {
	b := newGame(t)
	addr := b.addr()
	routes := func(pool string) []kit.M {
		return []kit.M{kit.Match(kit.M{"panicky": kit.M{}}, kit.M{"handler": "panicky"}), kit.Route(kit.M{"handler": "pool", "pool": pool})}
	}
	listeners := kit.M{
		"t": kit.Listener([]string{"tcp/" + addr}, routes("tcp")...),
		"u": kit.Listener([]string{"udp/" + addr}, routes("udp")...),
	}
	others := map[string]string{} // address of the listeners NAME-tcp and NAME-udp, which panic whatever is sent
	for name, l := range map[string]kit.M{
		"balancer": kit.ToPool("picky"),
		"filter":   kit.With(kit.ToPool("tcp"), kit.M{"filters": kit.A{kit.M{"filter": "panicky"}}}),
		"sniffer":  kit.Listener(nil, kit.Match(kit.M{"sniffer": kit.M{"name": "panicky"}}, kit.M{"handler": "echo"})),
	} {
		others[name] = kit.Local(kit.Port(t))
		for _, network := range []string{"tcp", "udp"} {
			listeners[name+"-"+network] = kit.With(l, kit.M{"bind": []string{network + "/" + others[name]}})
		}
	}
	p := kit.Start(t, kit.App(listeners, kit.M{
		"tcp": kit.Pool(b.tcp.Addr), "udp": kit.Pool(b.udp.Addr),
		"picky": kit.With(kit.Pool(b.tcp.Addr), kit.M{"balancer": kit.M{"policy": "panicky"}}),
	}), kit.Options{Package: "./test/panicky", Broken: true})
	load := b.load(t, 20) // its frames begin with a W
	before := p.Usage()
	const each = 50
	for range each {
		for _, network := range []string{"tcp", "udp"} {
			send(t, network, addr, "P")
			send(t, network, addr, "M")
			for _, to := range others {
				send(t, network, to, "x")
			}
		}
	}
	counted := func(l string, want float64) {
		t.Helper()
		kit.Settles(t, "panics_total of "+l, want, func() float64 { return p.Metric("panics_total", "listener", l) })
	}
	counted("t", 2*each)
	counted("u", 2*each)
	for name := range others {
		counted(name+"-tcp", each)
		counted(name+"-udp", each)
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
