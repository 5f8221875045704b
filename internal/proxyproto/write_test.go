package proxyproto

import (
	"bufio"
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"

	proxyproto "github.com/pires/go-proxyproto"
)

func ap(s string) netip.AddrPort {
	if s == "" {
		return netip.AddrPort{}
	}
	return netip.MustParseAddrPort(s)
}

func TestAppend(t *testing.T) {
	const v2 = "\r\n\r\n\x00\r\nQUIT\n"
	for name, tc := range map[string]struct {
		f             Form
		client, local string
		id, host      string
		want          string
	}{
		"none":            {f: Form{}, client: "192.0.2.1:1", local: "192.0.2.2:2"},
		"v1, IPv4":        {f: Form{Version: V1}, client: "192.0.2.1:4242", local: "198.51.100.2:25565", want: "PROXY TCP4 192.0.2.1 198.51.100.2 4242 25565\r\n"},
		"v1, IPv6":        {f: Form{Version: V1}, client: "[2001:db8::1]:1", local: "[2001:db8::2]:65535", want: "PROXY TCP6 2001:db8::1 2001:db8::2 1 65535\r\n"},
		"v1, mapped":      {f: Form{Version: V1}, client: "[::ffff:192.0.2.1]:1", local: "192.0.2.2:2", want: "PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n"},
		"v1, mixed":       {f: Form{Version: V1}, client: "192.0.2.1:1", local: "[2001:db8::2]:2", want: "PROXY TCP6 ::ffff:192.0.2.1 2001:db8::2 1 2\r\n"},
		"v1, no client":   {f: Form{Version: V1}, local: "192.0.2.2:2", want: "PROXY UNKNOWN\r\n"},
		"v1, no local":    {f: Form{Version: V1}, client: "192.0.2.1:1", want: "PROXY TCP4 192.0.2.1 0.0.0.0 1 0\r\n"},
		"v2, IPv4":        {f: Form{Version: V2}, client: "192.0.2.1:258", local: "192.0.2.2:2", want: v2 + "\x21\x11\x00\x0c\xc0\x00\x02\x01\xc0\x00\x02\x02\x01\x02\x00\x02"},
		"v2-udp, IPv4":    {f: Form{Version: V2UDP}, client: "192.0.2.1:258", local: "192.0.2.2:2", want: v2 + "\x21\x12\x00\x0c\xc0\x00\x02\x01\xc0\x00\x02\x02\x01\x02\x00\x02"},
		"v2, no client":   {f: Form{Version: V2}, local: "192.0.2.2:2", want: v2 + "\x20\x00\x00\x00"},
		"v2, fields":      {f: Form{Version: V2, Authority: true, UniqueID: true}, client: "1.2.3.4:5", local: "6.7.8.9:10", id: "t-1", host: "a.b", want: v2 + "\x21\x11\x00\x18\x01\x02\x03\x04\x06\x07\x08\x09\x00\x05\x00\x0a\x02\x00\x03a.b\x05\x00\x03t-1"},
		"v2, no host":     {f: Form{Version: V2, Authority: true}, client: "1.2.3.4:5", local: "6.7.8.9:10", want: v2 + "\x21\x11\x00\x0c\x01\x02\x03\x04\x06\x07\x08\x09\x00\x05\x00\x0a"},
		"v2, no fields":   {f: Form{Version: V2}, client: "1.2.3.4:5", local: "6.7.8.9:10", id: "t-1", host: "a.b", want: v2 + "\x21\x11\x00\x0c\x01\x02\x03\x04\x06\x07\x08\x09\x00\x05\x00\x0a"},
		"spp, IPv4":       {f: Form{Version: SPP}, client: "192.0.2.1:258", local: "192.0.2.2:2", want: "\x56\xec\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xc0\x00\x02\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\xc0\x00\x02\x02\x01\x02\x00\x02"},
		"spp, no address": {f: Form{Version: SPP}, want: "\x56\xec" + string(make([]byte, 36))},
	} {
		t.Run(name, func(t *testing.T) {
			got := tc.f.Append([]byte("x"), &Flow{Client: ap(tc.client), Local: ap(tc.local), ID: []byte(tc.id), Host: []byte(tc.host)})
			if string(got) != "x"+tc.want {
				t.Errorf("got  %q\nwant %q", got[1:], tc.want)
			}
		})
	}
}

func TestAppendDoesNotAllocate(t *testing.T) {
	buf := make([]byte, 0, MostWritten)
	w := &Flow{Client: ap("[2001:db8::1]:1"), Local: ap("192.0.2.1:2"), ID: []byte("u-1234567890abcdef"), Host: bytes.Repeat([]byte("h"), maxHost), Trace: bytes.Repeat([]byte("t"), maxTrace)}
	for _, f := range []Form{{Version: V1}, {Version: V2, Authority: true, UniqueID: true, Trace: true, CRC: true}, {Version: V2UDP, CRC: true}, {Version: SPP}} {
		if n := testing.AllocsPerRun(100, func() { f.Append(buf, w) }); n != 0 {
			t.Errorf("%v: %v allocations", f.Version, n)
		}
		if n := len(f.Append(nil, w)); n > MostWritten {
			t.Errorf("%v: %d bytes are more than %d", f.Version, n, MostWritten)
		}
	}
}

