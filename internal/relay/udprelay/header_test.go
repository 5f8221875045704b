package udprelay

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// headBackend keeps what it gets and answers when it is told to.
type headBackend struct {
	addr   netip.AddrPort
	answer atomic.Value // of []byte; nil: none, "echo": what came

	mu  sync.Mutex
	got [][]byte
}

func newHeadBackend(t *testing.T, addr string) *headBackend {
	b := new(headBackend)
	b.addr = backend(t, addr, func(c *net.UDPConn, from netip.AddrPort, p []byte) {
		b.mu.Lock()
		b.got = append(b.got, bytes.Clone(p))
		b.mu.Unlock()
		if a, ok := b.answer.Load().([]byte); ok && a != nil {
			if string(a) == "echo" {
				a = p
			}
			c.WriteToUDPAddrPort(a, from)
		}
	})
	return b
}

func (b *headBackend) wait(t *testing.T, n int) [][]byte {
	t.Helper()
	var got [][]byte
	eventually(t, fmt.Sprintf("%d datagrams", n), func() bool {
		b.mu.Lock()
		defer b.mu.Unlock()
		got = b.got
		return len(got) >= n
	})
	return got
}

// split is the header of a datagram and what is behind it.
func split(p []byte) (h proxyproto.Header, payload string, headed bool) {
	h, n, err := proxyproto.ReadDatagram(p)
	return h, string(p[n:]), err == nil
}

// TestHeadModes: which datagrams have a header in front, before and after the
// backend's answer, in both families.
func TestHeadModes(t *testing.T) {
	for _, tc := range []struct {
		form proxyproto.Form
		want string // h: headed, -: not; the backend answers the fourth
	}{
		{proxyproto.Form{}, "--------"},
		{proxyproto.Form{Version: proxyproto.V2}, "--------"}, // not for datagrams
		{proxyproto.Form{Version: proxyproto.V2UDP, Mode: proxyproto.First}, "h-------"},
		{proxyproto.Form{Version: proxyproto.V2UDP, Mode: proxyproto.UntilReply}, "hhhh----"},
		{proxyproto.Form{Version: proxyproto.V2UDP, Mode: proxyproto.Every, CRC: true, UniqueID: true}, "hhhhhhhh"},
		{proxyproto.Form{Version: proxyproto.SPP}, "hhhhhhhh"},
	} {
		for _, at := range []struct{ bind, hit, backend string }{
			{"127.0.0.1:0", "127.0.0.1", "127.0.0.1:0"},
			{"[::1]:0", "::1", "127.0.0.1:0"},
			{"[::]:0", "127.0.0.3", "[::1]:0"}, // a wildcard: the address that was hit
			{"[::]:0", "::1", "127.0.0.1:0"},
		} {
			for name, off := range map[string]offload{"offload": probeOffload(), "plain": {}} {
				t.Run(fmt.Sprintf("%v %v/%s→%s/%s", tc.form.Version, tc.form.Mode, at.bind, at.hit, name), func(t *testing.T) {
					e := startEngineWith(t, 1, off)
					b := newHeadBackend(t, at.backend)
					own := new(owner)
					p := newPath(e, b.addr, own)
					p.Proxy = tc.form
					ep := listen(t, e, at.bind, forwardTo(p))
					to := netip.AddrPortFrom(netip.MustParseAddr(at.hit), ep.Addr().Port())
					c := dial(t, to)
					want := c.LocalAddr().(*net.UDPAddr).AddrPort()
					var sum int
					for i, mark := range tc.want {
						if i == 3 {
							b.answer.Store([]byte("answer"))
						}
						text := strings.Repeat(string(rune('a'+i)), 10*i) // an empty one too
						sum += len(text)
						send(t, c, []byte(text))
						if i == 3 {
							if got := string(receive(t, c)); got != "answer" {
								t.Fatalf("the answer is %q", got)
							}
							b.answer.Store([]byte(nil))
						}
						got := b.wait(t, i+1)
						if len(got) != i+1 {
							t.Fatalf("%d datagrams, want %d", len(got), i+1)
						}
						h, payload, headed := split(got[i])
						if payload != text || headed != (mark == 'h') {
							t.Errorf("datagram %d: %q, headed %v, want %q, %c", i, payload, headed, text, mark)
						}
						if headed && (h.Client != want || h.Dest != to) {
							t.Errorf("datagram %d is of %v to %v, want %v to %v", i, h.Client, h.Dest, want, to)
						}
					}
					ep.Close(relay.Admin)
					if _, info, _ := own.lastClosed(); info.BytesC2S != uint64(sum) || info.PacketsC2S != uint64(len(tc.want)) {
						t.Errorf("counted %d bytes in %d datagrams, want %d in %d: headers do not count", info.BytesC2S, info.PacketsC2S, sum, len(tc.want))
					}
				})
			}
		}
	}
}

