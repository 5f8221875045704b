package addresses

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestTransparentChange makes a listener transparent by a reload, and no longer,
// while a connection and a session are there; a load that fails changes nothing.
func TestTransparentChange(t *testing.T) {
	w := newWorld(t)
	w.redirect(t)
	config := func(transparent bool, more kit.M) kit.M {
		seen := kit.ToPool("four", "tcp/0.0.0.0:7777", "udp/0.0.0.0:7777")
		if transparent {
			seen["transparent"] = true
		}
		return kit.App(kit.With(kit.M{"seen": seen}, more), w.pools())
	}
	own := netip.MustParseAddr("10.2.0.1")
	p := kit.Start(t, config(false, nil), kit.Options{Netns: w.proxy})
	id := func(c net.Conn) (id string) {
		var sessions []struct{ ID, Peer string }
		p.JSON("/sessions", &sessions)
		for _, s := range sessions {
			if s.Peer == addrOf(c.LocalAddr()).String() {
				id = s.ID
			}
		}
		return id
	}
	seq := uint64(0)
	from := func(t *testing.T, c net.Conn) netip.AddrPort {
		t.Helper()
		seq++
		a, err := ask(c, seq)
		if err != nil {
			t.Fatalf("%s to %s: no answer: %v", c.LocalAddr(), c.RemoteAddr(), err)
		}
		return netip.AddrPortFrom(a.From.Addr().Unmap(), a.From.Port())
	}

	tcp, udp := w.dial(t, "tcp", "10.1.0.1:7777", 0), w.dial(t, "udp", "10.1.0.1:7777", 0)
	was := from(t, tcp)
	if a := from(t, udp); a.Addr() != own || was.Addr() != own {
		t.Fatalf("the backend saw %s and %s before, want %s", was, a, own)
	}
	p.MustLoad(config(true, nil))
	if a := from(t, tcp); a != was {
		t.Errorf("the backend sees the connection from %s, and from %s before", a, was)
	}
	kit.Eventually(t, "the client's next datagram begins a session of its own address", func() bool {
		return from(t, udp) == addrOf(udp.LocalAddr())
	})
	for _, network := range []string{"tcp", "udp"} {
		c := w.dial(t, network, "198.51.100.7:7777", 0)
		if a := from(t, c); a != addrOf(c.LocalAddr()) {
			t.Errorf("%s: the backend saw %s, want %s", network, a, c.LocalAddr())
		}
	}

	// What is not bound anew goes on, be the new config another one or a bad one.
	redirected := w.dial(t, "tcp", "198.51.100.7:30005", 0)
	from(t, redirected)
	before := [3]string{id(tcp), id(udp), id(redirected)}
	if err := p.Load(config(true, kit.M{"more": kit.ToPool("four", "tcp/203.0.113.200:1")})); err == nil {
		t.Error("a listener at an address of nobody is loaded")
	}
	p.MustLoad(config(true, kit.M{"more": kit.ToPool("four", "tcp/10.1.0.1:7778")}))
	if from(t, tcp); from(t, redirected) != addrOf(redirected.LocalAddr()) || from(t, udp) != addrOf(udp.LocalAddr()) {
		t.Error("the backend sees clients from elsewhere")
	}
	if after := [3]string{id(tcp), id(udp), id(redirected)}; after != before {
		t.Errorf("the flows %v are %v after a reload that does not concern them", before, after)
	}

	p.MustLoad(config(false, nil))
	if from(t, tcp) != was || from(t, redirected) != addrOf(redirected.LocalAddr()) {
		t.Error("a connection has not kept its address at the backend")
	}
	kit.Eventually(t, "the next session is from an address of the proxy", func() bool { return from(t, udp).Addr() == own })
}

// transparentEnding is how one peer ends a connection, and what the other sees.
type transparentEnding struct {
	out, back int
	atOnce    bool   // back is sent without waiting for the end of out
	kind      string // close, shut (half-close, then read to the end), reset, unread (close with bytes unread)
	want      string // fin or rst
}

var transparentEndings = map[string]transparentEnding{
	"close":                    {out: 1000, kind: "close", want: "fin"},
	"close after bulk":         {out: 5 << 20, kind: "close", want: "fin"},
	"reset":                    {out: 1000, kind: "reset", want: "rst"},
	"reset without a byte":     {kind: "reset", want: "rst"},
	"half-close, 10 MiB back":  {out: 1000, back: 10 << 20, kind: "shut", want: "fin"},
	"close with unread data":   {out: 1000, back: 100, atOnce: true, kind: "unread", want: "rst"},
	"both half-close at once":  {out: 3 << 20, back: 3 << 20, atOnce: true, kind: "shut", want: "fin"},
	"half-close without bytes": {kind: "shut", want: "fin"},
}

func bulk(n int, seed byte) []byte { return bytes.Repeat([]byte{seed, seed + 1, seed + 2}, n/3+1)[:n] }

