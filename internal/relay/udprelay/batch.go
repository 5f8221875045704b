package udprelay

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

const (
	batch    = 32             // datagrams a system call takes in
	bufSize  = 64 << 10       // more than the largest datagram, and than what GRO puts together
	stride   = bufSize + 3*64 // buffers a multiple of 4 KiB apart would meet in the same cache sets
	maxMsgs  = 64             // messages a system call sends
	maxIovs  = 256            // buffers they consist of
	maxSegs  = 64             // datagrams of one message (UDP_MAX_SEGMENTS)
	maxBytes = 65535 - 20 - 8 // and their bytes

	replyBufs = 64 // for datagrams of backends in one turn
)

// receiver takes datagrams in, each into a buffer of its own.
type receiver struct {
	bufs  []byte
	hdrs  []mmsghdr
	iovs  []unix.Iovec
	names []unix.RawSockaddrInet6 // nil when the socket is connected
	ctls  []control
}

func newReceiver(n int, names bool) *receiver {
	r := &receiver{
		bufs: make([]byte, n*stride), // the kernel gives pages as they are used
		hdrs: make([]mmsghdr, n),
		iovs: make([]unix.Iovec, n),
		ctls: make([]control, n),
	}
	if names {
		r.names = make([]unix.RawSockaddrInet6, n)
	}
	for i := range n {
		r.iovs[i].Base = &r.bufs[i*stride]
		r.iovs[i].SetLen(bufSize)
		h := &r.hdrs[i].hdr
		h.Iov = &r.iovs[i]
		h.SetIovlen(1)
		h.Control = (*byte)(unsafe.Pointer(&r.ctls[i]))
		if names {
			h.Name = (*byte)(unsafe.Pointer(&r.names[i]))
		}
	}
	r.reset(0, n)
	return r
}

// reset makes buffers ready again whose lengths the kernel has overwritten.
func (r *receiver) reset(from, to int) {
	for i := from; i < to; i++ {
		h := &r.hdrs[i].hdr
		h.SetControllen(int(unsafe.Sizeof(control{})))
		if r.names != nil {
			h.Namelen = unix.SizeofSockaddrInet6
		}
	}
}

// recv takes up to n datagrams into the buffers from the given one on, which
// must be reset. Fewer than n mean that the socket is empty.
func (r *receiver) recv(fd, from, n int) (int, unix.Errno) {
	return recvmmsg(fd, &r.hdrs[from], n)
}

// burst reports whether the last two of n datagrams are of one client. More of
// them are likely to come while these are looked at, and go out by the same
// call if they are taken in first.
func (r *receiver) burst(n int) bool { return n > 1 && r.names[n-1] == r.names[n-2] }

// data is what buffer i holds: the bytes, the size of the datagrams they are
// (0: one), and whether the kernel has cut it.
func (r *receiver) data(i int) (p []byte, seg int, cut bool) {
	m := &r.hdrs[i]
	p = r.bufs[i*stride : i*stride+int(m.n)]
	if m.hdr.Controllen > 0 {
		seg = segment(&r.ctls[i], int(m.hdr.Controllen))
		if seg >= len(p) {
			seg = 0
		}
	}
	return p, seg, m.hdr.Flags&unix.MSG_TRUNC != 0
}

// datagrams is how many of that size a buffer has, 1 for seg 0.
func datagrams(p []byte, seg int) int {
	if seg == 0 || len(p) <= seg {
		return 1
	}
	return (len(p) + seg - 1) / seg
}

// segment looks for the datagram size that UDP_GRO reports.
func segment(c *control, n int) int {
	b := c.bytes()[:n]
	for len(b) >= cmsgHeader {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		l := int(h.Len)
		if l < cmsgHeader || l > len(b) {
			break
		}
		if h.Level == unix.SOL_UDP && h.Type == unix.UDP_GRO && l >= cmsgHeader+2 {
			return int(binary.NativeEndian.Uint16(b[cmsgHeader:]))
		}
		b = b[min(unix.CmsgSpace(l-cmsgHeader), len(b)):]
	}
	return 0
}

