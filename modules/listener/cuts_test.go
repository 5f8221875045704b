package listener_test

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	wl "github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// FuzzCutRoutes has routes of every kind that goes by bytes decide about a
// stream that comes at once, byte by byte, and cut anywhere: it is the same
// route each time, or the same refusal.
func FuzzCutRoutes(f *testing.F) {
	var routes []string
	for _, match := range []string{
		`{"sni": {"host": ["*.example.com"]}, "first_bytes": {"length": {"max": 1500}}}`,
		`{"sni": {"host": [".example.com"]}}`,
		`{"sniffer": {"name": "minecraft", "host": ["play.example.com"]}}`,
		`{"sniffer": {"name": "minecraft", "key": ["state=status"]}}, {"sniffer": {"name": "stun"}}`,
		`{"first_bytes": {"prefix": "ascii:hello"}, "not": [{"first_bytes": {"prefix": "ascii:!", "offset": 5}}]}`,
		`{"first_bytes": {"prefix": "hex:16", "length": {"min": 8, "max": 64}}}`,
		`{"not": [{"first_bytes": {"prefix": "hex:16"}}, {"sniffer": {"name": "minecraft"}}], "sniffer": {"name": "openvpn"}}`,
		`{"first_bytes": {"length": {"min": 2, "max": 3}}}`,
	} {
		routes = append(routes, pooled(match, "127.0.0.1:9"))
	}
	load(f, `{"listeners": {"l": `+listener("tcp/127.0.0.1:0", ``, `"routes": [`+strings.Join(routes, ",")+`]`)+`}}`)
	at := netip.MustParseAddrPort(addr(f, "l"))
	a := wl.AcceptorAt(at)
	client := netip.MustParseAddrPort("127.0.0.1:5")
	// where is what becomes of a stream of which there is as much as each of the
	// steps says, one after the other, and then all, and then no more.
	where := func(b []byte, steps []int) (tcprelay.Decision, tcprelay.Dialer) {
		o := &tcprelay.Opening{FD: -1, Client: client, Local: at}
		d := a.Accept(o)
		for _, n := range append(steps, len(b)) {
			if d == tcprelay.Peek && n > 0 {
				d = o.Looker.Look(o, bytes.Clone(b[:n]), false)
			}
		}
		if d == tcprelay.Peek {
			d = o.Looker.Look(o, bytes.Clone(b), true)
		}
		if d == tcprelay.Forward {
			o.Dialer.GaveUp(&relay.Info{Client: client}, relay.ClientClose)
		}
		return d, o.Dialer
	}
	reached := make(map[tcprelay.Dialer]bool)
	seed := func(b []byte, cuts ...byte) {
		f.Add(b, cuts)
		_, to := where(b, nil)
		reached[to] = true
	}
	for _, c := range firstpackets.All(f) {
		if !c.UDP() {
			seed(bytes.Join(c.Data(f), nil), 0, 3, 20)
		}
	}
	for _, s := range []string{"", "hello", "hello!", "hello?", "he", "\x16\x03\x01\x00\x80\x01\x00\x00\x7c\x03\x03", "\x00\x0e\x38", "\x00\x0e\x38\x01\x02\x03\x04\x05\x06\x07\x08\x00\x00\x00\x00\x00", handshake} {
		seed([]byte(s), 0, 0, 1)
	}
	if n := len(reached); n < 6 {
		f.Fatalf("the seeds reach %d routes only", n)
	}
	f.Fuzz(func(t *testing.T, b, cuts []byte) {
		if len(b) >= 4096 {
			return // more than is looked at
		}
		d, to := where(b, nil)
		var bytewise, cut []int
		for i := range b {
			bytewise = append(bytewise, i)
		}
		n := 0
		for _, c := range cuts {
			if n += 1 + int(c); n < len(b) {
				cut = append(cut, n)
			}
		}
		for name, steps := range map[string][]int{"byte by byte": bytewise, "cut": cut} {
			if d2, to2 := where(b, steps); d2 != d || to2 != to {
				t.Errorf("%q at once: %v %p; %s %v: %v %p", b, d, to, name, steps, d2, to2)
			}
		}
	})
}
