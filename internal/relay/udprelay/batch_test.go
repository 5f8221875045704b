package udprelay

import (
	"bytes"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// FuzzSender: whatever is joined into messages, they are taken apart into the
// same datagrams again, in order, and keep to the kernel's limits.
func FuzzSender(f *testing.F) {
	f.Add([]byte{10, 10, 10, 3, 10, 0, 0, 200, 200, 199, 201}, uint16(0), uint8(0))
	f.Add(bytes.Repeat([]byte{50}, 200), uint16(40), uint8(0))
	f.Add(bytes.Repeat([]byte{255}, 100), uint16(0), uint8(0))
	f.Add([]byte{10, 10, 10, 3, 10, 0, 0, 200, 200, 199, 201}, uint16(0), uint8(28))
	f.Add(bytes.Repeat([]byte{50}, 200), uint16(0), uint8(53))
	f.Fuzz(func(t *testing.T, sizes []byte, limit uint16, heads uint8) {
		o := new(sender)
		var want [][]byte
		scale := 1
		if len(sizes) > 0 {
			scale = 1 + int(sizes[0])%32
		}
		for i, n := range sizes {
			p := bytes.Repeat([]byte{byte(i)}, int(n)*scale)
			var head []byte
			if heads > 0 && int(heads)%7 != i { // one of them may do without
				head = bytes.Repeat([]byte{'h'}, int(heads))
			}
			gso := limit == 0 || len(head)+len(p) < int(limit)
			if !(gso && o.join(1, head, p, len(p), limit)) && !o.add(1, head, p, len(p), gso) {
				break
			}
			want = append(want, append(head, p...))
		}
		o.seal()
		var got [][]byte
		for i := range o.n {
			m, h := &o.meta[i], &o.hdrs[i].hdr
			var all []byte
			for _, b := range unsafe.Slice(h.Iov, h.Iovlen) {
				all = append(all, unsafe.Slice(b.Base, b.Len)...)
			}
			seg := 0
			if h.Controllen > 0 {
				seg = segmentSize(&o.ctls[i])
			}
			if len(all) != m.bytes || m.segs > maxSegs || (m.segs > 1) != (seg > 0) || (m.segs > 1 && (m.bytes > maxBytes || (limit > 0 && seg >= int(limit)))) {
				t.Fatalf("message %+v of %d bytes, segment %d", *m, len(all), seg)
			}
			if seg == 0 {
				got = append(got, all)
				continue
			}
			n := 0
			for len(all) > 0 {
				k := min(seg, len(all))
				got = append(got, all[:k])
				all = all[k:]
				n++
			}
			if n != m.segs {
				t.Fatalf("message %+v has %d datagrams", *m, n)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%d datagrams came of %d", len(got), len(want))
		}
		for i := range got {
			if !bytes.Equal(got[i], want[i]) {
				t.Fatalf("datagram %d differs", i)
			}
		}
	})
}

func segmentSize(c *control) int {
	h := (*unix.Cmsghdr)(unsafe.Pointer(c))
	if h.Level != unix.SOL_UDP || h.Type != unix.UDP_SEGMENT {
		return -1
	}
	return int(*(*uint16)(unsafe.Pointer(&c.bytes()[cmsgHeader])))
}

// FuzzControl: control messages of any content are read without a panic.
func FuzzControl(f *testing.F) {
	var c control
	n := c.put(0, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, make([]byte, unix.SizeofInet6Pktinfo))
	n = c.put(n, unix.SOL_UDP, unix.UDP_GRO, []byte{200, 0, 0, 0})
	f.Add(bytes.Clone(c.bytes()[:n]))
	n = c.put(0, unix.IPPROTO_IPV6, unix.IPV6_ORIGDSTADDR, make([]byte, unix.SizeofSockaddrInet6))
	f.Add(bytes.Clone(c.bytes()[:n]))
	n = c.put(0, unix.IPPROTO_IP, unix.IP_ORIGDSTADDR, append([]byte{unix.AF_INET, 0, 1, 2}, make([]byte, 12)...))
	f.Add(bytes.Clone(c.bytes()[:n]))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c control
		n := copy(c.bytes(), b)
		segment(&c, n)
		pktinfo(&c, n)
		if a, port, ok := origdst(&c, n); !ok && (port != 0 || a != [16]byte{}) {
			t.Errorf("%v and port %d of no address", a, port)
		}
	})
}

func TestControl(t *testing.T) {
	var c control
	n := c.put(0, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, append(bytes.Repeat([]byte{7}, 16), 0, 0, 0, 1))
	n = c.put(n, unix.SOL_UDP, unix.UDP_GRO, []byte{200, 0, 0, 0})
	if n > int(unsafe.Sizeof(c)) {
		t.Fatalf("control messages take %d bytes", n)
	}
	if seg := segment(&c, n); seg != 200 {
		t.Errorf("segment %d, want 200", seg)
	}
	if a, ok := pktinfo(&c, n); !ok || a[0] != 7 || a[15] != 7 {
		t.Errorf("pktinfo %v, %v", a, ok)
	}
	if a, _, ok := origdst(&c, n); ok {
		t.Errorf("the address before a redirection is %v where none is told", a)
	}
	for name, tc := range map[string]struct {
		level, typ int32
		raw        []byte
		want       string
	}{
		"IPv4":        {unix.IPPROTO_IP, unix.IP_ORIGDSTADDR, append([]byte{unix.AF_INET, 0, 0x1e, 0x61, 192, 0, 2, 1}, make([]byte, 8)...), "192.0.2.1:7777"},
		"IPv6":        {unix.IPPROTO_IPV6, unix.IPV6_ORIGDSTADDR, append(append([]byte{unix.AF_INET6, 0, 0x1e, 0x61, 0, 0, 0, 0}, bytes.Repeat([]byte{0x20}, 16)...), 0, 0, 0, 0), "[2020:2020:2020:2020:2020:2020:2020:2020]:7777"},
		"cut off":     {unix.IPPROTO_IPV6, unix.IPV6_ORIGDSTADDR, make([]byte, unix.SizeofSockaddrInet6-1), ""},
		"IPv4 of one": {unix.IPPROTO_IP, unix.IP_ORIGDSTADDR, make([]byte, unix.SizeofSockaddrInet4-1), ""},
	} {
		var c control
		n := c.put(0, unix.SOL_UDP, unix.UDP_GRO, []byte{200, 0, 0, 0})
		n = c.put(n, tc.level, tc.typ, tc.raw)
		got := ""
		if a, port, ok := origdst(&c, n); ok {
			got = addrPort(a, port).String()
		}
		if got != tc.want {
			t.Errorf("%s: the address before a redirection is %q, want %q", name, got, tc.want)
		}
	}
}
