package offload

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// The tests talk to a table in the namespace of the test, over loopback, which
// has every address of 127.0.0.0/8 for a client to come from. A world stands for
// the proxy around the kernel's help.
type world struct {
	*Kernel
	mu       sync.Mutex
	sessions []netip.AddrPort
	counted  atomic.Uint64
}

func (w *world) live(cs ...netip.AddrPort) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sessions = cs
}

func newWorld(t testing.TB, plain bool) *world {
	t.Helper()
	w := new(world)
	k, err := begin(Surroundings{
		Logger: zap.NewNop(),
		Flows: func(yield func(netip.AddrPort) bool) {
			w.mu.Lock()
			defer w.mu.Unlock()
			for _, c := range w.sessions {
				if !yield(c) {
					return
				}
			}
		},
		Count: func(_ string, n uint64) { w.counted.Add(n) },
	}, plain)
	if errors.Is(err, os.ErrPermission) {
		kit.Require(t, err, "right to make nftables")
	}
	if err != nil {
		t.Fatal(err)
	}
	w.Kernel = k
	t.Cleanup(func() {
		name := ""
		if k.t != nil {
			name = k.t.t.Name
		}
		if err := k.end(); err != nil {
			t.Error(err)
		}
		if name != "" && strings.Contains(ruleset(t), name) {
			t.Errorf("the table %s is still there", name)
		}
	})
	return w
}

func ruleset(t testing.TB) string {
	t.Helper()
	out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	kit.Require(t, err, "nft command: "+string(out))
	return string(out)
}

// server is a socket that tells what reaches it.
type server struct {
	c    *net.UDPConn
	addr netip.AddrPort
}

func newServer(t testing.TB, at string) *server {
	t.Helper()
	lc := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) { // side by side, as endpoints are
		cerr := rc.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) })
		return errors.Join(cerr, err)
	}}
	pc, err := lc.ListenPacket(t.Context(), "udp", at)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	return &server{pc.(*net.UDPConn), pc.LocalAddr().(*net.UDPAddr).AddrPort()}
}

// heard sends a datagram from a client, then one from somebody who is never
// turned away, and reports whether the first has come too.
func (s *server) heard(t testing.TB, from string) bool {
	t.Helper()
	for _, who := range []string{from, "127.1.1.1:0"} {
		to := s.addr
		local := netip.MustParseAddrPort(who)
		if to.Addr().IsUnspecified() || !local.Addr().Is4() && to.Addr().Is4() {
			loop := netip.MustParseAddr("127.0.0.1")
			if local.Addr().Is6() {
				loop = netip.IPv6Loopback()
			}
			to = netip.AddrPortFrom(loop, to.Port())
		}
		if !local.Addr().Is4() != !to.Addr().Is4() {
			local = netip.MustParseAddrPort("[::1]:0")
		}
		c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(local), net.UDPAddrFromAddrPort(to))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte(who)); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	heard := false
	b := make([]byte, 100)
	s.c.SetReadDeadline(time.Now().Add(kit.Long))
	for {
		n, err := s.c.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		if string(b[:n]) == "127.1.1.1:0" {
			return heard
		}
		heard = heard || string(b[:n]) == from
	}
}

func (s *server) wants(t testing.TB, what string, clients map[string]bool) {
	t.Helper()
	for from, want := range clients {
		if got := s.heard(t, from); got != want {
			t.Errorf("%s: %s is heard: %v, want %v\n%s", what, from, got, want, ruleset(t))
		}
	}
}

func denied(networks ...string) func(any) (cidr.Ranges, any) {
	var set cidr.Set
	if err := set.AddAll(networks); err != nil {
		panic(err)
	}
	return func(any) (cidr.Ranges, any) { return cidr.RangesOf(set.All()), &set }
}

func (w *world) serve(scopes ...*Scope) *Use {
	u := w.Prepare(&Config{Kind: kindNFTables}, scopes)
	u.Serve()
	w.call(func() {}) // behind what Serve has left to be done
	w.call(func() {
		for _, s := range w.scopes {
			w.updateDenied(s, true)
		}
	})
	return u
}

func udp(s *server) []Bind { return []Bind{{true, s.addr}} }