// pktinfo looks for the address a datagram was sent to, IPv4 mapped.
func pktinfo(c *control, n int) (local [16]byte, ok bool) {
	b := c.bytes()[:n]
	for len(b) >= cmsgHeader {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		l := int(h.Len)
		if l < cmsgHeader || l > len(b) {
			break
		}
		p := b[cmsgHeader:l]
		switch {
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_PKTINFO && len(p) >= unix.SizeofInet6Pktinfo:
			copy(local[:], p)
			return local, true
		case h.Level == unix.IPPROTO_IP && h.Type == unix.IP_PKTINFO && len(p) >= unix.SizeofInet4Pktinfo:
			local[10], local[11] = 0xff, 0xff
			copy(local[12:], p[8:12]) // ipi_addr, behind the interface and ipi_spec_dst
			return local, true
		}
		b = b[min(unix.CmsgSpace(l-cmsgHeader), len(b)):]
	}
	return local, false
}

// origdst looks for the address and port a datagram was sent to before it was
// redirected: IPv4 mapped, the port in network order.
func origdst(c *control, n int) (local [16]byte, port uint16, ok bool) {
	b := c.bytes()[:n]
	for len(b) >= cmsgHeader {
		h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
		l := int(h.Len)
		if l < cmsgHeader || l > len(b) {
			break
		}
		p := b[cmsgHeader:l]
		switch {
		case h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_ORIGDSTADDR && len(p) >= unix.SizeofSockaddrInet6,
			h.Level == unix.IPPROTO_IP && h.Type == unix.IP_ORIGDSTADDR && len(p) >= unix.SizeofSockaddrInet4:
			local, port, _ = fromName((*unix.RawSockaddrInet6)(unsafe.Pointer(&p[0])))
			return local, port, true
		}
		b = b[min(unix.CmsgSpace(l-cmsgHeader), len(b)):]
	}
	return local, 0, false
}

// message is one of a sender's: one datagram, or a run of one session's that
// the kernel takes apart again.
type message struct {
	slot  uint32
	seg   int // size of the datagrams, the last may be shorter
	segs  int
	bytes int
	head  int  // of seg, what stands in front of each: in a buffer of its own, and not counted
	iovs  int  // buffers
	info  int  // length of the control messages without UDP_SEGMENT
	open  bool // more datagrams may join
}

func (m *message) payload() int { return m.bytes - m.segs*m.head }

// sender collects what goes out by one system call. It refers to the buffers
// given to it until it is emptied.
type sender struct {
	n, iovs int
	meta    [maxMsgs]message
	hdrs    [maxMsgs]mmsghdr
	bufs    [maxIovs]unix.Iovec
	names   [maxMsgs]unix.RawSockaddrInet6
	ctls    [maxMsgs]control
	one     unix.Msghdr // for sending one at a time
	oneBuf  unix.Iovec
}

// join adds datagrams to the last message if that is a run of this session
// they fit. seg is their size, the last may be shorter. limit is the size from
// which on the kernel cannot segment, or 0. head goes in front of each, and is
// the same for all of a run.
func (o *sender) join(slot uint32, head, p []byte, seg int, limit uint16) bool {
	if o.n == 0 {
		return false
	}
	m := &o.meta[o.n-1]
	full := m.seg - m.head // of a datagram without its head
	if !m.open || m.slot != slot || m.head != len(head) || len(p) == 0 || seg > full || (seg < full && seg != len(p)) ||
		(limit != 0 && m.seg >= int(limit)) {
		return false
	}
	segs := datagrams(p, seg)
	if m.segs+segs > maxSegs || m.bytes+len(p)+segs*len(head) > maxBytes || !o.room(segs, head) {
		return false
	}
	m.iovs += o.buffers(head, p, seg)
	m.segs += segs
	m.bytes += len(p) + segs*len(head)
	m.open = len(p)%full == 0
	return true
}

// room reports whether there are buffers for that many datagrams.
func (o *sender) room(segs int, head []byte) bool {
	if len(head) > 0 {
		return o.iovs+2*segs <= maxIovs
	}
	return o.iovs < maxIovs
}

// buffers adds those of datagrams and returns how many that are.
func (o *sender) buffers(head, p []byte, seg int) int {
	if len(head) == 0 {
		o.buffer(p)
		return 1
	}
	for from := o.iovs; ; {
		n := min(seg, len(p))
		o.buffer(head)
		o.buffer(p[:n])
		if p = p[n:]; len(p) == 0 {
			return o.iovs - from
		}
	}
}

