package tcprelay

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// endCase is how one peer ends a connection, and what the other must see.
type endCase struct {
	out     int    // bytes it sends before
	back    int    // bytes that the other sends after it has seen the end, or at once
	atOnce  bool   // back is sent without waiting
	kind    string // fin (close), shut (half-close, then read to the end), rst (linger 0), unread (close with bytes unread)
	early   bool   // the client has done all this before the backend is tried
	want    string // fin or rst
	exactly bool   // every byte must arrive
}

var endings = map[string]endCase{
	"fin":                       {out: 1000, kind: "fin", want: "fin", exactly: true},
	"fin without a byte":        {kind: "fin", want: "fin", exactly: true},
	"fin after bulk":            {out: 5 << 20, kind: "fin", want: "fin", exactly: true},
	"rst":                       {out: 1000, kind: "rst", want: "rst"},
	"rst in bulk":               {out: 5 << 20, kind: "rst", want: "rst"},
	"linger 0 without a byte":   {kind: "rst", want: "rst"},
	"half-close, 10 MiB back":   {out: 1000, back: 10 << 20, kind: "shut", want: "fin", exactly: true},
	"fin with unread data":      {out: 1000, back: 100, atOnce: true, kind: "unread", want: "rst"},
	"both at once":              {out: 3 << 20, back: 3 << 20, atOnce: true, kind: "shut", want: "fin", exactly: true},
	"fin before the connect":    {out: 1000, kind: "fin", want: "fin", early: true, exactly: true},
	"half-close before connect": {out: 1000, back: 1 << 20, kind: "shut", want: "fin", early: true, exactly: true},
}

// body hashes what follows the first bytes, those of a header.
type body struct {
	hash.Hash
	head int // bytes of it still to come
}

func (b *body) Write(p []byte) (int, error) {
	n := min(b.head, len(p))
	b.head -= n
	b.Hash.Write(p[n:])
	return len(p), nil
}

// act plays the peer that ends the connection. It returns the hash of what it
// has got behind the header, where it reads to the end.
func (e endCase) act(c *net.TCPConn, seed uint64, head int) (got [32]byte, err error) {
	if _, err := io.CopyN(io.Discard, c, int64(head)); err != nil {
		return got, err
	}
	if e.kind == "unread" {
		// The other's bytes are in the receive buffer before the close.
		raw, _ := c.SyscallConn()
		raw.Read(func(fd uintptr) bool {
			n, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK)
			return n > 0 || !errors.Is(err, syscall.EAGAIN)
		})
	}
	if _, err := c.Write(payload(e.out, seed)); err != nil && e.kind != "rst" {
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
	case "rst":
		c.SetLinger(0)
	}
	return got, c.Close()
}

// watch plays the other peer: it reads to the end and says how that came.
func (e endCase) watch(c *net.TCPConn, seed uint64, head int) (kind string, got [32]byte, n int64) {
	var wg sync.WaitGroup
	if e.atOnce {
		wg.Go(func() {
			c.Write(payload(e.back, seed))
			if e.kind == "shut" {
				c.CloseWrite()
			}
		})
	}
	h := &body{sha256.New(), head}
	n, err := io.Copy(h, c)
	switch {
	case err == nil:
		kind = "fin"
	case errors.Is(err, syscall.ECONNRESET):
		kind = "rst"
	default:
		kind = err.Error()
	}
	if e.back > 0 && !e.atOnce {
		c.Write(payload(e.back, seed))
	}
	wg.Wait()
	c.Close()
	return kind, [32]byte(h.Sum(nil)), n
}

// TestEndings ends connections in every way. A header in front of the client's
// bytes changes nothing about that.
func TestEndings(t *testing.T) {
	for _, mode := range []string{"splice", "copy", "header"} {
		for _, who := range []string{"client", "backend"} {
			for name, e := range endings {
				if e.early && who == "backend" {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%s", mode, who, name), func(t *testing.T) {
					var opts []option
					var head header
					switch mode {
					case "copy":
						opts = append(opts, copying)
					case "header":
						head = "PROXY TCP4 198.51.100.7 203.0.113.9 50000 25565\r\n"
						opts = append(opts, func(r *rig, _ *Options, _ *sock.Options) { r.header = head })
					}
					testEnding(t, e, who == "backend", len(head), opts...)
				})
			}
		}
	}
}

