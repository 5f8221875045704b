package udprelay

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"unsafe"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

func TestSizes(t *testing.T) {
	if n := unsafe.Sizeof(session{}); n > 128 {
		t.Errorf("a session takes %d bytes, want at most 128", n)
	}
	if n := unsafe.Sizeof(key{}); n != 44 {
		t.Errorf("a key takes %d bytes, want 44: padding would be hashed", n)
	}
}

func TestEcho(t *testing.T) {
	for _, tc := range []struct{ bind, hit, backend string }{
		{"127.0.0.1:0", "127.0.0.1", "127.0.0.1:0"},
		{"[::1]:0", "::1", "[::1]:0"},
		{"[::1]:0", "::1", "127.0.0.1:0"},
		{"0.0.0.0:0", "127.0.0.1", "127.0.0.1:0"},
		{"0.0.0.0:0", "127.0.0.2", "127.0.0.1:0"},
		{"[::]:0", "127.0.0.1", "127.0.0.1:0"},
		{"[::]:0", "127.0.0.2", "[::1]:0"},
		{"[::]:0", "::1", "127.0.0.1:0"},
	} {
		for name, off := range map[string]offload{"offload": probeOffload(), "plain": {}} {
			t.Run(fmt.Sprintf("%s/%s→%s/%s", tc.bind, tc.hit, tc.backend, name), func(t *testing.T) {
				e := startEngineWith(t, 2, off)
				own := new(owner)
				p := newPath(e, echoBackend(t, tc.backend), own)
				opened := make(chan Opening, 1)
				forward := forwardTo(p)
				ep := listen(t, e, tc.bind, acceptFunc(func(o *Opening) Decision {
					opened <- *o
					return forward(o)
				}))
				to := netip.AddrPortFrom(netip.MustParseAddr(tc.hit), ep.Addr().Port())
				// The client's socket is connected: an answer from another
				// address would not reach it.
				c := dial(t, to)
				var sum uint64
				for _, n := range []int{0, 1, 1200, 1500, 9000, 65507, 3} {
					roundTrip(t, c, bytes.Repeat([]byte{byte(n), 'x', 'y'}, (n+2)/3)[:n])
					sum += uint64(n)
				}
				o := <-opened
				if o.Local != to {
					t.Errorf("local is %v, want %v", o.Local, to)
				}
				if want := c.LocalAddr().(*net.UDPAddr).AddrPort(); o.Client != want {
					t.Errorf("client is %v, want %v", o.Client, want)
				}
				if n := ep.Sessions(); n != 1 {
					t.Errorf("%d sessions, want 1", n)
				}
				eventually(t, "counters", func() bool {
					var b, s uint64
					for i := range p.Counters {
						b += p.Counters[i].BytesC2S.Load() + p.Counters[i].PacketsC2S.Load()
						s += p.Counters[i].BytesS2C.Load() + p.Counters[i].PacketsS2C.Load()
					}
					return b == sum+7 && s == sum+7
				})
				ep.Close(relay.Admin)
				why, info, ok := own.lastClosed()
				if !ok || why != relay.Admin || info.BytesC2S != sum || info.PacketsS2C != 7 || info.Local != to || info.Client != o.Client || !info.UpstreamLocal.IsValid() {
					t.Errorf("closed: %v %+v", why, info)
				}
				if a, _, _ := own.count(); a != 1 {
					t.Errorf("answered %d times, want 1", a)
				}
			})
		}
	}
}
