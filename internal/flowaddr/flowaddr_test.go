package flowaddr

import (
	"net"
	"net/netip"
	"testing"
)

type text string

func (text) Network() string  { return "tcp" }
func (t text) String() string { return string(t) }

func TestOf(t *testing.T) {
	v4 := netip.MustParseAddrPort("192.0.2.1:7")
	for _, tc := range []struct {
		in   net.Addr
		want netip.AddrPort
	}{
		{net.TCPAddrFromAddrPort(v4), v4},
		{&net.UDPAddr{IP: net.ParseIP("::ffff:192.0.2.1"), Port: 7}, v4},
		{text("[::ffff:192.0.2.1]:7"), v4},
		{&net.UDPAddr{IP: net.ParseIP("2001:db8::1"), Port: 7}, netip.MustParseAddrPort("[2001:db8::1]:7")},
		{&net.UnixAddr{Name: "/x"}, netip.AddrPort{}},
		{text("nothing"), netip.AddrPort{}},
		{nil, netip.AddrPort{}},
	} {
		if got := Of(tc.in); got != tc.want {
			t.Errorf("%v: %v, want %v", tc.in, got, tc.want)
		}
	}
}