func testEnding(t *testing.T, e endCase, byBackend bool, head int, opts ...option) {
	type acted struct {
		got [32]byte
		err error
	}
	type watched struct {
		kind string
		got  [32]byte
		n    int64
	}
	acts, watches := make(chan acted, 1), make(chan watched, 1)
	act := func(c *net.TCPConn, head int) {
		got, err := e.act(c, 1, head)
		acts <- acted{got, err}
	}
	watch := func(c *net.TCPConn, head int) {
		kind, got, n := e.watch(c, 2, head)
		watches <- watched{kind, got, n}
	}
	atBackend := watch
	if byBackend {
		atBackend = act
	}
	if e.early {
		opts = append(opts, taking) // the test hands it over when the client is done
	}
	dialed := make(chan struct{})
	r := newRig(t, []netip.AddrPort{serve(t, func(c *net.TCPConn) {
		<-dialed
		atBackend(c, head)
	})}, opts...)
	c := r.dial()
	close(dialed)
	switch {
	case byBackend:
		go watch(c, 0)
	case !e.early:
		go act(c, 0)
	default:
		go act(c, 0)
		var o Opening
		eventually(t, func() error {
			r.mu.Lock()
			defer r.mu.Unlock()
			if len(r.opened) == 0 {
				return errors.New("nothing accepted")
			}
			o = r.opened[0]
			info, err := syscall.GetsockoptInt(o.FD, syscall.SOL_TCP, syscall.TCP_INFO)
			if err != nil {
				return err
			}
			if info&0xff != 8 { // CLOSE_WAIT: the FIN is here
				return fmt.Errorf("state %d", info&0xff)
			}
			return nil
		})
		if err := r.engine.Forward(Flow{FD: o.FD, Client: o.Client, Local: o.Local, Dialer: r}); err != nil {
			t.Fatal(err)
		}
	}
	w := <-watches
	if w.kind != e.want {
		t.Errorf("ended with %s, want %s", w.kind, e.want)
	}
	if e.exactly && w.got != sha256.Sum256(payload(e.out, 1)) {
		t.Errorf("%d bytes arrived, want %d, or they are others", w.n, e.out)
	}
	a := <-acts
	if a.err != nil {
		t.Errorf("the one who ends: %v", a.err)
	}
	if e.kind == "shut" && a.got != sha256.Sum256(payload(e.back, 2)) {
		t.Error("other bytes came back")
	}
	want := relay.ClientClose
	if byBackend {
		want = relay.BackendClose
	}
	eventually(t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if n := r.engine.Conns(); n != 0 || len(r.closed)+len(r.gaveUp) == 0 { // which it tells a moment later
			return fmt.Errorf("%d connections left, %d ends told", n, len(r.closed)+len(r.gaveUp))
		}
		return nil
	})
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.gaveUp) > 0 && e.kind == "rst" && !byBackend { // it reset before the backend was connected
		if r.gaveUp[0] != relay.ClientClose || len(r.closed) != 0 {
			t.Errorf("gave up: %v, closed: %v", r.gaveUp, r.closed)
		}
		return
	}
	if len(r.closed) != 1 || r.closed[0].why != want && !(e.atOnce && e.kind == "shut") {
		t.Errorf("closed: %v, want %v", r.closed, want)
	}
	for _, f := range r.failed {
		if !(byBackend && e.out == 0) { // reset without a byte: evidence
			t.Errorf("failed: %v", f)
		}
	}
}

// TestFinishedSender has the client send everything and close. Only then does
// the backend talk, which draws a reset from the client's kernel, and read:
// still all that the client has sent must arrive.
func TestFinishedSender(t *testing.T) {
	const size = 1 << 20
	got, closed := make(chan [32]byte, 1), make(chan struct{})
	r := newRig(t, []netip.AddrPort{serve(t, func(c *net.TCPConn) {
		<-closed
		h := sha256.New()
		for {
			c.Write(make([]byte, 100))
			if _, err := io.CopyN(h, c, 16<<10); err != nil {
				if err != io.EOF {
					t.Errorf("the backend reads %v, want the client's FIN", err)
				}
				break
			}
		}
		got <- [32]byte(h.Sum(nil))
	})})
	c := r.dial()
	c.Write(payload(size, 3))
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() (err error) { // or its own kernel would drop what is left
		raw.Control(func(fd uintptr) {
			if n := unacked(int32(fd)); n > 0 {
				err = fmt.Errorf("%d bytes are still on the client's side", n)
			}
		})
		return err
	})
	c.Close()
	close(closed)
	if <-got != sha256.Sum256(payload(size, 3)) {
		t.Error("the backend got other bytes")
	}
	if end := r.waitClosed(1)[0]; end.why != relay.ClientClose || end.info.BytesC2S != size {
		t.Errorf("closed: %v after %d bytes", end.why, end.info.BytesC2S)
	}
}