// add starts a message; without room it reports false. With gso, datagrams
// of the same size may join.
func (o *sender) add(slot uint32, head, p []byte, seg int, gso bool) bool {
	segs := datagrams(p, seg)
	if o.n == maxMsgs || !o.room(segs, head) {
		return false
	}
	h := &o.hdrs[o.n].hdr
	h.Iov = &o.bufs[o.iovs]
	iovs := o.buffers(head, p, seg)
	h.Name, h.Namelen = nil, 0
	h.Control = nil
	h.SetControllen(0)
	o.meta[o.n] = message{
		slot: slot, seg: len(head) + seg, segs: segs, bytes: len(p) + segs*len(head), head: len(head), iovs: iovs,
		open: gso && seg > 0 && len(p)%seg == 0,
	}
	o.n++
	return true
}

func (o *sender) buffer(p []byte) {
	b := &o.bufs[o.iovs]
	b.Base = unsafe.SliceData(p)
	b.SetLen(len(p))
	o.iovs++
}

// seal completes the messages with what is known only now.
func (o *sender) seal() {
	for i := range o.n {
		m, h := &o.meta[i], &o.hdrs[i].hdr
		h.SetIovlen(m.iovs)
		end := m.info
		if m.segs > 1 {
			var seg [2]byte
			binary.NativeEndian.PutUint16(seg[:], uint16(m.seg))
			end = o.ctls[i].put(m.info, unix.SOL_UDP, unix.UDP_SEGMENT, seg[:])
		}
		if end > 0 {
			h.Control = (*byte)(unsafe.Pointer(&o.ctls[i]))
			h.SetControllen(end)
		}
	}
}

// send hands the messages from i on to the kernel and reports how many it
// has taken. errno is about the one after them.
func (o *sender) send(fd, i int) (int, unix.Errno) {
	h := &o.hdrs[i].hdr
	if o.n-i > 1 {
		return sendmmsg(fd, &o.hdrs[i], o.n-i)
	}
	var errno unix.Errno
	if m := &o.meta[i]; m.iovs == 1 && h.Controllen == 0 {
		errno = sendto(fd, h.Iov.Base, int(h.Iov.Len), (*unix.RawSockaddrInet6)(unsafe.Pointer(h.Name)), h.Namelen)
	} else {
		errno = sendmsg(fd, h)
	}
	if errno != 0 {
		return 0, errno
	}
	return 1, 0
}

// singly sends the datagrams of message i one by one. The ones the kernel
// refuses are missing from the result, in which heads do not count; errno is
// why.
func (o *sender) singly(fd, i int) (segs, bytes int, errno unix.Errno) {
	m := &o.meta[i]
	o.one = o.hdrs[i].hdr
	if m.info == 0 {
		o.one.Control = nil
	}
	o.one.SetControllen(m.info)
	bufs := unsafe.Slice(o.hdrs[i].hdr.Iov, m.iovs)
	if m.head > 0 { // a head and a datagram in turn
		o.one.SetIovlen(2)
		for k := 0; k < len(bufs); k += 2 {
			o.one.Iov = &bufs[k]
			if e := sendmsg(fd, &o.one); e != 0 {
				errno = e
			} else {
				segs++
				bytes += int(bufs[k+1].Len)
			}
		}
		return segs, bytes, errno
	}
	o.one.Iov = &o.oneBuf
	o.one.SetIovlen(1)
	for _, b := range bufs {
		p := unsafe.Slice(b.Base, int(b.Len))
		for len(p) > 0 {
			n := min(m.seg, len(p))
			o.oneBuf.Base = &p[0]
			o.oneBuf.SetLen(n)
			if e := sendmsg(fd, &o.one); e != 0 {
				errno = e
			} else {
				segs++
				bytes += n
			}
			p = p[n:]
		}
	}
	return segs, bytes, errno
}

func (o *sender) clear() { o.n, o.iovs = 0, 0 }

// unfit reports errors that mean that a run cannot be segmented by the kernel,
// though its datagrams may well be sent.
func unfit(errno unix.Errno) bool {
	return errno == unix.EMSGSIZE || errno == unix.EINVAL || errno == unix.EIO || errno == unix.EOPNOTSUPP
}

// shortage reports errors of our own side, which say nothing about a backend:
// descriptors, ports, memory or buffers that are used up, a packet filter, a
// datagram larger than the path takes.
func shortage(errno unix.Errno) bool {
	switch errno {
	case unix.EPERM, unix.EMSGSIZE, unix.EINTR:
		return true
	}
	return relay.ConnectFailure(errno) == relay.Shortage
}
