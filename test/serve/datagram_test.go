package serve

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestDatagramSizes sends every size that matters there and back, through the
// engine and through goroutines. Each comes whole.
func TestDatagramSizes(t *testing.T) {
	b := newBackends(t)
	direct, matched, wrapped := kit.Local(kit.Port(t)), kit.Local(kit.Port(t)), kit.Local(kit.Port(t))
	pool := kit.M{"handler": "pool", "pool": "udp"}
	kit.Start(t, kit.App(kit.M{
		"direct": kit.ToPool("udp", "udp/"+direct),
		"matched": kit.With(
			kit.Listener([]string{"udp/" + matched}, kit.Match(kit.M{"regexp": kit.M{"pattern": "^never"}}, kit.M{"handler": "echo"}), kit.Route(pool)),
			kit.M{"peek": kit.M{"on_undecided": "next"}}), // short ones fit the pattern still
		"wrapped": kit.Listener([]string{"udp/" + wrapped}, kit.Route(kit.M{"handler": "throttle"}, pool)),
	}, b.pools()), kit.Options{})
	rnd := rand.NewChaCha8([32]byte{1})
	for name, addr := range map[string]string{"direct": direct, "matched": matched, "wrapped": wrapped} {
		for _, size := range []int{0, 1, 2, 1200, 1472, 1473, 1500, 4096, 9000, 16384, 65506, 65507} {
			t.Run(fmt.Sprintf("%s %d", name, size), func(t *testing.T) {
				c, err := net.Dial("udp", addr)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				c.SetDeadline(time.Now().Add(20 * time.Second))
				want := make([]byte, size)
				rnd.Read(want)
				got := make([]byte, 1<<16)
				for i := range 2 { // the first opens the session
					if _, err := c.Write(want); err != nil {
						t.Fatal(err)
					}
					n, err := c.Read(got)
					if err != nil || !bytes.Equal(got[:n], want) {
						t.Fatalf("datagram %d of %d bytes came back as %d, %v", i+1, size, n, err)
					}
				}
			})
		}
	}
}

// TestWildcard has a listener on every address. Answers come from the one that
// was asked.
func TestWildcard(t *testing.T) {
	b := newBackends(t)
	dual, v4, v6 := kit.Port(t), kit.Port(t), kit.Port(t)
	kit.Start(t, kit.App(kit.M{
		"dual": kit.ToPool("udp", fmt.Sprintf("udp/:%d", dual)), "dual-tcp": kit.ToPool("tcp", fmt.Sprintf("tcp/:%d", dual)),
		"v4": kit.ToPool("udp", fmt.Sprintf("udp/0.0.0.0:%d", v4)), "v4-tcp": kit.ToPool("tcp", fmt.Sprintf("tcp/0.0.0.0:%d", v4)),
		"v6": kit.ToPool("udp", fmt.Sprintf("udp/[::]:%d", v6), fmt.Sprintf("udp/0.0.0.0:%d", v6)),
	}, b.pools()), kit.Options{})
	for _, to := range []string{
		fmt.Sprintf("127.0.0.1:%d", dual), fmt.Sprintf("127.0.0.77:%d", dual), fmt.Sprintf("[::1]:%d", dual),
		fmt.Sprintf("127.0.0.1:%d", v4), fmt.Sprintf("127.9.9.9:%d", v4),
	} {
		// The sockets of a load are connected: they hear no other address.
		load := kit.StartLoad(t, kit.LoadOptions{TCP: to, UDP: to, Conns: 3, Flows: 3})
		load.Go(t, 50)
		perfect(t, load)
	}
	for _, to := range []string{fmt.Sprintf("127.0.0.5:%d", v6), fmt.Sprintf("[::1]:%d", v6)} {
		load := kit.StartLoad(t, kit.LoadOptions{UDP: to, Flows: 3})
		load.Go(t, 50)
		perfect(t, load)
	}
}