func TestDenied(t *testing.T) {
	for _, plain := range []bool{false, true} {
		t.Run(fmt.Sprintf("plain=%v", plain), func(t *testing.T) {
			w := newWorld(t, plain)
			if w.t.owned == plain {
				t.Errorf("owned: %v", w.t.owned)
			}
			s, other := newServer(t, "127.0.0.1:0"), newServer(t, "127.0.0.1:0")
			u := w.serve(&Scope{Listener: "a", Binds: udp(s), Guard: true, Denied: denied("127.2.0.0/16", "127.3.0.7", "127.255.255.255", "127.3.0.9")})
			s.wants(t, "at first", map[string]bool{
				"127.1.255.255:0": true, "127.2.0.0:0": false, "127.2.255.255:0": false, "127.3.0.0:0": true,
				"127.3.0.6:0": true, "127.3.0.7:0": false, "127.3.0.8:0": true, "127.3.0.9:0": false, "127.3.0.10:0": true,
			})
			other.wants(t, "another port", map[string]bool{"127.2.0.1:0": true})
			// A session that lives is kept, by its port.
			w.live(netip.MustParseAddrPort("127.4.0.1:999"))
			next := w.serve(&Scope{Listener: "a", Binds: udp(s), Guard: true, Denied: denied("127.3.0.8/31", "127.4.0.0/16")})
			u.Close()
			s.wants(t, "another list", map[string]bool{
				"127.2.0.1:0": true, "127.3.0.7:0": true, "127.3.0.9:0": false, "127.3.0.10:0": true, "127.4.0.2:0": false, "127.4.0.1:999": true, "127.4.0.1:998": false,
			})
			w.live()
			w.call(func() { w.sweep() })
			s.wants(t, "the session has ended", map[string]bool{"127.4.0.1:999": false})
			if w.read(kit.Long); w.counted.Load() != 8 {
				t.Errorf("%d packets counted, want 8", w.counted.Load())
			}
			next.Close()
			s.wants(t, "nothing wanted", map[string]bool{"127.4.0.1:0": true})
		})
	}
}

// TestWildcards wants what listens on one address to have its own say.
func TestWildcards(t *testing.T) {
	w := newWorld(t, false)
	all := newServer(t, "[::]:0")
	port := all.addr.Port()
	two := newServer(t, fmt.Sprintf("127.0.0.2:%d", port))
	three := newServer(t, fmt.Sprintf("127.0.0.3:%d", port))
	w.serve(
		&Scope{Listener: "all", Binds: udp(all), Guard: true, Denied: denied("127.5.0.0/16", "::1")},
		&Scope{Listener: "two", Binds: udp(two), Guard: true, Denied: denied("127.6.0.0/16")},
		&Scope{Listener: "three", Binds: udp(three)},
	)
	all.wants(t, "wildcard", map[string]bool{"127.5.0.1:0": false, "127.6.0.1:0": true, "[::1]:0": false})
	two.wants(t, "one address", map[string]bool{"127.5.0.1:0": true, "127.6.0.1:0": false})
	three.wants(t, "one address that is not guarded", map[string]bool{"127.5.0.1:0": true, "127.6.0.1:0": true})
}

// TestForms wants addresses that stand for others left to who knows what they
// are.
func TestForms(t *testing.T) {
	w := newWorld(t, false)
	w.serve(&Scope{Listener: "a", Guard: true, Denied: denied("::/0", "192.0.2.0/24")})
	w.call(func() {
		for a, want := range map[string]bool{
			"::1": true, "2001:db8::1": true, "ffff::": true, "192.0.2.1": true, "198.51.100.1": false,
			"::192.0.2.1": false, "::198.51.100.1": false, "::ffff:198.51.100.1": false, "::ffff:0:198.51.100.1": true,
		} {
			if got := w.scopes[1].denied.Contains(netip.MustParseAddr(a)); got != want {
				t.Errorf("%s: %v", a, got)
			}
		}
	})
}

// TestConnections wants a connection that is there to go on, and none to begin.
func TestConnections(t *testing.T) {
	w := newWorld(t, false)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	dial := func(from string) (net.Conn, error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		return d.DialContext(ctx, "tcp", ln.Addr().String())
	}
	before, err := dial("127.7.0.1")
	if err != nil {
		t.Fatal(err)
	}
	defer before.Close()
	in, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	w.serve(&Scope{Listener: "tcp", Binds: []Bind{{Addr: ln.Addr().(*net.TCPAddr).AddrPort()}}, Guard: true, Denied: denied("127.7.0.0/16")})
	if _, err := before.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	in.SetReadDeadline(time.Now().Add(kit.Long))
	if _, err := in.Read(make([]byte, 1)); err != nil {
		t.Error("the connection that was there:", err)
	}
	done := make(chan error, 1)
	go func() {
		c, err := dial("127.7.0.2")
		if err == nil {
			c.Close()
		}
		done <- err
	}()
	kit.Eventually(t, "a dropped SYN", func() bool { w.read(kit.Long); return w.counted.Load() > 0 })
	if c, err := dial("127.8.0.1"); err != nil {
		t.Error("somebody who is not denied:", err)
	} else {
		c.Close()
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) && !strings.Contains(fmt.Sprint(err), "canceled") {
		t.Errorf("somebody who is denied: %v, want to wait until it gives up", err)
	}
}

