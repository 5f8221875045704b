package udprelay

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawRecv receives one datagram without allocating.
func rawRecv(fd int, p []byte, name *unix.RawSockaddrInet6) (int, unix.Errno) {
	n := uint32(unix.SizeofSockaddrInet6)
	var np *uint32
	if name != nil {
		np = &n
	}
	r, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), unix.MSG_DONTWAIT, uintptr(unsafe.Pointer(name)), uintptr(unsafe.Pointer(np)))
	return int(r), errno
}