// act plays the peer that ends the connection. What it gets back is hashed.
func (e *transparentEnding) act(c *net.TCPConn) (got [32]byte, err error) {
	defer c.Close()
	if e.kind == "unread" {
		raw, err := c.SyscallConn()
		if err != nil {
			return got, err
		}
		raw.Read(func(fd uintptr) bool {
			n, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK)
			return n > 0 || !errors.Is(err, syscall.EAGAIN)
		})
	}
	if _, err := c.Write(bulk(e.out, 1)); err != nil {
		return got, err
	}
	switch e.kind {
	case "shut":
		if err := c.CloseWrite(); err != nil {
			return got, err
		}
		h := sha256.New()
		_, err := io.Copy(h, c)
		return [32]byte(h.Sum(nil)), err
	case "reset":
		c.SetLinger(0)
	}
	return got, nil
}

// watch plays the other one.
func (e *transparentEnding) watch(c *net.TCPConn) (kind string, got [32]byte) {
	defer c.Close()
	var wg sync.WaitGroup
	if e.atOnce {
		wg.Go(func() {
			c.Write(bulk(e.back, 101))
			if e.kind == "shut" {
				c.CloseWrite()
			}
		})
	}
	h := sha256.New()
	_, err := io.Copy(h, c)
	switch {
	case err == nil:
		kind = "fin"
	case errors.Is(err, syscall.ECONNRESET):
		kind = "rst"
	default:
		kind = err.Error()
	}
	if !e.atOnce {
		c.Write(bulk(e.back, 101))
	}
	wg.Wait()
	return kind, [32]byte(h.Sum(nil))
}

// TestTransparentEndings ends redirected connections in every way, from either
// side, with and without a header in front.
func TestTransparentEndings(t *testing.T) {
	w := newWorld(t)
	w.redirect(t)
	conns := make(chan *net.TCPConn)
	done := make(chan struct{})
	w.backend.Do(t, func() {
		ln, err := net.Listen("tcp", "10.2.0.2:9400")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer close(done)
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				conns <- c.(*net.TCPConn)
			}
		}()
		t.Cleanup(func() { ln.Close(); <-done })
	})
	bare := kit.With(kit.ToPool("bare", "tcp/:7777"), kit.M{"transparent": true})
	pools := kit.M{"bare": kit.Pool("10.2.0.2:9400"), "v1": toldPool("v1", "10.2.0.2:9400", nil), "v2": toldPool("v2", "10.2.0.2:9400", nil)}
	for _, version := range []string{"none", "v1", "v2"} {
		to := version
		if version == "none" {
			to = "bare"
		}
		bare["routes"] = kit.A{kit.Route(kit.M{"handler": "pool", "pool": to})}
		t.Run(version, func(t *testing.T) {
			p := kit.Start(t, kit.App(kit.M{"seen": bare}, pools), kit.Options{Netns: w.proxy})
			for name, e := range transparentEndings {
				for _, who := range []string{"client", "backend"} {
					t.Run(name+" by the "+who, func(t *testing.T) {
						client := w.dial(t, "tcp", "198.51.100.7:7777", 0).(*net.TCPConn)
						backend := <-conns
						for _, c := range []net.Conn{client, backend} {
							c.SetDeadline(time.Now().Add(kit.Long))
						}
						if from := addrOf(backend.RemoteAddr()); from != addrOf(client.LocalAddr()) {
							t.Errorf("the backend sees %s, want %s", from, client.LocalAddr())
						}
						skipHeader(t, backend, version)
						one, other := client, backend
						if who == "backend" {
							one, other = backend, client
						}
						var kind string
						var heard [32]byte
						var wg sync.WaitGroup
						wg.Go(func() { kind, heard = e.watch(other) })
						back, err := e.act(one)
						wg.Wait()
						if err != nil || kind != e.want {
							t.Errorf("it ended with %s, want %s; the one who ends: %v", kind, e.want, err)
						}
						if e.want == "fin" && heard != sha256.Sum256(bulk(e.out, 1)) {
							t.Error("other bytes have arrived")
						}
						if e.kind == "shut" && back != sha256.Sum256(bulk(e.back, 101)) {
							t.Error("other bytes have come back")
						}
						kit.Settles(t, "connections left", 0.0, func() float64 { return p.Metric("active_connections") })
					})
				}
			}
		})
	}
}

// skipHeader reads a header and not a byte more.
func skipHeader(t *testing.T, c net.Conn, version string) {
	t.Helper()
	var b []byte
	one := make([]byte, 1)
	more := func() bool {
		switch version {
		case "v1":
			return !bytes.HasSuffix(b, []byte("\r\n"))
		case "v2":
			return len(b) < 16 || len(b) < 16+int(b[14])<<8+int(b[15])
		}
		return false
	}
	for more() {
		if _, err := io.ReadFull(c, one); err != nil {
			t.Fatalf("the header of %s ends after %q: %v", version, b, err)
		}
		b = append(b, one...)
	}
}

