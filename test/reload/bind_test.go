package reload

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// both is a config with a listener on one port of TCP and UDP, to echoing
// backends.
type both struct {
	tcp *kit.TCPBackend
	udp *kit.UDPBackend
}

func newBoth(t *testing.T) both {
	return both{kit.NewTCPBackend(t, 1, "127.0.0.1:0"), kit.NewUDPBackend(t, 1, "127.0.0.1:0")}
}

func (b both) config(binds map[string][]string, options ...kit.M) kit.M {
	listeners := kit.M{}
	for name, addrs := range binds {
		for _, network := range []string{"tcp", "udp"} {
			var of []string
			for _, a := range addrs {
				of = append(of, network+"/"+a)
			}
			listeners[name+"-"+network] = kit.ToPool(network, of...)
		}
	}
	return kit.App(listeners, kit.M{"tcp": kit.Pool(b.tcp.Addr), "udp": kit.Pool(b.udp.Addr)}, options...)
}

// TestBindConflict loads a config with a port that another process holds: a
// socket of ours that shares its port would hide that.
func TestBindConflict(t *testing.T) {
	b := newBoth(t)
	port, second := kit.Port(t), kit.Port(t)
	p := kit.Start(t, b.config(map[string][]string{"a": {kit.Local(port)}}), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(port), UDP: kit.Local(port), Conns: 10, Flows: 10, Rate: 200})
	wanted := b.config(map[string][]string{"a": {kit.Local(port)}, "b": {kit.Local(second)}})
	for network, hold := range map[string]func() (interface{ Close() error }, error){
		"tcp": func() (interface{ Close() error }, error) { return net.Listen("tcp", kit.Local(second)) },
		"udp": func() (interface{ Close() error }, error) { return net.ListenPacket("udp", kit.Local(second)) },
	} {
		holder, err := hold()
		if err != nil {
			t.Fatal(err)
		}
		failures := p.Metric("listener_bind_failures_total", "listener", "b-"+network)
		err = p.Load(wanted)
		if want := fmt.Sprintf("%s/127.0.0.1:%d", network, second); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "in use") {
			t.Errorf("loading beside a holder of %s: %v", want, err)
		}
		if got := p.Metric("listener_bind_failures_total", "listener", "b-"+network) - failures; got != 1 {
			t.Errorf("listener_bind_failures_total of %s has grown by %v, want 1", network, got)
		}
		if got := listening(t, p, second); network == "tcp" && got != "" {
			t.Errorf("after the refused load %s are bound to its port", got)
		}
		holder.Close()
	}
	load.Round(t)
	p.MustLoad(wanted)
	again := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(second), UDP: kit.Local(second), Conns: 5, Flows: 5, Rate: 100})
	again.Round(t)
	for _, l := range []*kit.Load{load, again} {
		if r := l.Stop(); !r.Perfect() {
			t.Errorf("the load noticed: %v", &r)
		}
	}
}

// TestPortRange binds 1,000 ports, each of them twice, and reloads with one
// more that is taken.
func TestPortRange(t *testing.T) {
	b := newBoth(t)
	first := kit.Ports(t, 1001)
	rng := func(n int) map[string][]string {
		return map[string][]string{"r": {fmt.Sprintf("127.0.0.1:%d-%d", first, first+n-1)}}
	}
	p := kit.Start(t, b.config(rng(1000)), kit.Options{})
	loads := map[int]*kit.Load{}
	for _, i := range []int{0, 500, 999} {
		addr := kit.Local(first + i)
		loads[i] = kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: 3, Flows: 3, Rate: 50})
	}
	middle := listening(t, p, first+500)
	holder, err := net.Listen("tcp", kit.Local(first+1000))
	if err != nil {
		t.Fatal(err)
	}
	files := p.Files()
	err = p.Load(b.config(rng(1001)))
	if want := fmt.Sprintf("tcp/127.0.0.1:%d", first+1000); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("loading with port %d taken: %v", first+1000, err)
	}
	if now := p.Files(); now > files+5 {
		t.Errorf("%d descriptors before the refused load, %d after", files, now)
	}
	holder.Close()
	p.MustLoad(b.config(rng(1001)))
	if now := listening(t, p, first+500); now != middle {
		t.Errorf("port %d had the sockets %s and has %s", first+500, middle, now)
	}
	for i, l := range loads {
		l.Round(t)
		if r := l.Stop(); !r.Perfect() {
			t.Errorf("the load of port %d noticed: %v", first+i, &r)
		}
	}
	l := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(first + 1000), UDP: kit.Local(first + 1000), Conns: 1, Flows: 1})
	l.Go(t, 4)
	if r := l.Stop(); !r.Perfect() {
		t.Errorf("the load of the new port noticed: %v", &r)
	}
}

