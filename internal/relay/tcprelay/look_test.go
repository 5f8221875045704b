package tcprelay

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// peeking has the engine ask look about the first bytes of every connection,
// for as long as wait.
func peeking(wait time.Duration, look func(o *Opening, seen []byte, final bool) Decision) option {
	return func(r *rig, _ *Options, _ *sock.Options) { r.decision, r.wait, r.look = Peek, wait, look }
}

// until decides when there are n bytes, or nothing more will come.
func until(n int, then Decision) func(*Opening, []byte, bool) Decision {
	return func(_ *Opening, seen []byte, final bool) Decision {
		if len(seen) >= n || final {
			return then
		}
		return Peek
	}
}

// waitLooks waits until Look has been called n times and returns what it was shown.
func (r *rig) waitLooks(n int) (looks []string) {
	r.t.Helper()
	eventually(r.t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if looks = slices.Clone(r.looks); len(looks) < n {
			return fmt.Errorf("looked at %q, want %d times", looks, n)
		}
		return nil
	})
	return looks
}

func (r *rig) expectLooks(want ...string) {
	r.t.Helper()
	if got := r.waitLooks(len(want)); !slices.Equal(got, want) {
		r.t.Errorf("looked at %q, want %q", got, want)
	}
}

// TestLook sends first bytes piece by piece: each piece is shown once, with
// those before it, and all of them are passed on.
func TestLook(t *testing.T) {
	r := newRig(t, []netip.AddrPort{serve(t, echo)}, peeking(time.Hour, until(5, Forward)))
	c := r.dial()
	for i := range 5 {
		io.WriteString(c, "hello"[i:i+1])
		r.waitLooks(i + 1)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
		t.Errorf("read %q, %v", got, err)
	}
	roundTrip(t, c, "more")
	r.expectLooks(`"h"`, `"he"`, `"hel"`, `"hell"`, `"hello"`)
	c.Close()
	if end := r.waitClosed(1)[0]; end.info.Path != r.paths[0] || end.info.BytesC2S != 9 {
		t.Errorf("closed %+v", end)
	}
}

// TestLookEnds holds what ends the time for first bytes, and that the looker is
// told so once.
func TestLookEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		wait time.Duration
		do   func(c *net.TCPConn, r *rig)
		want []string
		end  string
	}{
		"silence":           {50 * time.Millisecond, func(*net.TCPConn, *rig) {}, []string{`"" final`}, "forwarded"},
		"too little":        {50 * time.Millisecond, func(c *net.TCPConn, _ *rig) { io.WriteString(c, "h") }, []string{`"h"`, `"h" final`}, "forwarded"},
		"more than is seen": {time.Hour, func(c *net.TCPConn, r *rig) { io.WriteString(c, strings.Repeat("x", 100)) }, []string{`"xxxxxxxxxxxxxxxx"`}, "forwarded"},
		"end of one side": {time.Hour, func(c *net.TCPConn, r *rig) {
			io.WriteString(c, "h")
			r.waitLooks(1)
			c.CloseWrite()
		}, []string{`"h"`, `"h" final`}, "forwarded"},
		"end in silence": {time.Hour, func(c *net.TCPConn, _ *rig) { c.CloseWrite() }, []string{`"" final`}, "forwarded"},
		"reset": {time.Hour, func(c *net.TCPConn, r *rig) {
			io.WriteString(c, "h")
			r.waitLooks(1)
			c.SetLinger(0)
			c.Close()
		}, []string{`"h"`, `"h" final`}, "gave up"},
		"reset in silence": {time.Hour, func(c *net.TCPConn, r *rig) {
			r.opening(1)
			c.SetLinger(0)
			c.Close()
		}, []string{`"" final`}, "gave up"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, []netip.AddrPort{serve(t, func(c *net.TCPConn) { io.WriteString(c, "served"); c.Close() })}, peeking(tc.wait, until(16, Forward)))
			c := r.dial()
			tc.do(c, r)
			if tc.end == "gave up" {
				eventually(t, func() error {
					r.mu.Lock()
					defer r.mu.Unlock()
					if !slices.Equal(r.gaveUp, []relay.Reason{relay.ClientClose}) {
						return fmt.Errorf("gave up: %v", r.gaveUp)
					}
					return nil
				})
			} else {
				got := make([]byte, 6)
				if _, err := io.ReadFull(c, got); err != nil || string(got) != "served" {
					t.Errorf("read %q, %v", got, err)
				}
			}
			r.expectLooks(tc.want...)
		})
	}
}

