package pool

import (
	"errors"
	"syscall"
)

func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	errors.As(err, &errno)
	return errno
}

// isReset reports whether the other side says that nothing listens: by a TCP
// reset or, on UDP, by ICMP port unreachable.
func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ECONNREFUSED)
}