// TestChangedBind moves a listener to another port: what is on the old one goes
// on, and new flows find only the new one.
func TestChangedBind(t *testing.T) {
	b := newBoth(t)
	old, other := kit.Port(t), kit.Port(t)
	grace := kit.M{"shutdown_grace": "10m"}
	p := kit.Start(t, b.config(map[string][]string{"a": {kit.Local(old)}}, grace), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(old), UDP: kit.Local(old), Conns: 20, Flows: 20, Rate: 400})
	p.MustLoad(b.config(map[string][]string{"a": {kit.Local(other)}}, grace))
	load.Round(t)
	refusesTCP(t, old)
	ignoresUDP(t, p, old)
	moved := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(other), UDP: kit.Local(other), Conns: 20, Flows: 20, Rate: 400})
	moved.Round(t)

	// Taken back while it drains: its sessions are still the same.
	p.MustLoad(b.config(map[string][]string{"a": {kit.Local(old), kit.Local(other)}}, grace))
	again := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(old), UDP: kit.Local(old), Conns: 20, Flows: 20, Rate: 400})
	again.Round(t)
	load.Round(t)
	for _, l := range []*kit.Load{load, moved, again} {
		if r := l.Stop(); !r.Perfect() {
			t.Errorf("the load noticed: %v", &r)
		}
	}
}

// TestGrace takes a listener away and looks for the end of its sessions when
// the grace has passed, and for the end of its sockets.
func TestGrace(t *testing.T) {
	b := newBoth(t)
	port, kept := kit.Port(t), kit.Port(t)
	p := kit.Start(t, b.config(map[string][]string{"a": {kit.Local(port)}, "k": {kit.Local(kept)}}), kit.Options{})
	stays := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(kept), UDP: kit.Local(kept), Conns: 3, Flows: 3, Rate: 100})
	load := kit.StartLoad(t, kit.LoadOptions{UDP: kit.Local(port), Flows: 5, Rate: 100, Patience: time.Second})
	p.MustLoad(b.config(map[string][]string{"k": {kit.Local(kept)}}))
	kit.Settles(t, "the number of sockets on the port", "", func() string { return listening(t, p, port) })
	kit.Settles(t, "active_udp_sessions", 0.0, func() float64 { return p.Metric("active_udp_sessions", "listener", "a-udp") })
	load.Stop()
	if r := stays.Stop(); !r.Perfect() {
		t.Errorf("the load of the other listener noticed: %v", &r)
	}
	p.MustLoad(b.config(map[string][]string{"a": {kit.Local(port)}, "k": {kit.Local(kept)}}))
	again := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(port), UDP: kit.Local(port), Conns: 3, Flows: 3, Rate: 100})
	again.Round(t)
	if r := again.Stop(); !r.Perfect() {
		t.Errorf("the load of the listener that came back noticed: %v", &r)
	}
}

// refusesTCP waits until nothing accepts on a port.
func refusesTCP(t *testing.T, port int) {
	t.Helper()
	kit.Eventually(t, fmt.Sprintf("port %d refuses", port), func() bool {
		c, err := net.Dial("tcp", kit.Local(port))
		if err == nil {
			c.Close()
		}
		return err != nil
	})
}

// ignoresUDP sends a new client's datagram to a port that drains.
func ignoresUDP(t *testing.T, p *kit.Process, port int) {
	t.Helper()
	before := p.Metric("datagrams_dropped_total", "reason", "draining")
	c, err := net.Dial("udp", kit.Local(port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("anybody?")); err != nil {
		t.Fatal(err)
	}
	kit.Settles(t, "datagrams dropped as draining", before+1, func() float64 { return p.Metric("datagrams_dropped_total", "reason", "draining") })
}