// TestBlocked has workers tell of refusals until the kernel takes over.
func TestBlocked(t *testing.T) {
	w := newWorld(t, false)
	s := newServer(t, "127.0.0.1:0")
	u := w.Prepare(&Config{Kind: kindNFTables, BlockAfter: ptr(3)}, []*Scope{{
		Listener: "a", Binds: udp(s), Guard: true,
		PerIP: Rate{1. / 60, 2}, PerNet: Rate{1. / 60, 1},
	}})
	sh := u.Shield("a")
	u.Serve()
	ip, network := netip.MustParseAddr("127.9.0.1"), netip.MustParseAddr("127.10.0.1")
	w.live(netip.MustParseAddrPort("127.9.0.1:777"), netip.MustParseAddrPort("127.10.0.9:777"))
	kit.Eventually(t, "an address and a network in the table", func() bool {
		for range 4 {
			sh.Refused(ip, "rate_ip")
			sh.Refused(network, "src_conn_net")
			sh.Refused(netip.MustParseAddr("127.11.0.1"), "acl")
		}
		n := 0
		w.call(func() { n = len(w.scopes[sh.id].blocked) })
		return n == 2
	})
	// What the limit admits is let through, and then no more.
	for range 2 {
		if !s.heard(t, "127.9.0.1:0") {
			t.Error("the kernel is stricter than the limit of an address")
		}
	}
	if !s.heard(t, "127.10.0.2:0") {
		t.Error("the kernel is stricter than the limit of a network")
	}
	s.wants(t, "above the limit", map[string]bool{
		"127.9.0.1:0": false, "127.9.0.2:0": true, "127.10.0.1:0": false, "127.10.0.200:0": false, "127.10.1.1:0": true, "127.11.0.1:0": true,
		"127.9.0.1:777": true, "127.10.0.9:777": true, "127.10.0.9:778": false,
	})
	// A session that begins now is told of.
	sh.Admitted(netip.MustParseAddrPort("127.10.0.1:4444"))
	sh.Admitted(netip.MustParseAddrPort("127.12.0.1:4444"))
	kit.Eventually(t, "a session that was admitted to be kept", func() bool { return s.heard(t, "127.10.0.1:4444") })
	w.call(func() {
		if _, known := w.scopes[sh.id].kept[netip.MustParseAddrPort("127.12.0.1:4444")]; known {
			t.Error("a session of somebody who is not blocked is kept")
		}
	})
}

func ptr[T any](v T) *T { return &v }

// TestForgotten wants a source let in again when its time is over.
func TestForgotten(t *testing.T) {
	w := newWorld(t, false)
	s := newServer(t, "127.0.0.1:0")
	u := w.Prepare(&Config{Kind: kindNFTables, BlockAfter: ptr(1)}, []*Scope{{Listener: "a", Binds: udp(s), Guard: true, PerIP: Rate{1. / 60, 1}, PerNet: Rate{1, 1}}})
	sh := u.Shield("a")
	u.Serve()
	u.k.set.Store(&settings{1, time.Second, 100})
	sh.Refused(netip.MustParseAddr("127.9.0.1"), "rate_ip")
	kit.Eventually(t, "a blocked source", func() bool { return !s.heard(t, "127.9.0.1:0") })
	kit.Eventually(t, "it is let in again", func() bool {
		once := s.heard(t, "127.9.0.1:0") // which its limit may have left
		return s.heard(t, "127.9.0.1:0") && once
	})
}

// TestRemoved has somebody take the table away, where that is possible.
func TestRemoved(t *testing.T) {
	w := newWorld(t, true)
	s := newServer(t, "127.0.0.1:0")
	u := w.Prepare(&Config{Kind: kindNFTables, BlockAfter: ptr(1)}, []*Scope{{
		Listener: "a", Binds: udp(s), Guard: true, Denied: denied("127.2.0.0/16"), PerIP: Rate{1. / 60, 1}, PerNet: Rate{1, 1},
	}})
	sh := u.Shield("a")
	u.Serve()
	w.live(netip.MustParseAddrPort("127.2.0.1:999"))
	sh.Refused(netip.MustParseAddr("127.9.0.1"), "rate_ip")
	kit.Eventually(t, "denied and blocked", func() bool { return !s.heard(t, "127.2.0.9:0") && !s.heard(t, "127.9.0.1:0") })
	w.read(kit.Long)
	if out, err := exec.Command("nft", "flush", "ruleset").CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	if !s.heard(t, "127.2.0.9:0") {
		t.Fatal("flushing the ruleset has changed nothing")
	}
	before := counter(remade)
	kit.Eventually(t, "the table is there again", func() bool { return counter(remade) > before })
	s.heard(t, "127.9.0.1:0") // what the meter of the new table begins with
	s.wants(t, "the new table", map[string]bool{"127.2.0.9:0": false, "127.9.0.1:0": false, "127.2.0.1:999": true, "127.3.0.1:0": true})
	w.read(kit.Long)
	if n := w.counted.Load(); n < 4 {
		t.Errorf("%d packets counted of both tables", n)
	}
}