// TestLookDiscards takes a header out of the stream before it is looked on, as
// the PROXY protocol has one, in pieces and with what follows it at once.
func TestLookDiscards(t *testing.T) {
	said := netip.MustParseAddrPort("192.0.2.7:77")
	for name, pieces := range map[string][]string{
		"at once":               {"<head>hello"},
		"in pieces":             {"<he", "ad>", "hel", "lo"},
		"and the beginning":     {"<head>h", "ello"},
		"and the client's end":  {"<head>hello", ""},
		"nothing more, the end": {"<head>", ""},
	} {
		t.Run(name, func(t *testing.T) {
			header := true
			look := func(o *Opening, seen []byte, final bool) Decision {
				switch {
				case header && len(seen) < 6:
					return Peek
				case header:
					header = false
					o.Discard, o.Client, o.Wait = 6, said, o.Age+time.Hour
					return Peek
				}
				if o.Client != said {
					t.Errorf("the client is %v", o.Client)
				}
				return until(5, Forward)(o, seen, final)
			}
			r := newRig(t, []netip.AddrPort{serve(t, echo)}, peeking(time.Minute, look))
			c := r.dial()
			for _, p := range pieces {
				if p == "" {
					c.CloseWrite()
				}
				io.WriteString(c, p)
			}
			c.CloseWrite()
			got, err := io.ReadAll(c)
			if want := strings.TrimPrefix(strings.Join(pieces, ""), "<head>"); err != nil || string(got) != want {
				t.Errorf("read %q, %v, want %q", got, err, want)
			}
			if end := r.waitClosed(1)[0]; end.info.Client != said || end.info.BytesC2S != uint64(len(got)) {
				t.Errorf("closed %+v", end)
			}
		})
	}
}

// TestLookTakes gives a connection away that was looked at: it can come back,
// and no event of it reaches the engine meanwhile.
func TestLookTakes(t *testing.T) {
	r := newRig(t, []netip.AddrPort{serve(t, echo)}, peeking(time.Hour, until(5, Take)))
	c := r.dial()
	io.WriteString(c, "hello")
	var o Opening
	eventually(t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.taken) == 0 {
			return errors.New("not taken")
		}
		o = r.taken[0]
		return nil
	})
	if n := r.engine.Conns(); n != 0 {
		t.Errorf("%d connections, want 0: it was taken", n)
	}
	io.WriteString(c, " there")
	if err := r.engine.Forward(Flow{FD: o.FD, Client: o.Client, Local: o.Local, Dialer: r}); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 11)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello there" {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestLookRefuses(t *testing.T) {
	for name, look := range map[string]func(*Opening, []byte, bool) Decision{
		"refuse":             until(1, Refuse),
		"undecided for ever": func(*Opening, []byte, bool) Decision { return Peek },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, nil, peeking(50*time.Millisecond, look))
			c := r.dial()
			io.WriteString(c, "x")
			if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("read %d bytes, %v", n, err)
			}
		})
	}
}

// TestLookedAt has operators look at connections that are looked at, and end
// them: each costs one descriptor, and is in the list.
func TestLookedAt(t *testing.T) {
	const n = 20
	r := newRig(t, nil, peeking(time.Hour, until(99, Forward)))
	before := countFDs(t)
	for range n {
		io.WriteString(r.dial(), "x")
	}
	r.waitLooks(n)
	if got := countFDs(t) - before; got != 2*n {
		t.Errorf("%d descriptors for %d connections, want one for each on both sides", got, n)
	}
	var seen []relay.Info
	r.engine.Flows(func(i *relay.Info) bool { seen = append(seen, *i); return true })
	if len(seen) != n || r.engine.Conns() != n || seen[0].Path != r.looking {
		t.Fatalf("%d flows and %d connections, want %d", len(seen), r.engine.Conns(), n)
	}
	if !r.engine.CloseFlow(seen[0].ID, relay.Admin) {
		t.Error("cannot be closed")
	}
	if end := r.waitClosed(1)[0]; end.why != relay.Admin || end.info.Client != seen[0].Client {
		t.Errorf("closed %+v", end)
	}
	r.engine.ClosePaths(func(p *relay.Path) bool { return p == r.looking }, relay.Drain)
	for _, end := range r.waitClosed(n)[1:] {
		if end.why != relay.Drain {
			t.Errorf("closed %v", end.why)
		}
	}
	c := r.dial()
	r.opening(n + 1)
	r.engine.Close()
	r.waitClosed(n + 1)
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read: %v", err)
	}
}

