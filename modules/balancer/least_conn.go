package balancer

import (
	"math/bits"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

func init() { caddy.RegisterModule(new(LeastConn)) }

// LeastConn gives a new flow to the backend with the fewest live flows for its
// weight. Backends that are level take turns. Of many backends a choice compares
// 256, each time beginning with the next, so that it costs the same however many
// there are.
type LeastConn struct{ turn turn }

// CaddyModule returns the Caddy module information.
func (*LeastConn) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.balancers.least_conn",
		New: func() caddy.Module { return new(LeastConn) },
	}
}

// Pick compares what each backend would carry with the flow, and starts at
// another backend each time, so that callers who see the same counts do not
// all choose the same one.
func (l *LeastConn) Pick(candidates []Candidate, _ Flow) int {
	return least(candidates, int(l.turn.next(uint64(len(candidates)))))
}

// Peek implements Peeker.
func (l *LeastConn) Peek(candidates []Candidate, _ Flow, next int) int {
	return least(candidates, int(l.turn.peek(next)%uint64(len(candidates))))
}

// window is how many backends one choice compares.
const window = 256

func least(candidates []Candidate, best int) int {
	n := len(candidates)
	load, weight := after(candidates[best])
	for k, i := 1, best+1; k < min(n, window); k, i = k+1, i+1 {
		if i == n {
			i = 0
		}
		if c, w := after(candidates[i]); less(c, w, load, weight) {
			best, load, weight = i, c, w
		}
	}
	return best
}

func after(c Candidate) (load, weight uint64) {
	return uint64(max(c.Active(), 0)) + 1, uint64(c.Weight())
}

// less reports whether a/v < b/w.
func less(a, v, b, w uint64) bool {
	hi1, lo1 := bits.Mul64(a, w)
	hi2, lo2 := bits.Mul64(b, v)
	return hi1 < hi2 || hi1 == hi2 && lo1 < lo2
}

// UnmarshalCaddyfile reads the policy; it has no options.
func (*LeastConn) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { return noOptions(d) }

// Interface guards
var (
	_ Balancer              = (*LeastConn)(nil)
	_ Peeker                = (*LeastConn)(nil)
	_ caddyfile.Unmarshaler = (*LeastConn)(nil)
)