func TestEarlyReset(t *testing.T) {
	r := newRig(t, []netip.AddrPort{serve(t, func(c *net.TCPConn) {
		c.Read(make([]byte, 1))
		c.SetLinger(0)
	})})
	c := r.dial()
	c.Write([]byte("x"))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v, want a reset", err)
	}
	if end := r.waitClosed(1)[0]; end.why != relay.BackendClose {
		t.Errorf("closed: %v", end.why)
	}
	if fmt.Sprint(r.failed) != "[0: early_reset]" {
		t.Errorf("failed: %v", r.failed)
	}
}

// TestResetWithoutAWord has the backend reset before anything has reached it.
// That is evidence too, unless the client had nothing to say.
func TestResetWithoutAWord(t *testing.T) {
	for name, tc := range map[string]struct {
		leave bool // the client has sent its FIN by then
		want  string
	}{
		"the client waits":   {want: "[0: early_reset]"},
		"the client is done": {leave: true, want: "[]"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, []netip.AddrPort{serve(t, func(c *net.TCPConn) {
				if tc.leave {
					c.Read(make([]byte, 1))
				}
				c.SetLinger(0)
			})})
			c, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(r.ep.Addr()))
			switch {
			case err == nil:
				defer c.Close()
			case tc.leave || !errors.Is(err, syscall.ECONNRESET): // the reset may come first
				t.Fatal(err)
			}
			if tc.leave {
				c.CloseWrite()
			}
			r.waitClosed(1)
			if got := fmt.Sprint(r.failed); got != tc.want {
				t.Errorf("failed: %v, want %v", got, tc.want)
			}
		})
	}
}

// TestResetToOneWhoDoesNotRead has the backend flood and reset while the
// client reads nothing: the client's connection must not be kept for that.
func TestResetToOneWhoDoesNotRead(t *testing.T) {
	r := newRig(t, []netip.AddrPort{serve(t, func(c *net.TCPConn) {
		c.Write(make([]byte, 256<<10))
		c.SetDeadline(time.Now().Add(200 * time.Millisecond))
		c.Write(make([]byte, 64<<20))
		c.SetLinger(0)
	})})
	c := r.dial()
	if end := r.waitClosed(1)[0]; end.why != relay.BackendClose {
		t.Errorf("closed: %v", end.why)
	}
	if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v, want a reset", err)
	}
}

// full is a listening socket whose queue is full: a connect to it hangs.
func full(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(sa.(*syscall.SockaddrInet4).Port))
	for range 4 {
		c, err := net.DialTimeout("tcp", addr.String(), 100*time.Millisecond)
		if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
			return addr
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the queue does not fill")
	return addr
}

func TestConnectTimeout(t *testing.T) {
	hole := full(t)
	r := newRig(t, []netip.AddrPort{hole, serve(t, echo)}, withTimeout(100*time.Millisecond))
	c := r.dial()
	start := time.Now()
	roundTrip(t, c, "hello") // waits in the socket
	t.Logf("answered after %v", time.Since(start))
	r.mu.Lock()
	defer r.mu.Unlock()
	if fmt.Sprint(r.failed) != "[0: connect: timeout]" {
		t.Errorf("failed: %v", r.failed)
	}
}

// TestClientLeavesConnect resets while the connect hangs.
func TestClientLeavesConnect(t *testing.T) {
	hole := full(t)
	for name, tc := range map[string]struct {
		leave func(*rig, *net.TCPConn)
		want  relay.Reason
	}{
		"client": {func(_ *rig, c *net.TCPConn) { c.SetLinger(0); c.Close() }, relay.ClientClose},
		"admin": {func(r *rig, _ *net.TCPConn) {
			r.engine.Flows(func(i *relay.Info) bool { r.engine.CloseFlow(i.ID, relay.Admin); return true })
		}, relay.Admin},
		"path": {func(r *rig, _ *net.TCPConn) {
			r.engine.ClosePaths(func(*relay.Path) bool { return true }, relay.BackendDown)
		}, relay.Error},
		"drain": {func(r *rig, _ *net.TCPConn) { r.engine.Close() }, relay.Drain},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, []netip.AddrPort{hole})
			c := r.dial()
			eventually(t, func() error {
				n := 0
				r.engine.Flows(func(*relay.Info) bool { n++; return true })
				if n != 1 {
					return fmt.Errorf("%d flows", n)
				}
				return nil
			})
			tc.leave(r, c)
			eventually(t, func() error {
				r.mu.Lock()
				defer r.mu.Unlock()
				if len(r.gaveUp) != 1 || r.gaveUp[0] != tc.want || fmt.Sprint(r.failed) != "[0: connect: shortage]" {
					return fmt.Errorf("gave up %v, failed %v", r.gaveUp, r.failed)
				}
				return nil
			})
		})
	}
}
