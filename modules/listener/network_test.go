package listener_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// listenOn opens the network of a listener as a server of Caddy's does.
func listenOn(t *testing.T, name string) any {
	t.Helper()
	addr, err := caddy.ParseNetworkAddress("wayhouse/" + name + ":1")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := addr.Listen(context.Background(), 0, net.ListenConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// TestNetworkNewestServer has two servers on one name, as during a reload: what
// comes is the newer one's, and what one has not taken when it closes is the
// other's.
func TestNetworkNewestServer(t *testing.T) {
	port := ports(t, 1)[0]
	load(t, fmt.Sprintf(`{"listeners": {"stream": {"bind": ["tcp/127.0.0.1:%d"]}, "grams": {"bind": ["udp/127.0.0.1:%d"]}}}`, port, port))
	addr := fmt.Sprintf("127.0.0.1:%d", port)

	t.Run("tcp", func(t *testing.T) {
		type accepted struct {
			c   net.Conn
			err error
		}
		accept := func(ln net.Listener) chan accepted {
			got := make(chan accepted, 1)
			go func() {
				c, err := ln.Accept()
				got <- accepted{c, err}
			}()
			return got
		}
		says := func(c net.Conn, text string) {
			t.Helper()
			defer c.Close()
			send(t, c, text)
			b := make([]byte, len(text))
			if _, err := c.Read(b); err != nil || string(b) != text {
				t.Fatalf("read %q, %v", b, err)
			}
		}
		older := listenOn(t, "stream").(net.Listener)
		waits := accept(older)
		newer := listenOn(t, "stream").(net.Listener)
		for range 20 {
			c := dial(t, "tcp", addr)
			a := <-accept(newer)
			if a.err != nil {
				t.Fatal(a.err)
			}
			go func() {
				b := make([]byte, 5)
				n, _ := a.c.Read(b)
				a.c.Write(b[:n])
				a.c.Close()
			}()
			says(c, "hello")
		}

		queued := dial(t, "tcp", addr)
		defer queued.Close()
		newer.Close() // the new config was given up
		a := <-waits
		if a.err != nil {
			t.Fatal(a.err)
		}
		a.c.Close()
		expectClosed(t, queued)

		older.Close()
		if _, err := older.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Accept after Close: %v", err)
		}
		expectClosed(t, dial(t, "tcp", addr)) // nobody is there
	})

	t.Run("udp", func(t *testing.T) {
		older, newer := listenOn(t, "grams").(net.PacketConn), listenOn(t, "grams").(net.PacketConn)
		defer older.Close()
		c := dial(t, "udp", addr)
		defer c.Close()
		reads := func(pc net.PacketConn, want string) {
			t.Helper()
			b := make([]byte, 16)
			n, from, err := pc.ReadFrom(b)
			if err != nil || string(b[:n]) != want {
				t.Fatalf("read %q, %v, want %q", b[:n], err, want)
			}
			if _, err := pc.WriteTo(b[:n], from); err != nil {
				t.Fatal(err)
			}
			expect(t, c, want)
		}
		send(t, c, "one")
		reads(newer, "one")
		send(t, c, "two")
		send(t, c, "three")
		reads(newer, "two") // so that three is there, or about to be
		newer.Close()
		reads(older, "three")
	})
}
