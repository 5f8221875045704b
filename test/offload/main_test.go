// Package offload holds the tests of the kernel's help: a real process in a
// namespace of its own, on the other end of a cable, whose kernel turns away what
// its filters would refuse.
package offload

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// The proxy's end of the cable, and ours, with a player, one who is going to be
// denied, and one who is.
const (
	proxy4, proxy6   = "10.77.0.2", "fd77::2"
	player4, player6 = "10.77.0.1", "fd77::1"
	later4, later6   = "10.77.2.1", "fd77:2::1"
	denied4, denied6 = "10.77.1.1", "fd77:1::1"
	port             = 7777
)

// site is a proxy's namespace with a backend.
type site struct {
	ns  *kit.Netns
	tcp *kit.TCPBackend
	udp *kit.UDPBackend
}

func newSite(t testing.TB) *site {
	t.Helper()
	_, err := exec.LookPath("nft")
	kit.Require(t, err, "nft command (package nftables)")
	s := &site{ns: kit.NewNetns(t)}
	near, far := fmt.Sprintf("wo%d", os.Getpid()%1e6), fmt.Sprintf("wf%d", os.Getpid()%1e6)
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", s.ns.Name)
	t.Cleanup(func() { exec.Command("ip", "link", "del", near).Run() })
	for _, a := range []string{player4, later4, denied4} {
		run("ip", "addr", "add", a+"/16", "dev", near)
	}
	for _, a := range []string{player6, later6, denied6} {
		run("ip", "addr", "add", a+"/16", "dev", near, "nodad")
	}
	run("ip", "link", "set", near, "up")
	s.ns.Run(t, "ip", "addr", "add", proxy4+"/16", "dev", far)
	s.ns.Run(t, "ip", "addr", "add", proxy6+"/16", "dev", far, "nodad")
	s.ns.Run(t, "ip", "link", "set", far, "up")
	s.ns.Run(t, "ip", "route", "add", "default", "via", player4) // so that answers to strangers leave
	s.ns.Run(t, "sh", "-c", "echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter; echo 0 > /proc/sys/net/ipv4/conf/"+far+"/rp_filter")
	s.ns.Do(t, func() {
		s.tcp = kit.NewTCPBackend(t, 1, "127.0.0.1:0")
		s.udp = kit.NewUDPBackend(t, 2, "127.0.0.1:0")
	})
	return s
}

// config is a TCP and a UDP listener on every address, with filters.
func (s *site) config(offload any, filters ...kit.M) kit.M {
	l := func(network string) kit.M {
		m := kit.ToPool(network, fmt.Sprintf("%s/:%d", network, port))
		m["filters"] = filters
		return m
	}
	app := kit.M{}
	if offload != nil {
		app["offload"] = offload
	}
	return kit.App(kit.M{"t": l("tcp"), "u": l("udp")}, kit.M{"tcp": kit.Pool(s.tcp.Addr), "udp": kit.Pool(s.udp.Addr)}, app)
}

func acl(deny ...string) kit.M { return kit.M{"filter": "acl", "deny": deny} }

// start starts the proxy in its namespace.
func (s *site) start(t testing.TB, config kit.M) *kit.Process {
	t.Helper()
	return kit.Start(t, config, kit.Options{Netns: s.ns})
}

// rules is the ruleset of the proxy's namespace.
func (s *site) rules(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("ip", "netns", "exec", s.ns.Name, "nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func tables(rules string) int { return strings.Count(rules, "table inet wayhouse_") }

func at(a string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(a), port) }

// gate is the proxy's address of the family of a client.
func gate(from string) netip.AddrPort {
	if netip.MustParseAddr(from).Is4() {
		return at(proxy4)
	}
	return at(proxy6)
}

// caller is a UDP client.
type caller struct {
	c    *net.UDPConn
	flow uint32
	seq  uint64
}

func call(t testing.TB, flow uint32, from string) *caller {
	t.Helper()
	c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)}, net.UDPAddrFromAddrPort(gate(from)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &caller{c: c, flow: flow}
}

func (c *caller) send(t testing.TB) {
	t.Helper()
	c.seq++
	f := kit.Frame{Flow: c.flow, Seq: c.seq}
	if _, err := c.c.Write(f.Append(nil)); err != nil {
		t.Fatal(err)
	}
}

// ask wants an answer to a datagram.
func (c *caller) ask(t testing.TB) {
	t.Helper()
	c.send(t)
	c.c.SetReadDeadline(time.Now().Add(kit.Long))
	b := make([]byte, 2048)
	for {
		n, err := c.c.Read(b)
		if err != nil {
			t.Fatalf("from %s: %v", c.c.LocalAddr(), err)
		}
		if f, _, err := kit.ParseFrame(b[:n]); err == nil && f.Seq == c.seq {
			return
		}
	}
}

// kernel is how many packets the kernel has dropped for a listener.
func kernel(p *kit.Process, listener string) float64 {
	return p.Metric("offload_dropped_total", "listener", listener)
}

// turnedAway sends datagrams and wants the kernel to count them, and nobody else.
func turnedAway(t testing.TB, p *kit.Process, c *caller, n int) {
	t.Helper()
	before, own := kernel(p, "u"), seen(p)
	for range n {
		c.send(t)
	}
	kit.Settles(t, fmt.Sprintf("packets of %s that the kernel has dropped", c.c.LocalAddr()), before+float64(n), func() float64 { return kernel(p, "u") })
	if now := seen(p); now != own {
		t.Errorf("the process has seen %v of what the kernel should have dropped", now-own)
	}
	c.c.SetReadDeadline(time.Now().Add(time.Millisecond)) // one that has passed would end the read before it looks
	if n, err := c.c.Read(make([]byte, 10)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d bytes came back: %v", n, err)
	}
}

// seen is what the UDP listener's own filters have refused, and who has got in.
func seen(p *kit.Process) float64 {
	m := p.Metrics()
	return m.Sum("filter_blocked_total", "listener", "u") - m.Sum("filter_blocked_total", "listener", "u", "filter", "kernel") +
		m.Sum("packets_total", "listener", "u", "dir", "c2s")
}
