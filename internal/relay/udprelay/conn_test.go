package udprelay

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// holdAll holds every session and gives its Conn away.
func holdAll(p *relay.Path) (acceptFunc, chan *Conn) {
	conns := make(chan *Conn, 4096)
	return func(o *Opening) Decision {
		c, err := o.Hold(p)
		if err != nil {
			return Refuse // Hold has set Reason and Counters
		}
		conns <- c
		return Hold
	}, conns
}

func dialBackend(t *testing.T, to netip.AddrPort) int {
	t.Helper()
	fd, errno := sock.DialUDP(to, netip.Addr{})
	if errno != 0 {
		t.Fatal(errno)
	}
	return fd
}

// TestForwardKeepsOrder hands a session over while its client keeps sending.
func TestForwardKeepsOrder(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), own)
	accept, conns := holdAll(p)
	ep := listen(t, e, "0.0.0.0:0", accept)
	for i := range 50 {
		c := dial(t, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), ep.Addr().Port()))
		for n := range 4 {
			send(t, c, fmt.Appendf(nil, "%d", n))
		}
		held := <-conns
		for have := 0; have < 4; {
			n, err := held.Wait(time.Now().Add(patience), have)
			if err != nil {
				t.Fatal(err)
			}
			have = n
		}
		if ds := held.Datagrams(nil); len(ds) != 4 || string(ds[3]) != "3" {
			t.Fatalf("queued: %q", ds)
		}
		if err := held.Forward(p, dialBackend(t, p.Backend)); err != nil {
			t.Fatal(err)
		}
		want := 0
		for n := 4; n < 10; n++ {
			send(t, c, fmt.Appendf(nil, "%d", n))
			if i%2 == 0 {
				break
			}
		}
		// The queue is full until the worker has taken it, so that what comes
		// then may be dropped; what is not keeps its order.
		for last := -1; want < 4; want++ {
			var got int
			fmt.Sscan(string(receive(t, c)), &got)
			if got != want || got <= last {
				t.Fatalf("got %d after %d, want %d", got, last, want)
			}
			last = got
		}
		held.Close() // harmless
		held.Reject(relay.NoRoute)
		if err := held.Forward(p, -1); !errors.Is(err, net.ErrClosed) {
			t.Errorf("second Forward: %v", err)
		}
	}
	if n := e.workers[0].pending.Load(); n != 0 {
		t.Errorf("%d sessions pending, want none", n)
	}
	if n := e.Sessions(); n != 50 {
		t.Errorf("%d sessions, want 50", n)
	}
}

