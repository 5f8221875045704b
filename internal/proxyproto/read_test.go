package proxyproto

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"

	proxyproto "github.com/pires/go-proxyproto"
)

// v2 is a header of version 2 with whatever is in it.
func v2(cmd, family byte, rest string) string {
	return signature + string([]byte{cmd, family}) + string(binary.BigEndian.AppendUint16(nil, uint16(len(rest)))) + rest
}

const (
	four = "\x01\x02\x03\x04\x06\x07\x08\x09\x00\x05\x00\x0a"
	six  = "\x20\x01\x0d\xb8\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01" + "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x06\x07\x08\x09" + "\x00\x05\x00\x0a"
)

func withCRC(right bool) string {
	f := Form{Version: V2, CRC: true}
	b := f.Append(nil, &Flow{Client: netip.MustParseAddrPort("1.2.3.4:5"), Local: netip.MustParseAddrPort("6.7.8.9:10")})
	if !right {
		b[len(b)-1]++
	}
	return string(b)
}

func TestRead(t *testing.T) {
	unix := v2(cmdProxy, 0x31, strings.Repeat("\x00", 216))
	for name, tc := range map[string]struct {
		in           string
		udp          bool
		client, dest string
		own, spp     bool
		want         error // nil: all of in is the header
	}{
		"v1, IPv4":                 {in: "PROXY TCP4 1.2.3.4 6.7.8.9 5 10\r\n", client: "1.2.3.4:5", dest: "6.7.8.9:10"},
		"v1, IPv6":                 {in: "PROXY TCP6 2001:db8::1 ::ffff:6.7.8.9 5 10\r\n", client: "[2001:db8::1]:5", dest: "6.7.8.9:10"},
		"v1, unknown":              {in: "PROXY UNKNOWN\r\n"},
		"v1, unknown with more":    {in: "PROXY UNKNOWN ffff:: ffff:: 65535 65535\r\n"},
		"v1, the longest":          {in: "PROXY UNKNOWN " + strings.Repeat("x", 107-16) + "\r\n"},
		"v1, too long":             {in: "PROXY UNKNOWN " + strings.Repeat("x", 107-15) + "\r\n", want: errLong},
		"v1, cut":                  {in: "PROXY TCP4 1.2.3.4 6.7.8.9 5 10\r", want: ErrShort},
		"v1, no CR":                {in: "PROXY TCP4 1.2.3.4 6.7.8.9 5 10\n", want: errLine},
		"v1, port with zero":       {in: "PROXY TCP4 1.2.3.4 6.7.8.9 05 10\r\n", want: errLine},
		"v1, port too high":        {in: "PROXY TCP4 1.2.3.4 6.7.8.9 5 65536\r\n", want: errLine},
		"v1, no port":              {in: "PROXY TCP4 1.2.3.4 6.7.8.9 5\r\n", want: errLine},
		"v1, one word more":        {in: "PROXY TCP4 1.2.3.4 6.7.8.9 5 10 1\r\n", want: errLine},
		"v1, two spaces":           {in: "PROXY  TCP4 1.2.3.4 6.7.8.9 5 10\r\n", want: errLine},
		"v1, the other family":     {in: "PROXY TCP4 ::1 ::1 5 10\r\n", want: errLine},
		"v1, IPv4 as IPv6":         {in: "PROXY TCP6 1.2.3.4 6.7.8.9 5 10\r\n", want: errLine},
		"v1, zone":                 {in: "PROXY TCP6 fe80::1%1 ::1 5 10\r\n", want: errLine},
		"v1, another protocol":     {in: "PROXY UDP4 1.2.3.4 6.7.8.9 5 10\r\n", want: errLine},
		"v1 is not for datagrams":  {in: "PROXY TCP4 1.2.3.4 6.7.8.9 5 10\r\n", udp: true, want: ErrNone},
		"v2, IPv4":                 {in: v2(cmdProxy, stream4, four), client: "1.2.3.4:5", dest: "6.7.8.9:10"},
		"v2, IPv6":                 {in: v2(cmdProxy, stream6, six), client: "[2001:db8::1]:5", dest: "6.7.8.9:10"},
		"v2, datagram":             {in: v2(cmdProxy, dgram6, six), udp: true, client: "[2001:db8::1]:5", dest: "6.7.8.9:10"},
		"v2, datagram of a stream": {in: v2(cmdProxy, stream4, four), udp: true, want: errFamily},
		"v2, stream of a datagram": {in: v2(cmdProxy, dgram4, four), want: errFamily},
		"v2, LOCAL":                {in: v2(cmdLocal, unspec, ""), own: true},
		"v2, LOCAL with addresses": {in: v2(cmdLocal, stream4, four), own: true},
		"v2, LOCAL, odd length":    {in: v2(cmdLocal, stream4, "xyz"), own: true},
		"v2, UNSPEC":               {in: v2(cmdProxy, unspec, "")},
		"v2, UNSPEC with a field":  {in: v2(cmdProxy, unspec, "\x04\x00\x01x")},
		"v2, unix":                 {in: unix, want: errFamily},
		"v2, unknown family":       {in: v2(cmdProxy, 0x41, strings.Repeat("\x00", 36)), want: errFamily},
		"v2, unknown protocol":     {in: v2(cmdProxy, 0x13, four), want: errFamily},
		"v2, unknown command":      {in: v2(0x22, stream4, four), want: errVersion},
		"v2, version 3":            {in: v2(0x31, stream4, four), want: errVersion},
		"v2, too short for IPv4":   {in: v2(cmdProxy, stream4, four[1:]), want: errLength},
		"v2, too short for IPv6":   {in: v2(cmdProxy, stream6, four), want: errLength},
		"v2, the longest":          {in: v2(cmdProxy, stream4, four+"\x04\x01\xf9"+strings.Repeat("x", 505)), client: "1.2.3.4:5", dest: "6.7.8.9:10"},
		"v2, too long":             {in: v2(cmdProxy, stream4, four+"\x04\x01\xfa"+strings.Repeat("x", 506)), want: errLong},
		"v2, LOCAL too long":       {in: v2(cmdLocal, unspec, strings.Repeat("x", 521)), want: errLong},
		"v2, a field overruns":     {in: v2(cmdProxy, stream4, four+"\x04\x00\x02x"), want: errField},
		"v2, half a field":         {in: v2(cmdProxy, stream4, four+"\x04\x00"), want: errField},
		"v2, checksum":             {in: withCRC(true), client: "1.2.3.4:5", dest: "6.7.8.9:10"},
		"v2, wrong checksum":       {in: withCRC(false), want: errCRC},
		"v2, long checksum":        {in: v2(cmdProxy, stream4, four+"\x03\x00\x05abcde"), want: errCRC},
		"v2, cut":                  {in: v2(cmdProxy, stream4, four)[:27], want: ErrShort},
		"v2, cut in a datagram":    {in: v2(cmdProxy, dgram4, four)[:27], udp: true, want: errLength},
		"v2, length and no more":   {in: v2(cmdProxy, stream4, four)[:16], want: ErrShort},
		"the signature, cut":       {in: signature[:5], want: ErrShort},
		"its datagram":             {in: signature[:11], udp: true, want: ErrNone},
		"nothing":                  {want: ErrShort},
		"an empty datagram":        {udp: true, want: ErrNone},
		"a P":                      {in: "P", want: ErrShort},
		"something else":           {in: "hello", want: ErrNone},
		"PROXYjunk":                {in: "PROXYjunk TCP4 1.2.3.4 6.7.8.9 5 10\r\n", want: ErrNone},
		"spp":                      {in: "\x56\xec" + six[:32] + "\x00\x05\x00\x0a", udp: true, spp: true, client: "[2001:db8::1]:5", dest: "6.7.8.9:10"},
		"spp, cut":                 {in: "\x56\xec" + six[:32] + "\x00\x05\x00", udp: true, want: errLength},
		"spp is not for streams":   {in: "\x56\xec" + six, want: ErrNone},
	} {
		t.Run(name, func(t *testing.T) {
			read := ReadStream
			if tc.udp {
				read = ReadDatagram
			}
			h, n, err := read([]byte(tc.in))
			if !errors.Is(err, tc.want) {
				t.Fatalf("%v, want %v", err, tc.want)
			}
			if err != nil {
				return
			}
			if want := (Header{Client: ap(tc.client), Dest: ap(tc.dest), Own: tc.own, SPP: tc.spp}); h != want || n != len(tc.in) {
				t.Errorf("%+v, %d bytes, want %+v, %d", h, n, want, len(tc.in))
			}
			// What follows is no part of it, and what is cut off of a stream is missed.
			if _, again, err := read([]byte(tc.in + tc.in)); again != n || err != nil {
				t.Errorf("with more behind it: %d, %v", again, err)
			}
			for i := range tc.in {
				if _, _, err := read([]byte(tc.in[:i])); !tc.udp && err != ErrShort || tc.udp && err == nil {
					t.Fatalf("the first %d bytes: %v", i, err)
				}
			}
		})
	}
}

