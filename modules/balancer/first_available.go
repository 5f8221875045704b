package balancer

import (
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() { caddy.RegisterModule(new(FirstAvailable)) }

// FirstAvailable gives every new flow to the first backend of the config that
// takes flows; the others are spares, in order.
type FirstAvailable struct{}

// CaddyModule returns the Caddy module information.
func (*FirstAvailable) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.balancers.first_available",
		New: func() caddy.Module { return new(FirstAvailable) },
	}
}

// Pick returns the first candidate.
func (*FirstAvailable) Pick([]Candidate, Flow) int { return 0 }

// Peek implements Peeker.
func (*FirstAvailable) Peek([]Candidate, Flow, int) int { return 0 }

// UnmarshalCaddyfile reads the policy; it has no options.
func (*FirstAvailable) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { return noOptions(d) }

// Interface guards
var (
	_ Balancer              = (*FirstAvailable)(nil)
	_ Peeker                = (*FirstAvailable)(nil)
	_ caddyfile.Unmarshaler = (*FirstAvailable)(nil)
)