// TestHeadBursts: runs that the kernel puts together and takes apart keep each
// datagram's header, whatever their sizes.
func TestHeadBursts(t *testing.T) {
	for _, form := range []proxyproto.Form{
		{Version: proxyproto.SPP}, {Version: proxyproto.V2UDP, Mode: proxyproto.First}, {Version: proxyproto.V2UDP, Mode: proxyproto.Every},
	} {
		for name, off := range map[string]offload{"offload": probeOffload(), "plain": {}} {
			t.Run(fmt.Sprint(form.Version, " ", form.Mode, " ", name), func(t *testing.T) {
				e := startEngineWith(t, 1, off)
				b := newHeadBackend(t, "127.0.0.1:0")
				p := newPath(e, b.addr, nil)
				p.Proxy = form
				ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
				c := dial(t, ep.Addr())
				want := c.LocalAddr().(*net.UDPAddr).AddrPort()
				sizes := []int{1000, 1000, 1000, 999, 1000, 1001, 0, 3, 3, 3, 3, 2, 1400, 1400, 1400, 40, 40, 40, 9000, 9000}
				for range 4 {
					sizes = append(sizes, sizes...)
				}
				sent := 0
				for i, n := range sizes {
					send(t, c, bytes.Repeat([]byte{byte(i)}, n))
					if sent++; sent%20 == 0 {
						b.wait(t, sent) // what socket buffers hold is no matter here
					}
				}
				got := b.wait(t, len(sizes))
				if len(got) != len(sizes) {
					t.Fatalf("%d datagrams of %d", len(got), len(sizes))
				}
				for i, n := range sizes {
					h, payload, headed := split(got[i])
					if payload != strings.Repeat(string([]byte{byte(i)}), n) {
						t.Fatalf("datagram %d has %d bytes, want %d of its own", i, len(payload), n)
					}
					if all := form.Mode != proxyproto.First; headed != (all || i == 0) || headed && h.Client != want {
						t.Fatalf("datagram %d: headed %v, of %v", i, headed, h.Client)
					}
				}
			})
		}
	}
}

// TestHeadTooLarge: a datagram that has no room for its header is counted and
// not cut, and the next one has it.
func TestHeadTooLarge(t *testing.T) {
	e := startEngine(t, 1)
	b := newHeadBackend(t, "127.0.0.1:0")
	p := newPath(e, b.addr, nil)
	p.Proxy = proxyproto.Form{Version: proxyproto.V2UDP, Mode: proxyproto.First}
	ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
	c := dial(t, ep.Addr())
	send(t, c, make([]byte, 65507-27)) // one byte too many
	eventually(t, "a drop", func() bool { return dropped(p, relay.UpstreamSend) == 1 })
	send(t, c, make([]byte, 65507-28))
	send(t, c, []byte("small"))
	got := b.wait(t, 2)
	if _, payload, headed := split(got[0]); !headed || len(payload) != 65507-28 {
		t.Errorf("%d bytes, headed %v", len(payload), headed)
	}
	if string(got[1]) != "small" {
		t.Errorf("then %q", got[1])
	}
}

