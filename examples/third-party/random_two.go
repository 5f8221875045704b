// Package randomtwo is a balancer from outside of Wayhouse: a module of its own
// that a custom build takes in, with no change to Wayhouse.
package randomtwo

import (
	"math/rand/v2"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
)

func init() { caddy.RegisterModule(new(RandomTwo)) }

// RandomTwo looks at two backends at random and takes the one with fewer
// flows. That keeps the load nearly as even as looking at all of them, and
// several proxies in front of the same backends do not all run to the one that
// is idle just now.
type RandomTwo struct{}

// CaddyModule returns the Caddy module information.
func (*RandomTwo) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.balancers.random_two",
		New: func() caddy.Module { return new(RandomTwo) },
	}
}

// Pick implements balancer.Balancer.
func (*RandomTwo) Pick(candidates []balancer.Candidate, _ balancer.Flow) int {
	if len(candidates) == 1 {
		return 0
	}
	a := rand.IntN(len(candidates))
	b := rand.IntN(len(candidates) - 1)
	if b >= a {
		b++ // another one than a
	}
	if candidates[b].Active() < candidates[a].Active() {
		return b
	}
	return a
}

// UnmarshalCaddyfile reads the policy; it has no options. Syntax:
//
//	random_two
func (*RandomTwo) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume policy name
	if d.NextArg() || d.NextBlock(0) {
		return d.Errf("unexpected %q: random_two has no options", d.Val())
	}
	return nil
}

// Interface guards
var (
	_ balancer.Balancer     = (*RandomTwo)(nil)
	_ caddyfile.Unmarshaler = (*RandomTwo)(nil)
)
