// Package addresses holds the tests of what listeners do with addresses that are
// not the host's: prefixes that are routed to it, addresses that come later, and
// what TPROXY rules redirect. Clients, proxy and backends have a namespace each.
package addresses

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// world is a client, a proxy and a backend, each in a namespace. The client
// sends everything to the proxy, and so does the backend.
type world struct {
	client, proxy, backend *kit.Netns
	udp, udp6              *kit.UDPBackend
	tcp, tcp6              *kit.TCPBackend
}

func newWorld(t *testing.T) *world {
	w := &world{client: kit.NewNetns(t), proxy: kit.NewNetns(t), backend: kit.NewNetns(t)}
	kit.Veth(t, w.client, "10.1.0.2/24", w.proxy, "10.1.0.1/24")
	kit.Veth(t, w.client, "fd00:1::2/64", w.proxy, "fd00:1::1/64")
	kit.Veth(t, w.backend, "10.2.0.2/24", w.proxy, "10.2.0.1/24")
	kit.Veth(t, w.backend, "fd00:2::2/64", w.proxy, "fd00:2::1/64")
	w.client.Run(t, "ip", "route", "add", "default", "via", "10.1.0.1")
	w.client.Run(t, "ip", "-6", "route", "add", "default", "via", "fd00:1::1")
	w.backend.Run(t, "ip", "route", "add", "default", "via", "10.2.0.1")
	w.backend.Run(t, "ip", "-6", "route", "add", "default", "via", "fd00:2::1")
	for _, file := range []string{"all", "default"} {
		w.proxy.Run(t, "sysctl", "-qw", "net.ipv4.conf."+file+".rp_filter=0")
	}
	w.backend.Do(t, func() {
		w.udp, w.tcp = kit.NewUDPBackend(t, 1, "10.2.0.2:9000"), kit.NewTCPBackend(t, 2, "10.2.0.2:9000")
		w.udp6, w.tcp6 = kit.NewUDPBackend(t, 3, "[fd00:2::2]:9000"), kit.NewTCPBackend(t, 4, "[fd00:2::2]:9000")
	})
	return w
}

// redirect sets up TPROXY as docs/addresses.md says, for some ports more.
func (w *world) redirect(t *testing.T) {
	_, err := exec.LookPath("nft")
	kit.Require(t, err, "nft command (package nftables)")
	w.proxy.Run(t, "nft", `table inet wayhouse {
	chain prerouting {
		type filter hook prerouting priority mangle; policy accept;
		ip daddr 198.51.100.0/24 meta l4proto { tcp, udp } th dport { 7777, 30000-30009 } tproxy ip to :7777 meta mark set 1 accept
		ip6 daddr 2001:db8:ace:1::/64 meta l4proto { tcp, udp } th dport { 7777, 30000-30009 } tproxy ip6 to :7777 meta mark set 1 accept
		meta l4proto { tcp, udp } socket transparent 1 meta mark set 1 accept
	}
}`)
	for _, v := range []string{"-4", "-6"} {
		w.proxy.Run(t, "ip", v, "rule", "add", "fwmark", "1", "lookup", "100")
		to := "0.0.0.0/0"
		if v == "-6" {
			to = "::/0"
		}
		w.proxy.Run(t, "ip", v, "route", "add", "local", to, "dev", "lo", "table", "100")
	}
}