// TestOwned wants nobody to be able to take a table with an owner away.
func TestOwned(t *testing.T) {
	w := newWorld(t, false)
	s := newServer(t, "127.0.0.1:0")
	w.serve(&Scope{Listener: "a", Binds: udp(s), Guard: true, Denied: denied("127.2.0.0/16")})
	exec.Command("nft", "flush", "ruleset").Run()
	exec.Command("nft", "delete", "table", "inet", w.t.t.Name).Run()
	s.wants(t, "after it was flushed", map[string]bool{"127.2.0.9:0": false})
}

// TestStale leaves a table as a process does that was killed on a kernel
// without owners.
func TestStale(t *testing.T) {
	gone := fmt.Sprintf("wayhouse_%d_1_1", os.Getpid()) // the number was given out again
	live := fmt.Sprintf("wayhouse_%d_%d_99", os.Getpid(), startOf(os.Getpid()))
	for _, name := range []string{gone, live, "wayhouse", "wayhouse_x_1_1"} {
		if out, err := exec.Command("nft", "add", "table", "inet", name).CombinedOutput(); err != nil {
			kit.Require(t, err, "nft command: "+string(out))
		}
		defer exec.Command("nft", "delete", "table", "inet", name).Run()
	}
	newWorld(t, false)
	rules := ruleset(t)
	if strings.Contains(rules, gone+" ") {
		t.Errorf("%s is still there", gone)
	}
	for _, name := range []string{live, "wayhouse", "wayhouse_x_1_1"} {
		if !strings.Contains(rules, "table inet "+name+" ") {
			t.Errorf("%s is gone", name)
		}
	}
}

// TestManyDenied loads a long list, changes a little of it, and takes it away.
func TestManyDenied(t *testing.T) {
	w := newWorld(t, false)
	s := newServer(t, "127.0.0.1:0")
	const n = 200_000
	var long, next cidr.Set
	for i := range n {
		a := netip.AddrFrom4([4]byte{byte(20 + i>>16), byte(i >> 8), byte(i), 0})
		p := netip.PrefixFrom(a, 25).String()
		long.Add(p)
		if i != 777 {
			next.Add(p)
		}
	}
	long.Add("127.2.0.0/16")
	next.Add("127.3.0.0/16")
	list := func(set *cidr.Set) func(any) (cidr.Ranges, any) {
		return func(before any) (cidr.Ranges, any) {
			if before == set {
				return nil, set
			}
			return cidr.RangesOf(set.All()), set
		}
	}
	begin := time.Now()
	w.serve(&Scope{Listener: "a", Binds: udp(s), Guard: true, Denied: list(&long)})
	t.Logf("loaded in %v", time.Since(begin))
	s.wants(t, "a long list", map[string]bool{"127.2.0.1:0": false, "127.3.0.1:0": true})
	w.call(func() {
		if got := len(w.scopes[1].denied); got != n+1 {
			t.Errorf("%d ranges, want %d", got, n+1)
		}
	})
	begin = time.Now()
	w.serve(&Scope{Listener: "a", Binds: udp(s), Guard: true, Denied: list(&next)})
	t.Logf("changed in %v", time.Since(begin))
	s.wants(t, "the next list", map[string]bool{"127.2.0.1:0": true, "127.3.0.1:0": false})

	w.call(func() { // the elements of all ranges at once would be 2 KB for each
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if err := w.t.deny(w.scopes[1].id, w.scopes[1].denied, true); err != nil {
			t.Error(err)
		}
		runtime.ReadMemStats(&after)
		if each := (after.TotalAlloc - before.TotalAlloc) / n; each > 1200 {
			t.Errorf("%d bytes are allocated for a range", each)
		}
	})
}

func TestRest(t *testing.T) {
	r := func(a, b string) cidr.Range {
		return cidr.Range{First: netip.MustParseAddr(a), Last: netip.MustParseAddr(b)}
	}
	a := cidr.Ranges{r("1.0.0.0", "1.0.0.9"), r("2.0.0.0", "2.0.0.9"), r("::1", "::1")}
	b := cidr.Ranges{r("1.0.0.0", "1.0.0.9"), r("2.0.0.0", "2.0.0.8"), r("::2", "::2")}
	if got, want := rest(a, b), (cidr.Ranges{a[1], a[2]}); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := rest(a, a); got != nil {
		t.Errorf("%v", got)
	}
}

// TestNoRight wants the error to name what is missing.
func TestNoRight(t *testing.T) {
	err := explained(fmt.Errorf("netlink receive: %w", syscall.EPERM))
	if !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Error(err)
	}
}
