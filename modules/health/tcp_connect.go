package health

import (
	"context"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() { caddy.RegisterModule(new(TCPConnect)) }

// TCPConnect finds a backend healthy that accepts a TCP connection. The
// connection is closed at once.
type TCPConnect struct{ Settings }

// CaddyModule returns the Caddy module information.
func (*TCPConnect) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.health_checks.tcp_connect",
		New: func() caddy.Module { return new(TCPConnect) },
	}
}

// Check connects to the backend.
func (c *TCPConnect) Check(ctx context.Context, to netip.AddrPort) error {
	conn, err := c.dial(ctx, "tcp", to)
	if err != nil {
		return err
	}
	conn.Close()
	return nil
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
