package fetch

import (
	"context"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// DeadPeer is how long data may stay unacknowledged before a connection is
// given up.
const DeadPeer = 5 * time.Second

// Dial connects to a service. A service whose host has vanished must not keep a
// connection that all later requests are put on, or that news are awaited from.
func Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{
		Timeout:         connectTimeout,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: DeadPeer, Interval: DeadPeer / 2, Count: 2},
		Control: func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) {
				// Without it the kernel tries for minutes; no reason to fail.
				_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(DeadPeer.Milliseconds()))
			})
		},
	}
	return d.DialContext(ctx, network, addr)
}