// TestHeadOfHeldSession: a session whose backend is decided later gets its
// header, and the host that its client has named.
func TestHeadOfHeldSession(t *testing.T) {
	e := startEngine(t, 1)
	b := newHeadBackend(t, "127.0.0.1:0")
	plain := newPath(e, b.addr, nil)
	p := newPath(e, b.addr, nil)
	p.Proxy = proxyproto.Form{Version: proxyproto.V2UDP, Authority: true, UniqueID: true}
	conns := make(chan *Conn, 1)
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		c, err := o.Hold(plain)
		if err != nil {
			return Refuse
		}
		conns <- c
		return Hold
	}))
	c := dial(t, ep.Addr())
	send(t, c, []byte("one"))
	h := <-conns
	h.SetHost([]byte("play.example.com"))
	if err := h.Forward(p, dialBackend(t, p.Backend)); err != nil {
		t.Fatal(err)
	}
	send(t, c, []byte("two"))
	var id relay.ID
	e.Flows(func(i *relay.Info) bool { id = i.ID; return true })
	for i, d := range b.wait(t, 2) {
		_, payload, headed := split(d)
		if want := []string{"one", "two"}[i]; payload != want || !headed || !bytes.Contains(d, []byte("\x02\x00\x10play.example.com")) || !bytes.Contains(d, []byte(id.String())) {
			t.Errorf("datagram %d: %q, headed %v: %q", i, payload, headed, d)
		}
	}
	b.answer.Store([]byte("hello"))
	send(t, c, []byte("three"))
	receive(t, c)
	send(t, c, []byte("four"))
	if got := b.wait(t, 4); string(got[3]) != "four" {
		t.Errorf("after the answer: %q", got[3])
	}
	e.Close()
	for _, w := range e.workers {
		if len(w.notes) != 0 {
			t.Errorf("%d notes are left", len(w.notes))
		}
	}
}

// TestAnswersWithSPP: servers answer with the same header, which the client does
// not get; without one the answer is passed on; one for somebody else is not.
func TestAnswersWithSPP(t *testing.T) {
	for name, off := range map[string]offload{"offload": probeOffload(), "plain": {}} {
		t.Run(name, func(t *testing.T) {
			e := startEngineWith(t, 1, off)
			b := newHeadBackend(t, "127.0.0.1:0")
			p := newPath(e, b.addr, nil)
			p.Proxy = proxyproto.Form{Version: proxyproto.SPP}
			ep := listen(t, e, "127.0.0.1:0", forwardTo(p))
			c := dial(t, ep.Addr())
			b.answer.Store([]byte("echo"))
			for _, n := range []int{5, 0, 1400, 1400} {
				roundTrip(t, c, bytes.Repeat([]byte("x"), n))
			}
			for i := range 30 {
				send(t, c, bytes.Repeat([]byte{byte(i)}, 1000))
			}
			for i := range 30 {
				if got := receive(t, c); !bytes.Equal(got, bytes.Repeat([]byte{byte(i)}, 1000)) {
					t.Fatalf("answer %d has %d bytes", i, len(got))
				}
			}
			other := p.Proxy.Append(nil, &proxyproto.Flow{Client: netip.MustParseAddrPort("192.0.2.1:1"), Local: ep.Addr()})
			b.answer.Store(append(other, "not yours"...))
			send(t, c, []byte("x"))
			eventually(t, "a drop", func() bool { return dropped(p, relay.ProxyHeader) == 1 })
			for _, s := range []string{"bare", "\x56\xecshort"} {
				b.answer.Store([]byte(s))
				send(t, c, []byte("x"))
				if got := string(receive(t, c)); got != s {
					t.Errorf("got %q, want %q", got, s)
				}
			}
		})
	}
}