// TestLookPanics has a looker panic, once: it costs the connection it was asked
// about and no other.
func TestLookPanics(t *testing.T) {
	for _, where := range []string{"look", "taken"} {
		t.Run(where, func(t *testing.T) {
			var armed atomic.Bool
			guest := option(func(r *rig, o *Options, _ *sock.Options) {
				o.Workers = 1
				r.panics = func(at string) {
					if at == where && armed.CompareAndSwap(true, false) {
						panic("guest")
					}
				}
			})
			look := func(o *Opening, seen []byte, final bool) Decision {
				if string(seen) == "take" {
					return Take
				}
				return until(5, Forward)(o, seen, final)
			}
			r := newRig(t, []netip.AddrPort{serve(t, echo)}, peeking(time.Hour, look), guest)
			bystander, waiting := r.dial(), r.dial()
			roundTrip(t, bystander, "hello")
			io.WriteString(waiting, "hel")
			r.waitLooks(2)
			armed.Store(true)
			bad := r.dial()
			io.WriteString(bad, "take")
			if n, err := bad.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("read %d bytes, %v", n, err)
			}
			if where == "look" {
				if end := r.waitClosed(1)[0]; end.why != relay.Error || end.info.Path != r.looking {
					t.Errorf("closed %+v", end)
				}
			}
			io.WriteString(waiting, "lo")
			got := make([]byte, 5)
			if _, err := io.ReadFull(waiting, got); err != nil || string(got) != "hello" {
				t.Errorf("read %q, %v", got, err)
			}
			roundTrip(t, bystander, "still here")
			r.waitPanics(1)
		})
	}
}

// TestLookMoves has a connection become another path's while it is looked at:
// the looker is asked again at once, and whoever owns the path by then hears of
// the end.
func TestLookMoves(t *testing.T) {
	const second = 7
	moved := &relay.Path{Listener: "test", Route: second}
	look := func(o *Opening, seen []byte, final bool) Decision {
		switch {
		case o.Path != moved && (len(seen) >= 2 || final):
			o.Path, o.Wait = moved, o.Age+time.Hour
		case o.Path == moved && string(seen) == "hello":
			return Forward
		}
		return Peek
	}
	owned := func(r *rig, _ *Options, _ *sock.Options) { moved.Owner = r }
	r := newRig(t, []netip.AddrPort{serve(t, echo)}, peeking(100*time.Millisecond, look), owned)
	c := r.dial()
	io.WriteString(c, "he")
	r.waitLooks(2)
	io.WriteString(c, "llo")
	got := make([]byte, 5)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
		t.Errorf("read %q, %v", got, err)
	}
	r.expectLooks(`"he"`, `"he"`, `"hello"`)
	c.Close()
	r.waitClosed(1)

	silent := r.dial() // moves by the time being over
	looks := r.waitLooks(5)[3:]
	if !slices.Equal(looks, []string{`"" final`, `""`}) {
		t.Errorf("looked at %q", looks)
	}
	r.engine.ClosePaths(func(p *relay.Path) bool { return p.Route == second }, relay.Drain)
	if end := r.waitClosed(2)[1]; end.info.Path != moved || end.why != relay.Drain {
		t.Errorf("closed %+v", end)
	}
	silent.Close()
}

// TestAgain has the acceptor decide about a connection that it has taken.
func TestAgain(t *testing.T) {
	r := newRig(t, []netip.AddrPort{serve(t, echo)}, taking)
	c := r.dial()
	o := r.opening(1)
	r.mu.Lock()
	r.decision = Forward
	r.mu.Unlock()
	said := netip.MustParseAddrPort("192.0.2.7:77")
	r.ep.Again(o.FD, said, o.Local)
	roundTrip(t, c, "hello")
	if o := r.opening(2); o.Client != said {
		t.Errorf("asked about %v", o.Client)
	}
	c.Close()
	if end := r.waitClosed(1)[0]; end.info.Client != said {
		t.Errorf("closed %+v", end)
	}

	r.mu.Lock()
	r.decision = Take
	r.mu.Unlock()
	c = r.dial()
	o = r.opening(3)
	r.engine.Close()
	r.ep.Again(o.FD, o.Client, o.Local)
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read: %v, want the end: nobody is there to ask", err)
	}
}