func randomAddr(r *rand.Rand) netip.AddrPort {
	var raw [16]byte
	for i := range raw {
		raw[i] = byte(r.Uint32())
	}
	a := netip.AddrFrom16(raw)
	switch r.IntN(4) {
	case 0:
		a = netip.AddrFrom4([4]byte(raw[:]))
	case 1:
		a = netip.AddrFrom16(netip.AddrFrom4([4]byte(raw[:])).As16()) // IPv4 mapped
	}
	return netip.AddrPortFrom(a, uint16(r.Uint32()))
}

// readBack has the reference read what was written of a flow.
func readBack(f *Form, w *Flow) error {
	head := f.Append(nil, w)
	const payload = "PROXY TCP4 6.6.6.6 6.6.6.6 6 6\r\n" // of a client that forges one
	in := bufio.NewReader(bytes.NewReader(append(head, payload...)))
	h, err := proxyproto.Read(in)
	if err != nil {
		return fmt.Errorf("%q: %w", head, err)
	}
	if rest, _ := in.Peek(in.Buffered()); string(rest) != payload {
		return fmt.Errorf("%q is left behind %q", rest, head)
	}
	var from, to net.Addr
	if f.Version == V2UDP {
		src, dst, ok := h.UDPAddrs()
		if !ok {
			return fmt.Errorf("%v are no UDP addresses", h)
		}
		from, to = src, dst
	} else {
		src, dst, ok := h.TCPAddrs()
		if !ok {
			return fmt.Errorf("%v are no TCP addresses", h)
		}
		from, to = src, dst
	}
	if got := netip.MustParseAddrPort(from.String()); same(got) != same(w.Client) {
		return fmt.Errorf("client %v, want %v", got, w.Client)
	}
	if got := netip.MustParseAddrPort(to.String()); same(got) != same(w.Local) {
		return fmt.Errorf("destination %v, want %v", got, w.Local)
	}
	if is4 := w.Client.Addr().Unmap().Is4() && w.Local.Addr().Unmap().Is4(); is4 != h.TransportProtocol.IsIPv4() {
		return fmt.Errorf("the family is %v for %v and %v", h.TransportProtocol, w.Client, w.Local)
	}
	if f.Version == V1 {
		return nil
	}
	fields, err := h.TLVs()
	if err != nil {
		return err
	}
	var host, id string
	crc := false
	for _, v := range fields {
		switch v.Type {
		case proxyproto.PP2_TYPE_AUTHORITY:
			host = string(v.Value)
		case proxyproto.PP2_TYPE_UNIQUE_ID:
			id = string(v.Value)
		case proxyproto.PP2_TYPE_CRC32C:
			crc = true
		default:
			return fmt.Errorf("a field of type %v", v.Type)
		}
	}
	wantHost, wantID := "", ""
	if f.Authority && len(w.Host) <= maxHost {
		wantHost = string(w.Host)
	}
	if f.UniqueID && len(w.ID) <= maxID {
		wantID = string(w.ID)
	}
	if host != wantHost || id != wantID || crc != f.CRC {
		return fmt.Errorf("host %q, ID %q, checksum %v, want %q, %q, %v", host, id, crc, wantHost, wantID, f.CRC)
	}
	return nil
}

func same(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// What is written is read back, by the reference and by Read.
func FuzzWrite(f *testing.F) {
	for _, seed := range []uint64{0, 1, 2, 3, 42} {
		f.Add(seed, []byte("play.example.com"), []byte("t-2a"))
	}
	f.Add(uint64(7), bytes.Repeat([]byte("h"), 256), bytes.Repeat([]byte("i"), 129))
	f.Fuzz(func(t *testing.T, seed uint64, host, id []byte) {
		r := rand.New(rand.NewPCG(seed, 1))
		w := &Flow{Client: randomAddr(r), Local: randomAddr(r), Host: host, ID: id}
		for _, v := range []Version{V1, V2, V2UDP, SPP} {
			form := Form{Version: v, Authority: r.IntN(2) == 0, UniqueID: r.IntN(2) == 0, CRC: r.IntN(2) == 0}
			head := form.Append(nil, w)
			read := ReadStream
			if v.UDP() {
				read = ReadDatagram
			}
			h, n, err := read(append(head, "payload"...))
			if err != nil || n != len(head) || h.Client != same(w.Client) || h.Dest != same(w.Local) || h.Own || h.SPP != (v == SPP) {
				t.Errorf("%v of %v: %+v, %d of %d, %v", v, w, h, n, len(head), err)
			}
			if v == SPP { // the reference knows nothing of it
				continue
			}
			if err := readBack(&form, w); err != nil {
				t.Errorf("%+v of %v → %v: %v", form, w.Client, w.Local, err)
			}
		}
	})
}
