package pool

import (
	"maps"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
)

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens: the name of a
// pool of the wayhouse app, or the options of a pool. Syntax:
//
//	pool <name> {
//		target_port same | offset <number> | <ports...>
//		follow <listener> { ... }
//	}
//	pool {
//		to <targets...>
//		...
//		follow <listener> { ... }
//	}
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume handler name
	own := caddyopt.Options{"follow": caddyopt.Func(func(d *caddyfile.Dispenser) error {
		h.Follow = new(Follow)
		return h.Follow.unmarshal(d)
	}), "target_port": caddyopt.Func(func(d *caddyfile.Dispenser) error {
		h.TargetPort = new(TargetPort)
		return h.TargetPort.unmarshal(d)
	})}
	if !d.NextArg() {
		all := h.CaddyfileOptions()
		maps.Copy(all, own)
		return caddyopt.BlockOf(d, "a pool", all)
	}
	h.Pool = d.Val()
	if d.NextArg() {
		return d.Errf("unexpected argument %q of pool %s", d.Val(), h.Pool)
	}
	// What would be an option of a pool is said to be in the wrong place.
	for name := range h.CaddyfileOptions() {
		own[name] = caddyopt.Func(func(d *caddyfile.Dispenser) error {
			return d.Errf("pool %s: a pool that is named has its options in the wayhouse block, not here", h.Pool)
		})
	}
	return caddyopt.BlockOf(d, "pool "+h.Pool, own)
}

// Interface guard
var _ caddyfile.Unmarshaler = (*Handler)(nil)
