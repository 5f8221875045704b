package health

import (
	"context"
	"net/netip"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"golang.org/x/sys/unix"
)

func init() { caddy.RegisterModule(new(TCPConnect)) }

// TCPConnect finds a backend healthy whose port takes a TCP connection. The
// connection is reset before its handshake is complete, so the program behind
// the port does not see it.
type TCPConnect struct{ Settings }

// CaddyModule returns the Caddy module information.
func (*TCPConnect) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.health_checks.tcp_connect",
		New: func() caddy.Module { return new(TCPConnect) },
	}
}

// Check connects to the backend. A Runner does not call it, and does the same
// for many backends at a time.
func (c *TCPConnect) Check(ctx context.Context, to netip.AddrPort) error {
	conn, err := c.connect(to)
	if err != nil {
		return err
	}
	defer conn.close()
	tick := time.NewTicker(lookSoon)
	defer tick.Stop()
	for {
		switch n, err := unix.Poll([]unix.PollFd{{Fd: int32(conn.fd), Events: unix.POLLOUT}}, 0); {
		case n > 0:
			return conn.result()
		case err != nil && err != unix.EINTR:
			return conn.failed("poll", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// UnmarshalCaddyfile sets up the check from Caddyfile tokens. Syntax:
//
//	tcp_connect {
//		interval <duration>
//		timeout  <duration>
//		rise     <number>
//		fall     <number>
//	}
func (c *TCPConnect) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return block(d, &c.Settings, nil)
}

// Interface guards
var (
	_ Check                 = (*TCPConnect)(nil)
	_ caddyfile.Unmarshaler = (*TCPConnect)(nil)
)