// TestTransparentShortage makes the kernel refuse every tenth of the calls that
// give sockets the client's address: that costs these flows, and nothing else.
func TestTransparentShortage(t *testing.T) {
	_, err := exec.LookPath("strace")
	kit.Require(t, err, "strace (package strace)")
	w := newWorld(t)
	w.redirect(t)
	seen := kit.With(kit.ToPool("four", "tcp/:7777", "udp/:7777"), kit.M{"transparent": true})
	pools := kit.M{"four": kit.With(kit.Pool("10.2.0.2:9000"), kit.M{"idle_timeout": "2s"})}
	for _, tc := range []struct{ calls, errno string }{{"bind", "EADDRINUSE"}, {"bind", "EADDRNOTAVAIL"}, {"socket", "ENOBUFS"}, {"connect", "EPERM"}} {
		t.Run(tc.calls+" "+tc.errno, func(t *testing.T) {
			// strace and the race detector together are too slow.
			p := kit.Start(t, kit.App(kit.M{"seen": seen}, pools), kit.Options{Netns: w.proxy, Plain: true})
			trace := exec.Command("strace", "-f", "-qq", "-o", "/dev/null", "-p", fmt.Sprint(p.PID()),
				"-e", "trace="+tc.calls, "-e", fmt.Sprintf("inject=%s:error=%s:when=5+10", tc.calls, tc.errno))
			if err := trace.Start(); err != nil {
				t.Fatal(err)
			}
			var once sync.Once
			stop := func() { once.Do(func() { trace.Process.Signal(os.Interrupt); trace.Wait() }) }
			t.Cleanup(stop)
			kit.Eventually(t, "strace has the process", p.Traced)
			const n = 60
			for _, network := range []string{"tcp", "udp"} {
				served := 0
				for range n {
					c := w.dial(t, network, "198.51.100.7:7777", 0)
					if network == "udp" { // whose first datagram may be lost
						fmt.Fprint(c, "hello")
						c.SetReadDeadline(time.Now().Add(time.Second))
						if _, err := c.Read(make([]byte, 100)); err == nil {
							served++
						}
					} else if a, err := ask(c, 1); err == nil && addrOf(c.LocalAddr()) == a.From {
						served++
					}
					c.Close()
				}
				if served < n/2 {
					t.Errorf("%d of %d flows over %s were served", served, n, network)
				}
			}
			stop()
			for _, network := range []string{"tcp", "udp"} {
				for range 10 {
					c := w.dial(t, network, "198.51.100.7:7777", 0)
					if a, err := ask(c, 1); err != nil || a.From != addrOf(c.LocalAddr()) {
						t.Errorf("%s after it: the backend saw %s, %v", network, a.From, err)
					}
					c.Close()
				}
			}
			if n := p.Metric("backend_connect_errors_total"); n != 0 {
				t.Errorf("a backend is blamed %v times", n)
			}
			kit.Settles(t, "connections left", 0.0, func() float64 { return p.Metric("active_connections") })
			kit.Settles(t, "sessions left", 0.0, func() float64 { return p.Metric("active_udp_sessions") })
		})
	}
}

// TestTransparentAdmin: by no listener that is transparent does a client come to
// the admin endpoint, for it would do so from any address it likes.
func TestTransparentAdmin(t *testing.T) {
	w := newWorld(t)
	w.redirect(t)
	config := kit.App(kit.M{"seen": kit.With(kit.ToPool("admin", "tcp/:7777"), kit.M{"transparent": true})},
		kit.M{"admin": kit.Pool("10.1.0.1:2019")})
	config["admin"] = kit.M{"listen": "10.1.0.1:2019", "config": kit.M{"persist": false}}
	p := kit.Prepare(t, config, kit.Options{Netns: w.proxy})
	p.Begin()
	get := func(t *testing.T, from *kit.Netns, to, path string) (answer string) {
		from.Do(t, func() {
			c, err := net.DialTimeout("tcp", to, 5*time.Second)
			if err != nil {
				return
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(kit.Long))
			fmt.Fprintf(c, "GET %s HTTP/1.0\r\nHost: 10.1.0.1:2019\r\n\r\n", path)
			if res, err := http.ReadResponse(bufio.NewReader(c), nil); err == nil {
				b, _ := io.ReadAll(res.Body)
				answer = fmt.Sprint(res.StatusCode, " ", string(b))
			}
		})
		return answer
	}
	kit.Eventually(t, "the admin endpoint answers where it listens", func() bool {
		return strings.HasPrefix(get(t, w.proxy, "10.1.0.1:2019", "/readyz"), "200 ")
	})
	if answer := get(t, w.client, "198.51.100.7:7777", "/config/"); answer != "" {
		t.Errorf("a client of a listener is answered %q", answer)
	}
	if m := get(t, w.proxy, "10.1.0.1:2019", "/metrics"); !strings.Contains(m, `wayhouse_listener_connections_total{listener="seen",result="loop"} 1`) {
		t.Errorf("no connection is counted as a loop: %s", m)
	}
}
