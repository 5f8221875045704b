package pool

import (
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
)

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens: the name of a
// pool of the wayhouse app, or the options of a pool. Syntax:
//
//	pool <name>
//	pool {
//		to <targets...>
//		...
//	}
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume handler name
	if d.NextArg() {
		h.Pool = d.Val()
		if d.NextArg() {
			return d.Errf("unexpected argument %q of pool %s", d.Val(), h.Pool)
		}
		if d.NextBlock(d.Nesting()) {
			return d.Errf("pool %s: a pool that is named has its options in the wayhouse block, not here", h.Pool)
		}
		return nil
	}
	return caddyopt.BlockOf(d, "a pool", h.CaddyfileOptions())
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