func TestReadDatagramDoesNotAllocate(t *testing.T) {
	for _, s := range []string{v2(cmdProxy, dgram6, six), "\x56\xec" + six, "hello", withCRC(true)} {
		p := []byte(s)
		if n := testing.AllocsPerRun(100, func() { ReadDatagram(p) }); n != 0 {
			t.Errorf("%q: %v allocations", s, n)
		}
	}
}

// Whatever comes, it is read within bounds, the same however much there is of
// it, and what the reference makes of it.
func FuzzRead(f *testing.F) {
	for _, s := range []string{
		"PROXY TCP4 1.2.3.4 6.7.8.9 5 10\r\n", "PROXY UNKNOWN\r\n", v2(cmdProxy, stream4, four), v2(cmdProxy, stream6, six), v2(cmdLocal, unspec, ""),
		v2(cmdProxy, dgram4, four), v2(cmdProxy, stream4, four+"\x04\x00\x02x"), withCRC(true), withCRC(false), "\x56\xec" + six, "",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, n, err := ReadDatagram(b); n < 0 || n > len(b) || n > MaxV2 || (err == nil) != (n > 0) || h.SPP && n != LenSPP {
			t.Fatalf("a datagram: %+v, %d of %d bytes, %v", h, n, len(b), err)
		}
		h, n, err := ReadStream(b)
		if n < 0 || n > len(b) || n > MaxV2 || err == nil && n == 0 {
			t.Fatalf("%d of %d bytes, %v", n, len(b), err)
		}
		if err != nil {
			return
		}
		if len(b) > n {
			if again, m, err := ReadStream(b[:n]); again != h || m != n || err != nil {
				t.Errorf("without what is behind it: %+v, %d, %v", again, m, err)
			}
		}
		if !h.Client.IsValid() { // the reference takes fewer of these
			return
		}
		ref, err := proxyproto.Read(bufio.NewReader(bytes.NewReader(b[:n])))
		if err != nil {
			t.Fatalf("the reference: %v", err)
		}
		src, dst, ok := ref.TCPAddrs()
		if !ok || same(src.AddrPort()) != h.Client || same(dst.AddrPort()) != h.Dest {
			t.Errorf("the reference says %v and %v, not %v and %v", src, dst, h.Client, h.Dest)
		}
	})
}