// dial opens a client's socket, with a port of its own where that is not 0.
func (w *world) dial(t *testing.T, network, to string, port int) net.Conn {
	t.Helper()
	d := net.Dialer{Timeout: 5 * time.Second}
	if port != 0 {
		ip := net.ParseIP("10.1.0.2")
		if strings.HasPrefix(to, "[") {
			ip = net.ParseIP("fd00:1::2")
		}
		if d.LocalAddr = net.Addr(&net.TCPAddr{IP: ip, Port: port}); network == "udp" {
			d.LocalAddr = &net.UDPAddr{IP: ip, Port: port}
		}
	}
	var c net.Conn
	var err error
	w.client.Do(t, func() { c, err = d.Dial(network, to) })
	if err != nil {
		t.Fatalf("dialing %s/%s: %v", network, to, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a question and returns the answer: who answered and whom it saw.
// Both sockets of UDP are connected, so an answer from elsewhere is not seen.
func ask(c net.Conn, seq uint64) (kit.Frame, error) {
	q := kit.Frame{Flow: 1, Seq: seq, Body: []byte("question")}
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Write(q.Append(nil)); err != nil {
		return kit.Frame{}, err
	}
	if c.LocalAddr().Network() == "tcp" {
		a, _, err := kit.ReadFrame(c, nil)
		return a, err
	}
	buf := make([]byte, 1<<16)
	n, err := c.Read(buf)
	if err != nil {
		return kit.Frame{}, err
	}
	a, _, err := kit.ParseFrame(buf[:n])
	return a, err
}

func addrOf(a net.Addr) netip.AddrPort {
	ap := netip.MustParseAddrPort(a.String())
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// families are routes by the family of the address that was hit.
func families(pool4, pool6 string) []kit.M {
	return []kit.M{
		kit.Match(kit.M{"dst": kit.M{"cidrs": kit.A{"0.0.0.0/0"}}}, kit.M{"handler": "pool", "pool": pool4}),
		kit.Route(kit.M{"handler": "pool", "pool": pool6}),
	}
}

func (w *world) pools() kit.M {
	return kit.M{"four": kit.Pool("10.2.0.2:9000"), "six": kit.Pool("[fd00:2::2]:9000")}
}

func TestTransparent(t *testing.T) {
	w := newWorld(t)
	w.redirect(t)
	seen := kit.With(kit.Listener([]string{"tcp/:7777", "udp/:7777"}, families("four", "six")...), kit.M{"transparent": true})
	p := kit.Start(t, kit.App(kit.M{"seen": seen}, w.pools()), kit.Options{Netns: w.proxy})
	for i, to := range []string{
		"198.51.100.7:7777", "198.51.100.7:30005", "198.51.100.8:30005", "[2001:db8:ace:1::7]:7777", "[2001:db8:ace:1::7]:30005",
	} {
		for _, network := range []string{"tcp", "udp"} {
			t.Run(network+"/"+to, func(t *testing.T) {
				c := w.dial(t, network, to, 20000+i)
				for seq := range uint64(3) {
					a, err := ask(c, seq+1)
					if err != nil {
						t.Fatalf("no answer: %v", err)
					}
					if want := addrOf(c.LocalAddr()); netip.AddrPortFrom(a.From.Addr().Unmap(), a.From.Port()) != want {
						t.Fatalf("the backend saw %s, want %s", a.From, want)
					}
				}
				var sessions []struct{ Peer, Local, Backend string }
				p.JSON("/sessions?proto="+network, &sessions)
				found := false
				for _, s := range sessions {
					found = found || s.Peer == addrOf(c.LocalAddr()).String() && s.Local == to
				}
				if !found {
					t.Errorf("/sessions has no %s of %s at %s: %v", network, c.LocalAddr(), to, sessions)
				}
			})
		}
	}
	// One client port to a second address of ours, and the same backend.
	twin := w.dial(t, "udp", "198.51.100.9:7777", 20100)
	if _, err := ask(twin, 1); err != nil {
		t.Fatal(err)
	}
	twin.Close()
	other := w.dial(t, "udp", "198.51.100.10:7777", 20100)
	fmt.Fprint(other, "hello")
	kit.Eventually(t, "the second session of a client port to a backend is refused", func() bool {
		return p.Metric("datagrams_dropped_total", "listener", "seen", "reason", "upstream_bind") == 1
	})
	if n := p.Metric("backend_connect_errors_total"); n != 0 {
		t.Errorf("a backend is blamed %v times for want of an address of ours", n)
	}
}

// TestTransparentLoop leads flows to the process itself.
func TestTransparentLoop(t *testing.T) {
	w := newWorld(t)
	w.redirect(t)
	self := kit.With(kit.ToPool("self", "tcp/:7777", "udp/:7777"), kit.M{"transparent": true})
	inside := kit.With(kit.ToPool("private", "tcp/10.1.0.1:7778", "udp/10.1.0.1:7778"), kit.M{"transparent": true})
	private := kit.ToPool("four", "tcp/127.0.0.1:7779", "udp/127.0.0.1:7779")
	p := kit.Start(t, kit.App(kit.M{"self": self, "inside": inside, "private": private},
		kit.With(w.pools(), kit.M{"self": kit.Pool("10.2.0.1:7777"), "private": kit.Pool("127.0.0.1:7779")})), kit.Options{Netns: w.proxy})
	for listener, to := range map[string]string{"self": "198.51.100.7:7777", "inside": "10.1.0.1:7778"} {
		fmt.Fprint(w.dial(t, "udp", to, 0), "hello")
		kit.Eventually(t, "a datagram of a loop is counted", func() bool {
			return p.Metric("datagrams_dropped_total", "listener", listener, "reason", "loop") == 1
		})
		if a, err := ask(w.dial(t, "tcp", to, 0), 1); err == nil {
			t.Errorf("tcp/%s is answered by %d", to, a.Backend)
		}
		if n := p.Metric("listener_connections_total", "listener", listener, "result", "loop"); n != 1 {
			t.Errorf("%v connections of %s are counted as a loop, want 1", n, listener)
		}
	}
	if n := p.Metric("listener_connections_total", "listener", "private", "result", "accepted"); n != 0 {
		t.Errorf("%v connections have come through to ourselves", n)
	}
	if n := p.Metric("backend_connect_errors_total"); n != 0 {
		t.Errorf("a backend is blamed %v times for a loop", n)
	}
}

func TestTransparentFallsBack(t *testing.T) {
	w := newWorld(t)
	w.redirect(t)
	seen := kit.With(kit.ToPool("four", "tcp/:7777", "udp/:7777"), kit.M{"transparent": true})
	p := kit.Start(t, kit.App(kit.M{"seen": seen}, w.pools()), kit.Options{Netns: w.proxy})
	for _, network := range []string{"tcp", "udp"} {
		for range 3 {
			a, err := ask(w.dial(t, network, "[2001:db8:ace:1::7]:7777", 0), 1)
			if err != nil {
				t.Fatalf("%s: no answer: %v", network, err)
			}
			if a.From.Addr().Unmap() != netip.MustParseAddr("10.2.0.1") {
				t.Errorf("%s: the backend saw %s", network, a.From)
			}
		}
	}
	if n := strings.Count(p.Log(), "a backend does not see its client's address"); n != 1 {
		t.Errorf("%d lines say so, want 1 a minute", n)
	}
}

func TestPrefix(t *testing.T) {
	w := newWorld(t)
	for _, to := range []string{"198.51.100.0/24", "203.0.113.0/24"} {
		w.proxy.Run(t, "ip", "route", "add", "local", to, "dev", "lo")
	}
	for _, to := range []string{"2001:db8:ace:1::/64", "2001:db8:ace:2::/64"} {
		w.proxy.Run(t, "ip", "-6", "route", "add", "local", to, "dev", "lo")
	}
	four := kit.With(kit.ToPool("four", "tcp/0.0.0.0:7777", "udp/0.0.0.0:7777"), kit.M{"prefix": "198.51.100.0/24"})
	six := kit.With(kit.ToPool("six", "tcp/[::]:7777", "udp/[::]:7777"), kit.M{"prefix": "2001:db8:ace:1::/64"})
	p := kit.Start(t, kit.App(kit.M{"four": four, "six": six}, w.pools()), kit.Options{Netns: w.proxy})
	for _, network := range []string{"tcp", "udp"} {
		for _, to := range []string{
			"198.51.100.1:7777", "198.51.100.2:7777", "198.51.100.255:7777",
			"[2001:db8:ace:1::1]:7777", "[2001:db8:ace:1::2]:7777", "[2001:db8:ace:1:ffff::]:7777",
		} {
			if _, err := ask(w.dial(t, network, to, 0), 1); err != nil {
				t.Errorf("%s/%s: no answer: %v", network, to, err)
			}
		}
	}
	for listener, to := range map[string]string{"four": "203.0.113.1:7777", "six": "[2001:db8:ace:2::1]:7777"} {
		fmt.Fprint(w.dial(t, "udp", to, 0), "hello")
		kit.Eventually(t, "a datagram outside the prefix is counted", func() bool {
			return p.Metric("datagrams_dropped_total", "listener", listener, "reason", "outside_prefix") == 1
		})
		if a, err := ask(w.dial(t, "tcp", to, 0), 1); err == nil {
			t.Errorf("tcp/%s is answered by %d", to, a.Backend)
		}
		if n := p.Metric("listener_connections_total", "listener", listener, "result", "outside_prefix"); n != 1 {
			t.Errorf("%v connections outside the prefix of %s are counted, want 1", n, listener)
		}
	}
}

func TestFreeBind(t *testing.T) {
	w := newWorld(t)
	later := kit.With(kit.ToPool("four", "tcp/192.0.2.9:7777", "udp/192.0.2.9:7777"), kit.M{"freebind": true})
	later6 := kit.With(kit.ToPool("six", "tcp/[2001:db8:9::9]:7777", "udp/[2001:db8:9::9]:7777"), kit.M{"freebind": true})
	p := kit.Start(t, kit.App(kit.M{"later": later, "later6": later6}, w.pools()), kit.Options{Netns: w.proxy})
	w.proxy.Run(t, "ip", "addr", "add", "192.0.2.9/32", "dev", "lo")
	w.proxy.Run(t, "ip", "addr", "add", "2001:db8:9::9/128", "dev", "lo")
	for _, network := range []string{"tcp", "udp"} {
		for _, to := range []string{"192.0.2.9:7777", "[2001:db8:9::9]:7777"} {
			kit.Eventually(t, "an address that came later is served", func() bool { // IPv6 looks for others that have it first
				_, err := ask(w.dial(t, network, to, 0), 1)
				return err == nil
			})
		}
	}
	without := kit.ToPool("four", "tcp/192.0.2.10:7777")
	if err := p.Load(kit.App(kit.M{"without": without}, w.pools())); err == nil || !strings.Contains(err.Error(), "cannot assign requested address") {
		t.Errorf("an address that is not there is bound without freebind: %v", err)
	}
}

// TestWithoutCapability starts a transparent listener that may not be.
func TestWithoutCapability(t *testing.T) {
	_, err := exec.LookPath("setpriv")
	kit.Require(t, err, "setpriv command (package util-linux)")
	ns := kit.NewNetns(t)
	seen := kit.With(kit.ToPool("four", "udp/127.0.0.1:7777"), kit.M{"transparent": true})
	p := kit.Prepare(t, kit.App(kit.M{"seen": seen}, kit.M{"four": kit.Pool("127.0.0.1:9000")}), kit.Options{
		Netns: ns, Wrap: []string{"setpriv", "--bounding-set", "-net_admin,-net_raw", "--inh-caps", "-net_admin,-net_raw"},
	})
	p.Begin()
	if code := p.Exit(); code == 0 {
		t.Error("it ends with 0")
	}
	if log := p.Log(); !strings.Contains(log, "listeners.seen.transparent: udp/127.0.0.1:7777: redirected addresses need the capability CAP_NET_ADMIN") {
		t.Errorf("the log does not say what is missing: %s", log)
	}
}
