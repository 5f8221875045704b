package balancer

import (
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() { caddy.RegisterModule(new(RoundRobin)) }

// RoundRobin gives every backend the same share of the new flows, one after
// the other in the order of the config.
type RoundRobin struct{ turn turn }

// CaddyModule returns the Caddy module information.
func (*RoundRobin) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.balancers.round_robin",
		New: func() caddy.Module { return new(RoundRobin) },
	}
}

// Pick returns the next backend in turn.
func (r *RoundRobin) Pick(candidates []Candidate, _ Flow) int {
	return int(r.turn.next(uint64(len(candidates))))
}

// Peek implements Peeker.
func (r *RoundRobin) Peek(candidates []Candidate, _ Flow, next int) int {
	return int(r.turn.peek(next) % uint64(len(candidates)))
}

// UnmarshalCaddyfile reads the policy; it has no options.
func (*RoundRobin) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { return noOptions(d) }

// turn counts choices. It wraps after 2^64 of them.
type turn struct{ n atomic.Uint64 }

// next returns 0, 1, … n-1, 0, … to successive callers.
func (t *turn) next(n uint64) uint64 { return (t.n.Add(1) - 1) % n }

// peek returns the number that next divides, some callers from now.
func (t *turn) peek(after int) uint64 { return t.n.Load() + uint64(after) }

// Interface guards
var (
	_ Balancer              = (*RoundRobin)(nil)
	_ Peeker                = (*RoundRobin)(nil)
	_ caddyfile.Unmarshaler = (*RoundRobin)(nil)
)
