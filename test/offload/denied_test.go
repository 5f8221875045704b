package offload

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestDenied wants what a list denies to be dropped before the socket, in both
// families, and counted with what filters refuse; sessions and connections that
// are there go on when their source is denied later, over reloads.
func TestDenied(t *testing.T) {
	s := newSite(t)
	p := s.start(t, s.config("nftables", acl("10.77.1.0/24", "fd77:1::/32")))
	kit.Eventually(t, "the list in the table", func() bool { return p.Metric("offload_entries", "kind", "denied") == 4 })
	var flows []*caller
	for i, from := range []string{player4, player6, later4, later6} {
		c := call(t, uint32(i+1), from)
		c.ask(t)
		flows = append(flows, c)
	}
	conn, err := net.Dial("tcp", at(proxy4).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	talk := func(seq uint64) {
		t.Helper()
		f := kit.Frame{Flow: 99, Seq: seq}
		if _, err := conn.Write(f.Append(nil)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := kit.ReadFrame(conn, nil); err != nil {
			t.Fatal("a connection that was there:", err)
		}
	}
	talk(1)
	for i, from := range []string{denied4, denied6} {
		turnedAway(t, p, call(t, uint32(i+20), from), 10)
	}
	kit.Settles(t, "filter_blocked_total of the kernel", 20, func() float64 {
		return p.Metric("filter_blocked_total", "listener", "u", "filter", "kernel")
	})
	// Whoever plays now is denied, and plays on. The player's address is that of
	// the connection too.
	p.MustLoad(s.config("nftables", acl("10.77.1.0/24", "10.77.2.0/24", "10.77.0.1", "fd77:1::/32", "fd77:2::/32", "fd77::1")))
	kit.Eventually(t, "the next list in the table", func() bool { return p.Metric("offload_entries", "kind", "denied") == 8 })
	for i, from := range []string{later4, later6, player4, player6} {
		turnedAway(t, p, call(t, uint32(i+30), from), 3)
	}
	for range 20 {
		for _, c := range flows {
			c.ask(t)
		}
	}
	talk(2)
	// One who is denied no longer gets in.
	p.MustLoad(s.config("nftables", acl("10.77.2.0/24")))
	for i, from := range []string{denied4, denied6, player4} {
		call(t, uint32(i+40), from).ask(t)
	}
	for _, c := range flows {
		c.ask(t)
	}
	if n := p.Metric("offload_remade_total"); n != 0 || tables(s.rules(t)) != 1 {
		t.Errorf("%v tables were made anew, and there are %d", n, tables(s.rules(t)))
	}
}

// TestListChanges changes a file of networks under a running proxy.
func TestListChanges(t *testing.T) {
	s := newSite(t)
	file := filepath.Join(t.TempDir(), "list")
	write := func(content string) {
		if err := os.WriteFile(file+".new", []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	write("10.77.1.0/24\n")
	p := s.start(t, s.config("nftables", kit.M{"filter": "acl", "files": kit.A{file}}))
	kit.Eventually(t, "the list in the table", func() bool { return p.Metric("offload_entries", "kind", "denied") == 2 })
	turnedAway(t, p, call(t, 1, denied4), 3)
	write("10.77.2.0/24\n10.77.3.0/24\n10.77.5.0/24\n")
	kit.Eventually(t, "the next list in the table", func() bool { return p.Metric("offload_entries", "kind", "denied") == 4 })
	turnedAway(t, p, call(t, 2, later4), 3)
	call(t, 3, denied4).ask(t)
}

// TestAllow wants the kernel to let in who is allowed, and nobody else.
func TestAllow(t *testing.T) {
	s := newSite(t)
	p := s.start(t, s.config("nftables", kit.M{"filter": "acl", "allow": kit.A{"10.77.0.0/16"}, "deny": kit.A{"10.77.1.0/24"}}))
	kit.Eventually(t, "the list in the table", func() bool { return p.Metric("offload_entries", "kind", "denied") > 0 })
	call(t, 1, player4).ask(t)
	call(t, 2, later4).ask(t)
	turnedAway(t, p, call(t, 3, denied4), 3)
	turnedAway(t, p, call(t, 4, player6), 3)
}

// TestGone wants no table left behind, whatever ends the help.
func TestGone(t *testing.T) {
	s := newSite(t)
	config := s.config("nftables", acl("10.77.1.0/24"))
	for name, end := range map[string]func(p *kit.Process){
		"SIGTERM": func(p *kit.Process) { p.Signal(syscall.SIGTERM); p.Exit() },
		"SIGQUIT": func(p *kit.Process) { p.Signal(syscall.SIGQUIT); p.Exit() },
		"SIGKILL": func(p *kit.Process) { p.Signal(syscall.SIGKILL); p.Exit() },
		"a config without it": func(p *kit.Process) {
			p.MustLoad(s.config(nil, acl("10.77.1.0/24")))
			before := p.Metric("filter_blocked_total", "listener", "u", "filter", "acl")
			call(t, 1, denied4).send(t)
			kit.Settles(t, "refused by the filter", before+1, func() float64 { return p.Metric("filter_blocked_total", "listener", "u", "filter", "acl") })
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := s.start(t, config)
			if n := tables(s.rules(t)); n != 1 {
				t.Fatalf("%d tables", n)
			}
			end(p)
			kit.Settles(t, "tables", 0, func() int { return tables(s.rules(t)) })
		})
	}
	t.Run("a config that fails", func(t *testing.T) {
		p := s.start(t, s.config(nil))
		bad := s.config("nftables", acl("10.77.1.0/24"))
		bad["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"].(kit.M)["more"] = kit.ToPool("tcp", "tcp/"+s.tcp.Addr) // is bound
		if status, answer := p.Do(http.MethodPost, "/load", p.Document(bad)); status == http.StatusOK {
			t.Fatal("it was loaded:", answer)
		}
		if n := tables(s.rules(t)); n != 0 {
			t.Errorf("%d tables", n)
		}
		call(t, 1, denied4).ask(t)
	})
	t.Run("a config that fails beside one", func(t *testing.T) {
		p := s.start(t, config)
		bad := s.config("nftables")
		bad["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"].(kit.M)["more"] = kit.ToPool("tcp", "tcp/"+s.tcp.Addr)
		if status, answer := p.Do(http.MethodPost, "/load", p.Document(bad)); status == http.StatusOK {
			t.Fatal("it was loaded:", answer)
		}
		turnedAway(t, p, call(t, 1, denied4), 3)
	})
}

// TestNoRight starts a proxy that may not touch nftables: the error says what is
// missing, and the same config without offload runs.
func TestNoRight(t *testing.T) {
	s := newSite(t)
	without := []string{"setpriv", "--inh-caps=-net_admin", "--bounding-set=-net_admin"}
	p := kit.Prepare(t, s.config("nftables", acl("10.77.1.0/24")), kit.Options{Netns: s.ns, Wrap: without})
	p.Begin()
	if code := p.Exit(); code == 0 {
		t.Error("it has ended well")
	}
	if log := p.Log(); !strings.Contains(log, "offload: ") || !strings.Contains(log, "CAP_NET_ADMIN") {
		t.Errorf("the log does not say what is missing:\n%s", log)
	}
	kit.Start(t, s.config(nil, acl("10.77.1.0/24")), kit.Options{Netns: s.ns, Wrap: without})
}

// TestOthers wants other ports of the host, and one whose clients are not
// judged, left alone.
func TestOthers(t *testing.T) {
	s := newSite(t)
	config := s.config("nftables", acl("10.77.1.0/24"))
	listeners := config["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"].(kit.M)
	listeners["open"] = kit.ToPool("udp", fmt.Sprintf("udp/%s:%d", proxy4, port))
	p := s.start(t, config)
	kit.Eventually(t, "the list in the table", func() bool { return p.Metric("offload_entries", "kind", "denied") == 2 })
	call(t, 1, denied4).ask(t) // by the narrower address
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(denied4)}}
		c, err := d.DialContext(ctx, "tcp", at(proxy4).String())
		if err == nil {
			c.Close()
		}
		done <- err
	}()
	kit.Eventually(t, "a dropped SYN", func() bool { return kernel(p, "t") > 0 })
	cancel()
	if err := <-done; err == nil {
		t.Error("a connection of somebody who is denied")
	}
}
