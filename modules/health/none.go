package health

import (
	"context"
	"errors"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() { caddy.RegisterModule(new(None)) }

// None asks nothing: for games without a request that can be repeated. Health
// then comes from flows alone. As nothing could speak for a backend that is
// down, it is given another chance after rise intervals, so a backend that
// stays dead keeps going down and up, and the pool's on_backend_down hold ends
// no session unless its time is shorter than that.
type None struct{ Settings }

// CaddyModule returns the Caddy module information.
func (*None) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.health_checks.none",
		New: func() caddy.Module { return new(None) },
	}
}

// Check is never called: a pool runs no checks of this kind.
func (*None) Check(context.Context, netip.AddrPort) error { return errors.ErrUnsupported }

// UnmarshalCaddyfile sets up the check from Caddyfile tokens. Its options are
// those of tcp_connect.
func (c *None) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return block(d, &c.Settings, nil)
}

// Interface guards
var (
	_ Check                 = (*None)(nil)
	_ caddyfile.Unmarshaler = (*None)(nil)
)
