package listener_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// ports are free ones.
func ports(t *testing.T, n int) []int {
	t.Helper()
	var list []int
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		list = append(list, ln.Addr().(*net.TCPAddr).Port)
	}
	return list
}

// TestDrainIsByAddress renames a listener and takes one of its addresses away:
// the connections of that end when the grace has passed, the others do not
// notice.
func TestDrainIsByAddress(t *testing.T) {
	const echo = `"routes": [{"handle": [{"handler": "echo"}]}]}}`
	p := ports(t, 2)
	load(t, fmt.Sprintf(`{"shutdown_grace": "50ms", "listeners": {"before": {"bind": ["tcp/127.0.0.1:%d", "tcp/127.0.0.1:%d"], %s}`, p[0], p[1], echo))
	gone, kept := dial(t, "tcp", fmt.Sprintf("127.0.0.1:%d", p[0])), dial(t, "tcp", fmt.Sprintf("127.0.0.1:%d", p[1]))
	for _, c := range []net.Conn{gone, kept} {
		send(t, c, "one")
		expect(t, c, "one")
	}
	load(t, fmt.Sprintf(`{"shutdown_grace": "50ms", "listeners": {"after": {"bind": ["tcp/127.0.0.1:%d"], %s}`, p[1], echo))
	expectClosed(t, gone)
	send(t, kept, "two")
	expect(t, kept, "two")

	load(t, fmt.Sprintf(`{"shutdown_grace": "50ms", "listeners": {"after": {"bind": ["tcp/127.0.0.1:%d"], %s}`, p[0], echo))
	expectClosed(t, kept)
}

// TestTakenBesideOurs adds an address whose port we have on another one: that
// another socket holds it is found all the same.
func TestTakenBesideOurs(t *testing.T) {
	// Shares its port, as another process of ours would.
	fd, err := sock.ListenTCP(netip.MustParseAddrPort("127.0.0.2:0"), sock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	other, err := sock.LocalAddr(fd)
	if err != nil {
		t.Fatal(err)
	}
	port := other.Port()
	const echo = `"routes": [{"handle": [{"handler": "echo"}]}]}}`
	config := func(binds string) string { return fmt.Sprintf(`{"listeners": {"l": {"bind": [%s], %s}`, binds, echo) }
	ours := fmt.Sprintf(`"tcp/127.0.0.1:%d"`, port)
	load(t, config(ours))
	err = caddy.Load(fmt.Appendf(nil, `{"admin": {"disabled": true, "config": {"persist": false}}, "apps": {"wayhouse": %s}}`,
		config(ours+`, "tcp/`+other.String()+`"`)), true)
	if !errors.Is(err, sock.ErrInUse) && (err == nil || !strings.Contains(err.Error(), "already in use")) {
		t.Errorf("loading: %v, want that %v is in use", err, other)
	}
	c := dial(t, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
	send(t, c, "still here")
	expect(t, c, "still here")
}

// TestWildcardInheritsNewClients has an address give way to a wildcard that
// covers it: while the old sockets drain, which the kernel prefers, new clients
// follow the new config and the old ones stay as they are.
func TestWildcardInheritsNewClients(t *testing.T) {
	config := func(name, bind string) string {
		return fmt.Sprintf(`{"shutdown_grace": "10m", "listeners": {%q: {"bind": [%q], "routes": [{"handle": [{"handler": "echo"}]}]}}}`, name, bind)
	}
	for name, tc := range map[string]struct{ from, to string }{
		"IPv4 to both families": {"udp/0.0.0.0", "udp/[::]"},
		"one address to all":    {"udp/127.0.0.1", "udp/0.0.0.0"},
		"one address to both":   {"udp/127.0.0.1", "udp/[::]"},
	} {
		t.Run(name, func(t *testing.T) {
			port := ports(t, 1)[0]
			at := fmt.Sprintf("127.0.0.1:%d", port)
			load(t, config("before", fmt.Sprintf("%s:%d", tc.from, port)))
			old := dial(t, "udp", at)
			send(t, old, "one")
			expect(t, old, "one")
			load(t, config("after", fmt.Sprintf("%s:%d", tc.to, port)))
			send(t, old, "two")
			expect(t, old, "two")
			c := dial(t, "udp", at)
			send(t, c, "new")
			expect(t, c, "new")
		})
	}
}
