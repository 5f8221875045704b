package sock

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flows are not to take the last descriptors of the process: health checks,
// the admin API and the log need some when there are too many flows. The
// kernel gives the lowest number that is free, so the number of a new
// descriptor tells how many are in use.

const (
	maxReserve  = 64
	partReserve = 8 // of a small limit at most this part is kept
)

// Spare reports whether a flow may keep a descriptor of that number. The limit
// of a running process may be changed from outside, so it is asked each time,
// which costs a tenth of a microsecond.
func Spare(fd int) bool {
	var l unix.Rlimit
	_, _, errno := unix.RawSyscall6(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_NOFILE, 0, uintptr(unsafe.Pointer(&l)), 0, 0)
	return errno != 0 || uint64(fd) < l.Cur-min(maxReserve, l.Cur/partReserve)
}

// Room reports whether the next flow would get a descriptor it may keep. fd is
// any open one.
func Room(fd int) bool {
	next, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return false
	}
	unix.Close(next)
	return Spare(next)
}