// TestHalfClose moves bytes through the proxy while one side or the other has
// said that it is done. stream is what each side does.
func TestHalfClose(t *testing.T) {
	const size = 3 << 20
	payload := make([]byte, size)
	rand.NewChaCha8([32]byte{2}).Read(payload)
	echoEnd := func(c *net.TCPConn) { // reads to the end, then answers all of it
		got, err := io.ReadAll(c)
		if err == nil {
			c.Write(got)
		}
		c.Close()
	}
	for name, tc := range map[string]struct {
		backend func(c *net.TCPConn)
		client  func(c *net.TCPConn) error
	}{
		"client ends its half, then hears the answer": {echoEnd, func(c *net.TCPConn) error {
			go func() { c.Write(payload); c.CloseWrite() }()
			return same(c, payload)
		}},
		"client says nothing and ends its half": {func(c *net.TCPConn) { io.ReadAll(c); c.Write(payload); c.Close() }, func(c *net.TCPConn) error {
			c.CloseWrite()
			return same(c, payload)
		}},
		"backend speaks first and ends its half": {func(c *net.TCPConn) {
			c.Write(payload)
			c.CloseWrite()
			defer c.Close()
			if err := same(c, payload); err != nil {
				c.SetLinger(0)
			}
		}, func(c *net.TCPConn) error {
			if err := same(c, payload); err != nil {
				return err
			}
			if _, err := c.Write(payload); err != nil {
				return err
			}
			c.CloseWrite()
			_, err := io.ReadAll(c)
			return err
		}},
		"both at once": {func(c *net.TCPConn) {
			done := make(chan struct{})
			go func() { c.Write(payload); c.CloseWrite(); close(done) }()
			io.Copy(io.Discard, c)
			<-done
			c.Close()
		}, func(c *net.TCPConn) error {
			go func() { c.Write(payload); c.CloseWrite() }()
			return same(c, payload)
		}},
		"backend resets": {func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 5))
			c.SetLinger(0)
			c.Close()
		}, func(c *net.TCPConn) error {
			c.Write([]byte("hello"))
			if n, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
				return fmt.Errorf("read %d bytes, %v; want a reset", n, err)
			}
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					go tc.backend(c.(*net.TCPConn))
				}
			}()
			direct, matched := kit.Local(kit.Port(t)), kit.Local(kit.Port(t))
			pool := kit.M{"handler": "pool", "pool": "p"}
			p := kit.Start(t, kit.App(kit.M{
				"direct":  kit.ToPool("p", "tcp/"+direct),
				"matched": kit.Listener([]string{"tcp/" + matched}, kit.Match(kit.M{"regexp": kit.M{"pattern": "^never"}}, kit.M{"handler": "echo"}), kit.Route(pool)),
				// Early resets tell against a backend; this one is to be tried all the same.
			}, kit.M{"p": kit.With(kit.Pool(ln.Addr().String()), kit.M{"on_all_down": "try_all"})}), kit.Options{})
			for via, addr := range map[string]string{"direct": direct, "matched": matched} {
				for range 5 {
					c, err := net.Dial("tcp", addr)
					if err != nil {
						t.Fatal(err)
					}
					c.SetDeadline(time.Now().Add(kit.Long))
					if err := tc.client(c.(*net.TCPConn)); err != nil {
						t.Errorf("%s: %v", via, err)
					}
					c.Close()
				}
			}
			kit.Settles(t, "active_connections", 0.0, func() float64 { return p.Metric("active_connections") })
			if sum := p.Metric("connection_duration_seconds_count"); sum != 10 {
				t.Errorf("connection_duration_seconds has %v connections, want 10", sum)
			}
		})
	}
}

// same reads to the end and compares.
func same(r io.Reader, want []byte) error {
	got, err := io.ReadAll(r)
	if err != nil {
		return fmt.Errorf("after %d bytes: %w", len(got), err)
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%d bytes, which are not the %d that were sent", len(got), len(want))
	}
	return nil
}