func TestPendingLimits(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	p := newPath(e, netip.AddrPort{}, own)
	accept, conns := holdAll(p)
	ep := listen(t, e, "127.0.0.1:0", accept)

	c := dial(t, ep.Addr())
	for range 7 {
		send(t, c, []byte("x"))
	}
	eventually(t, "what is too much dropped", func() bool { return dropped(p, relay.PendingFull) == 3 })
	first := <-conns
	first.Reject(relay.NoRoute)
	first.Reject(relay.NoRoute)
	if n := dropped(p, relay.NoRoute); n != 4 {
		t.Errorf("%d rejected, want 4", n)
	}
	eventually(t, "rejected session gone", func() bool { return e.Sessions() == 0 })

	// Memory: 60,000 bytes each, of which 1 MiB holds 17.
	big := make([]byte, 60000)
	for i := range 20 {
		send(t, dial(t, ep.Addr()), big)
		want := min(i+1, 17) // one after the other: the socket's own buffer holds fewer
		eventually(t, "session held or refused", func() bool {
			return e.Sessions() == want && dropped(p, relay.PendingFull) == uint64(3+i+1-want)
		})
	}
	for range 17 {
		(<-conns).Close()
	}
	eventually(t, "all gone", func() bool { return e.Sessions() == 0 && e.workers[0].pendingBytes.Load() == 0 })

	// Number.
	for i := range pendingSessions + 10 {
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(ep.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		send(t, c, []byte("x"))
		want := min(i+1, pendingSessions)
		eventually(t, "session pending", func() bool {
			return e.Sessions() == want && dropped(p, relay.PendingFull) >= uint64(6+i+1-want)
		})
	}
	if n := e.workers[0].pending.Load(); n != pendingSessions {
		t.Errorf("%d pending, want %d", n, pendingSessions)
	}
	if _, _, closed := own.count(); closed != 0 {
		t.Errorf("owner told of %d ends of sessions that were none of its", closed)
	}
}

func TestConnReadWrite(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	p := newPath(e, netip.AddrPort{}, own)
	accept, conns := holdAll(p)
	ep := listen(t, e, "[::]:0", accept)
	to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), ep.Addr().Port())
	c := dial(t, to)
	send(t, c, []byte("abcdef"))
	send(t, c, nil)
	send(t, c, []byte("ghi"))
	h := <-conns
	if got := h.LocalAddr().(*net.UDPAddr).AddrPort(); got != to {
		t.Errorf("local is %v, want %v", got, to)
	}
	if got := h.RemoteAddr().String(); got != c.LocalAddr().String() {
		t.Errorf("remote is %v, want %v", got, c.LocalAddr())
	}
	h.Attach()
	h.Attach()
	buf := make([]byte, 4)
	for _, want := range []string{"abcd", "ef", "", "ghi"} {
		h.SetReadDeadline(time.Now().Add(patience))
		n, err := h.Read(buf)
		if err != nil || string(buf[:n]) != want {
			t.Fatalf("read %q, %v; want %q", buf[:n], err, want)
		}
	}
	h.SetReadDeadline(time.Now())
	if _, err := h.Read(buf); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read after the deadline: %v", err)
	}
	if _, err := h.Wait(time.Now(), 0); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("wait after the deadline: %v", err)
	}
	// A deadline that is set while Read waits ends the wait.
	h.SetReadDeadline(time.Time{})
	got := make(chan error)
	go func() {
		_, err := h.Read(buf)
		got <- err
	}()
	h.SetReadDeadline(time.Now())
	if err := <-got; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read whose deadline has moved: %v", err)
	}

	if n, err := h.Write([]byte("answer")); n != 6 || err != nil {
		t.Errorf("write: %d, %v", n, err)
	}
	if got := string(receive(t, c)); got != "answer" { // the client is connected to to
		t.Errorf("client got %q", got)
	}
	if _, err := h.Write(make([]byte, 65508)); err == nil {
		t.Error("a datagram that is too large is written")
	}
	// More than four wait for a handler.
	for range 40 {
		send(t, c, []byte("x"))
	}
	for have := 0; have < 40; {
		var err error
		if have, err = h.Wait(time.Now().Add(patience), have); err != nil {
			t.Fatal(err)
		}
	}
	var id relay.ID
	e.Flows(func(i *relay.Info) bool { id = i.ID; return true })
	info, _ := e.Flow(id)
	if info.PacketsC2S != 3 || info.BytesC2S != 9 || info.PacketsS2C != 1 || info.BytesS2C != 6 {
		t.Errorf("flow %+v", info)
	}
	h.Close()
	h.Close()
	eventually(t, "owner told", func() bool { _, _, closed := own.count(); return closed == 1 })
	if _, err := h.Read(buf); !errors.Is(err, net.ErrClosed) {
		t.Errorf("read after close: %v", err)
	}
	if _, err := h.Write(buf); !errors.Is(err, net.ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
	if h.Forward(p, -1) == nil {
		t.Error("forwarded after close")
	}
}

