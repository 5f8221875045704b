// Package mmsg sends and receives batches of IPv4 datagrams with sendmmsg and
// recvmmsg, each with the local address it is from or to, so that one socket
// can stand for any number of clients.
package mmsg

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Batch is a number of datagrams and the headers the kernel wants for them.
// One goroutine uses it at a time.
type Batch struct {
	hdrs  []header
	iovs  []unix.Iovec
	names []unix.RawSockaddrInet4
	ctls  []control
	bufs  [][]byte
}

// header is struct mmsghdr.
type header struct {
	hdr unix.Msghdr
	n   uint32
	_   [4]byte
}

// control holds one IP_PKTINFO message.
type control struct {
	hdr  unix.Cmsghdr
	info unix.Inet4Pktinfo
	_    [4]byte
}

const infoLen = unix.SizeofCmsghdr + unix.SizeofInet4Pktinfo

// New makes a batch of n datagrams of at most size bytes.
func New(n, size int) *Batch {
	b := &Batch{
		hdrs: make([]header, n), iovs: make([]unix.Iovec, n), names: make([]unix.RawSockaddrInet4, n),
		ctls: make([]control, n), bufs: make([][]byte, n),
	}
	for i := range n {
		b.bufs[i] = make([]byte, size)
		b.iovs[i].Base = &b.bufs[i][0]
		h := &b.hdrs[i].hdr
		h.Name = (*byte)(unsafe.Pointer(&b.names[i]))
		h.Namelen = unix.SizeofSockaddrInet4
		h.Iov = &b.iovs[i]
		h.SetIovlen(1)
	}
	return b
}

// Cap is how many datagrams fit.
func (b *Batch) Cap() int { return len(b.hdrs) }

// Data is datagram i as received. It is the batch's and ends with the next Recv.
func (b *Batch) Data(i int) []byte { return b.bufs[i][:b.hdrs[i].n] }

// Buf is the room for datagram i.
func (b *Batch) Buf(i int) []byte { return b.bufs[i] }

// Local is the address of ours that datagram i was sent to, where the socket
// has IP_PKTINFO on.
func (b *Batch) Local(i int) netip.Addr {
	c := &b.ctls[i]
	if b.hdrs[i].hdr.Controllen < infoLen || c.hdr.Level != unix.IPPROTO_IP || c.hdr.Type != unix.IP_PKTINFO {
		return netip.Addr{}
	}
	return netip.AddrFrom4(c.info.Addr)
}

// Set makes datagram i one of n bytes from local to remote. An invalid local
// leaves the choice to the kernel.
func (b *Batch) Set(i, n int, local netip.Addr, remote netip.AddrPort) {
	b.iovs[i].SetLen(n)
	b.names[i] = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: remote.Addr().As4()}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&b.names[i].Port))[:], remote.Port())
	h := &b.hdrs[i].hdr
	h.Control, h.Controllen = nil, 0
	if local.IsValid() {
		c := &b.ctls[i]
		*c = control{info: unix.Inet4Pktinfo{Spec_dst: local.As4()}}
		c.hdr.Level, c.hdr.Type = unix.IPPROTO_IP, unix.IP_PKTINFO
		c.hdr.SetLen(infoLen)
		h.Control = (*byte)(unsafe.Pointer(c))
		h.SetControllen(int(unsafe.Sizeof(*c)))
	}
}

// Echo makes datagrams 0 to n-1, as received, the answers to themselves.
func (b *Batch) Echo(n int) {
	for i := range n {
		b.iovs[i].SetLen(int(b.hdrs[i].n))
		b.hdrs[i].hdr.Control, b.hdrs[i].hdr.Controllen = nil, 0
	}
}

// Recv receives what is there, up to the batch's size, without waiting.
func (b *Batch) Recv(fd int) (int, syscall.Errno) {
	for i := range b.hdrs {
		b.iovs[i].SetLen(len(b.bufs[i]))
		h := &b.hdrs[i].hdr
		h.Namelen = unix.SizeofSockaddrInet4
		h.Control = (*byte)(unsafe.Pointer(&b.ctls[i]))
		h.SetControllen(int(unsafe.Sizeof(b.ctls[i])))
	}
	return b.call(unix.SYS_RECVMMSG, fd, len(b.hdrs))
}

// Send sends datagrams 0 to n-1 without waiting and returns how many were
// taken.
func (b *Batch) Send(fd, n int) (int, syscall.Errno) { return b.call(unix.SYS_SENDMMSG, fd, n) }

// SendAll sends datagrams 0 to n-1 and skips those the kernel refuses, whose
// number it returns.
func (b *Batch) SendAll(fd, n int) (refused int) {
	for done := 0; done < n; {
		m, errno := b.callFrom(unix.SYS_SENDMMSG, fd, done, n)
		done += m
		if errno != 0 {
			refused++
			done++
		}
	}
	return refused
}

func (b *Batch) call(trap uintptr, fd, n int) (int, syscall.Errno) { return b.callFrom(trap, fd, 0, n) }

func (b *Batch) callFrom(trap uintptr, fd, from, to int) (int, syscall.Errno) {
	for {
		r, _, errno := unix.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(&b.hdrs[from])), uintptr(to-from), unix.MSG_DONTWAIT, 0, 0)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return 0, errno
		}
		return int(r), 0
	}
}
