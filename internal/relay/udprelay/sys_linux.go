package udprelay

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of the loop. All are on non-blocking descriptors or with a
// timeout of zero, so they bypass the Go scheduler (RawSyscall), which costs
// more than some of them.

// mmsghdr is struct mmsghdr. Go pads it as C does.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32 // bytes received or sent
}

const (
	sendFlags = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL
	// The length of a control message header is a multiple of its alignment
	// on every Linux that Go runs on.
	cmsgHeader = unix.SizeofCmsghdr
)

func recvmmsg(fd int, hdrs *mmsghdr, n int) (int, unix.Errno) {
	r, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(hdrs)), uintptr(n), unix.MSG_DONTWAIT, 0, 0)
	return int(r), errno
}

func sendmmsg(fd int, hdrs *mmsghdr, n int) (int, unix.Errno) {
	r, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(hdrs)), uintptr(n), sendFlags, 0, 0)
	return int(r), errno
}

func sendmsg(fd int, hdr *unix.Msghdr) unix.Errno {
	_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(hdr)), sendFlags)
	return errno
}

// sendto sends one datagram; name is nil on a connected socket.
func sendto(fd int, p *byte, n int, name *unix.RawSockaddrInet6, nameLen uint32) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(p)), uintptr(n), sendFlags, uintptr(unsafe.Pointer(name)), uintptr(nameLen))
	return errno
}

func epollPoll(epfd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

func epollAdd(epfd, fd int, ev *unix.EpollEvent) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epfd), unix.EPOLL_CTL_ADD, uintptr(fd), uintptr(unsafe.Pointer(ev)), 0, 0)
	return errno
}

func closeFD(fd int) {
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
}

// getsockname fills name and reports whether the kernel has.
func getsockname(fd int, name *unix.RawSockaddrInet6) bool {
	n := uint32(unix.SizeofSockaddrInet6)
	_, _, errno := unix.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(name)), uintptr(unsafe.Pointer(&n)))
	return errno == 0
}

func readTimer(fd int) {
	var n uint64
	unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&n)), unsafe.Sizeof(n))
}

func setGRO(fd int) {
	one := int32(1)
	unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_UDP, unix.UDP_GRO, uintptr(unsafe.Pointer(&one)), unsafe.Sizeof(one), 0)
}

// getpeername is getsockname for the other end.
func getpeername(fd int, name *unix.RawSockaddrInet6) bool {
	n := uint32(unix.SizeofSockaddrInet6)
	_, _, errno := unix.RawSyscall(unix.SYS_GETPEERNAME, uintptr(fd), uintptr(unsafe.Pointer(name)), uintptr(unsafe.Pointer(&n)))
	return errno == 0
}

// control is room for the control messages of one datagram, aligned for them:
// IPV6_PKTINFO (40 bytes) or IPV6_ORIGDSTADDR (48), and UDP_GRO or UDP_SEGMENT
// (24).
type control [9]uint64

func (c *control) bytes() []byte { return unsafe.Slice((*byte)(unsafe.Pointer(c)), unsafe.Sizeof(*c)) }

// put writes a control message at off and returns the offset behind it.
func (c *control) put(off int, level, typ int32, data []byte) int {
	b := c.bytes()
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[off]))
	h.Level, h.Type = level, typ
	h.SetLen(cmsgHeader + len(data))
	copy(b[off+cmsgHeader:], data)
	return off + unix.CmsgSpace(len(data))
}
