package tcprelay

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The system calls of the loop. None of them can block, so they go to the
// kernel without telling the Go scheduler.

func read(fd int32, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	return int(n), errno
}

// peek leaves what it reads in the socket.
func peek(fd int32, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_PEEK, 0, 0)
	return int(n), errno
}

// write sends without SIGPIPE, which Go would turn into a signal to itself.
func write(fd int32, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

func splice(from, to int32, max int) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(max), unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
	return int(n), errno
}

func closeFD(fd int32) { unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

func shutdownWrite(fd int32) {
	unix.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0)
}

// closeReset closes a socket so that its peer sees a reset.
func closeReset(fd int32) {
	l := unix.Linger{Onoff: 1}
	unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_LINGER, uintptr(unsafe.Pointer(&l)), unsafe.Sizeof(l), 0)
	closeFD(fd)
}

func setInt(fd int32, level, opt int, v int32) {
	unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(opt), uintptr(unsafe.Pointer(&v)), 4, 0)
}

// pendingError takes the error a socket has waiting.
func pendingError(fd int32) unix.Errno {
	var v int32
	size := uint32(4)
	_, _, errno := unix.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_ERROR, uintptr(unsafe.Pointer(&v)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return unix.Errno(v)
}

// unacked is the number of bytes sent that the peer's kernel has not confirmed.
func unacked(fd int32) int32 {
	var v int32
	if _, _, errno := unix.RawSyscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCOUTQ, uintptr(unsafe.Pointer(&v))); errno != 0 {
		return 0
	}
	return v
}

func epollWait(epfd int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

func epollCtl(epfd, op int, fd int32, ev *unix.EpollEvent) unix.Errno {
	_, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epfd), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(ev)), 0, 0)
	return errno
}

func accept4(fd int32, rsa *unix.RawSockaddrAny) (int32, unix.Errno) {
	size := uint32(unix.SizeofSockaddrAny)
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), uintptr(unsafe.Pointer(rsa)), uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	return int32(n), errno
}

func socketTCP(v4 bool) (int32, unix.Errno) {
	family := uintptr(unix.AF_INET6)
	if v4 {
		family = unix.AF_INET
	}
	fd, _, errno := unix.RawSyscall(unix.SYS_SOCKET, family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	return int32(fd), errno
}

// connect starts to connect a socket of the family of to.
func connect(fd int32, to netip.AddrPort, rsa *unix.RawSockaddrAny) unix.Errno {
	size := toRaw(to, rsa)
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(rsa)), size)
	return errno
}

// toRaw writes an address without a zone as the kernel reads it.
func toRaw(a netip.AddrPort, rsa *unix.RawSockaddrAny) (size uintptr) {
	if a.Addr().Is4() {
		sa := (*unix.RawSockaddrInet4)(unsafe.Pointer(rsa))
		*sa = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: a.Addr().As4()}
		binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&sa.Port))[:], a.Port())
		return unsafe.Sizeof(*sa)
	}
	sa := (*unix.RawSockaddrInet6)(unsafe.Pointer(rsa))
	*sa = unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: a.Addr().As16()}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&sa.Port))[:], a.Port())
	return unsafe.Sizeof(*sa)
}

// localAddr asks for the address of our end; it is unset where the kernel
// would not say.
func localAddr(fd int32, rsa *unix.RawSockaddrAny) netip.AddrPort {
	size := uint32(unix.SizeofSockaddrAny)
	if _, _, errno := unix.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(rsa)), uintptr(unsafe.Pointer(&size))); errno != 0 {
		return netip.AddrPort{}
	}
	return fromRaw(rsa)
}

// peerAddr is localAddr for the other end.
func peerAddr(fd int32, rsa *unix.RawSockaddrAny) netip.AddrPort {
	size := uint32(unix.SizeofSockaddrAny)
	if _, _, errno := unix.RawSyscall(unix.SYS_GETPEERNAME, uintptr(fd), uintptr(unsafe.Pointer(rsa)), uintptr(unsafe.Pointer(&size))); errno != 0 {
		return netip.AddrPort{}
	}
	return fromRaw(rsa)
}

// fromRaw reads an address as the kernel wrote it; IPv4-mapped becomes IPv4.
func fromRaw(rsa *unix.RawSockaddrAny) netip.AddrPort {
	switch rsa.Addr.Family {
	case unix.AF_INET:
		sa := (*unix.RawSockaddrInet4)(unsafe.Pointer(rsa))
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), bigEndian(&sa.Port))
	case unix.AF_INET6:
		sa := (*unix.RawSockaddrInet6)(unsafe.Pointer(rsa))
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), bigEndian(&sa.Port))
	}
	return netip.AddrPort{}
}

func bigEndian(port *uint16) uint16 {
	return binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(port))[:])
}
