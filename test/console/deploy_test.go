package console

import (
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

var frames atomic.Uint32

// tryAsk sends a message and wants it back from a backend.
func tryAsk(c net.Conn, seq uint64) (backend uint16, err error) {
	c.SetDeadline(time.Now().Add(kit.Long))
	q := kit.Frame{Flow: frames.Add(1) | 1<<29, Seq: seq}
	if _, err := c.Write(q.Append(nil)); err != nil {
		return 0, err
	}
	buf := make([]byte, 256)
	n, err := c.Read(buf)
	if err != nil {
		return 0, err
	}
	a, _, err := kit.ParseFrame(buf[:n])
	return a.Backend, err
}

// TestDeploy swaps a backend by the shell, over TCP and UDP: who plays on the old
// one finishes there, who comes gets the new one, and a restart half-way loses
// nothing that was said.
func TestDeploy(t *testing.T) {
	for _, network := range []string{"tcp", "udp"} {
		t.Run(network, func(t *testing.T) {
			var older, newer string
			if network == "tcp" {
				older, newer = kit.NewTCPBackend(t, 1, "127.0.0.1:0").Addr, kit.NewTCPBackend(t, 2, "127.0.0.1:0").Addr
			} else {
				older, newer = kit.NewUDPBackend(t, 1, "127.0.0.1:0").Addr, kit.NewUDPBackend(t, 2, "127.0.0.1:0").Addr
			}
			addr := kit.Local(kit.Port(t))
			config := kit.App(kit.M{"game": kit.ToPool("lobby", network+"/"+addr)}, kit.M{"lobby": kit.Pool(older)})
			p := kit.Start(t, config, kit.Options{})
			sh := shellOf(t, p)

			arrive := func(want uint16) net.Conn {
				t.Helper()
				c, err := net.Dial(network, addr)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { c.Close() })
				if got := ask(t, c, 1); got != want {
					t.Fatalf("a player who arrives is at backend %d, want %d", got, want)
				}
				return c
			}
			veteran := arrive(1)
			sh.must("add", "backend", "lobby", newer)
			sh.must("set", "backend", "lobby", older, "draining")
			sh.prints(words("show pools"), "lobby", "lobby")
			for range 5 {
				arrive(2)
			}
			if got := ask(t, veteran, 2); got != 1 {
				t.Errorf("who was there is at backend %d now", got)
			}
			sh.prints([]string{"show", "sessions", "--backend", older}, veteran.LocalAddr().String(), older)
			p.MustLoad(kit.With(config, nil)) // a reload, too
			arrive(2)
			if got := ask(t, veteran, 3); got != 1 {
				t.Errorf("after a reload who was there is at backend %d", got)
			}
			before := sh.must("show", "overlay", "--json")

			veteran.Close()
			p.Signal(syscall.SIGTERM)
			p.Exit()
			p.Begin()
			p.WaitReady()
			if after := sh.must("show", "overlay", "--json"); after != before {
				t.Errorf("after a restart the overlay is\n%s, before\n%s", after, before)
			}
			for range 5 {
				arrive(2)
			}
			sh.must("del", "backend", "lobby", older)
			arrive(2)
			sh.prints(words("show overlay"), "lobby", "added", "tester")
		})
	}
}