func TestAttachedIdleEndsRead(t *testing.T) {
	e := startEngine(t, 1)
	own := new(owner)
	p := newPath(e, netip.AddrPort{}, own)
	p.Idle = 300 * time.Millisecond
	accept, conns := holdAll(p)
	ep := listen(t, e, "127.0.0.1:0", accept)
	c := dial(t, ep.Addr())
	send(t, c, []byte("x"))
	h := <-conns
	h.Attach()
	io.CopyN(io.Discard, h, 1)
	began := time.Now()
	eventually(t, "a second of answers", func() bool {
		h.Write([]byte("y"))
		return time.Since(began) > time.Second
	})
	if _, _, closed := own.count(); closed != 0 {
		t.Fatal("ended while in use")
	}
	if n, err := h.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("read %d, %v; want EOF", n, err)
	}
	eventually(t, "owner told", func() bool { why, _, ok := own.lastClosed(); return ok && why == relay.IdleTimeout })
}

// TestEndsOfHeldSessions: whatever ends a held session wakes its reader, and
// hand-overs that meet the end lose neither descriptors nor owners' counts.
func TestEndsOfHeldSessions(t *testing.T) {
	for round := range 20 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			e := startEngine(t, 1)
			own := new(owner)
			p := newPath(e, echoBackend(t, "127.0.0.1:0"), own)
			accept, conns := holdAll(p)
			ep := listen(t, e, "127.0.0.1:0", accept)
			var readers sync.WaitGroup
			var forwarded int
			var mu sync.Mutex
			for i := range 30 {
				send(t, dial(t, ep.Addr()), []byte("x"))
				h := <-conns
				readers.Add(1)
				go func() {
					defer readers.Done()
					if i%3 == 0 {
						fd, errno := sock.DialUDP(p.Backend, netip.Addr{})
						if errno != 0 {
							t.Error(errno)
							return
						}
						if h.Forward(p, fd) != nil {
							closeFD(fd)
							return
						}
						mu.Lock()
						forwarded++
						mu.Unlock()
						return
					}
					if i%3 == 1 {
						h.Wait(time.Time{}, 1)
						return
					}
					io.Copy(io.Discard, h)
				}()
			}
			if round%2 == 0 {
				ep.Close(relay.Drain)
			} else {
				e.Close()
			}
			readers.Wait()
			if _, _, closed := own.count(); closed != forwarded {
				t.Errorf("owner told of %d ends, want %d", closed, forwarded)
			}
		})
	}
}

// TestPanicAfterHold: a session that was held by an acceptor that then
// panicked is nobody's.
func TestPanicAfterHold(t *testing.T) {
	e := startEngine(t, 1)
	p := newPath(e, netip.AddrPort{}, nil)
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		o.Hold(p)
		panic("after Hold")
	}))
	send(t, dial(t, ep.Addr()), []byte("x"))
	eventually(t, "panic contained", func() bool { return e.Panics() == 1 && e.Sessions() == 0 })
	if n := p.Counters[0].Panics.Load(); n != 1 {
		t.Errorf("the path counts %d panics, want 1", n)
	}
}

// TestOwnerPanics: callbacks that panic cost what they were told about.
func TestOwnerPanics(t *testing.T) {
	e := startEngine(t, 1)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), nil)
	p.Owner = panicky{new(owner)}
	p.Idle = 200 * time.Millisecond
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	for range 10 {
		c := dial(t, ep.Addr())
		send(t, c, []byte("x"))
		roundTripAny(t, c)
	}
	eventually(t, "sessions ended", func() bool { return e.Sessions() == 0 })
	if n := e.Panics(); n != 20 {
		t.Errorf("%d panics, want two a session", n)
	}
	if n := p.Counters[0].Panics.Load(); n != 20 {
		t.Errorf("the path counts %d panics, want two a session", n)
	}
}

type panicky struct{ *owner }

func (panicky) Answered(*relay.Path)                          { panic("answered") }
func (panicky) Closed(*relay.Path, *relay.Info, relay.Reason) { panic("closed") }

func roundTripAny(t *testing.T, c *net.UDPConn) {
	t.Helper()
	if got := receive(t, c); !bytes.Equal(got, []byte("x")) {
		t.Fatalf("got %q", got)
	}
}
