package balancer

import (
	"fmt"
	"math"
	"math/bits"
	"net"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
)

func init() { caddy.RegisterModule(new(Weighted)) }

// Weighted gives every backend a share of the new flows in proportion to its
// weight, spread evenly and not in blocks.
type Weighted struct {
	// The weight of each target, by its name in the pool's targets, ip:port or
	// host:port; all addresses of a host name have its weight. From 1 to
	// 1000000. A target that is not named weighs 1.
	ByTarget map[string]uint32 `json:"weights,omitempty"`

	turn   atomic.Uint64
	stride atomic.Uint64 // of the total last seen: total<<32 | stride; a cache
}

const maxWeight = 1_000_000

// CaddyModule returns the Caddy module information.
func (*Weighted) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.balancers.weighted",
		New: func() caddy.Module { return new(Weighted) },
	}
}

// Validate checks the weights. Whether their keys are targets is for the pool
// to say.
func (w *Weighted) Validate() error {
	keys := make([]string, 0, len(w.ByTarget))
	for k := range w.ByTarget {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		if err := checkTarget(k); err != nil {
			return fmt.Errorf("weights: %w", err)
		}
		if n := w.ByTarget[k]; n < 1 || n > maxWeight {
			return fmt.Errorf("weights: %q: %d is not between 1 and %d", k, n, maxWeight)
		}
	}
	return nil
}

func checkTarget(s string) error {
	host, port, err := net.SplitHostPort(s)
	if n, perr := strconv.ParseUint(port, 10, 16); err != nil || host == "" || perr != nil || n == 0 {
		return fmt.Errorf("%q is not ip:port or host:port", s)
	}
	return nil
}

// Weights returns the weights by target.
func (w *Weighted) Weights() map[string]uint32 { return w.ByTarget }

// Pick lays the candidates on a ring, each as long as its weight, and walks
// around it in steps of the golden section. Whatever the weights, that spreads
// the visits to each candidate evenly, and as the step shares no factor with
// the length of the ring, one cycle visits every place of it exactly once.
func (w *Weighted) Pick(candidates []Candidate, _ Flow) int {
	return w.visit(candidates, w.turn.Add(1)-1)
}

// Peek implements Peeker.
func (w *Weighted) Peek(candidates []Candidate, _ Flow, next int) int {
	return w.visit(candidates, w.turn.Load()+uint64(next))
}

// visit is the candidate of a turn.
func (w *Weighted) visit(candidates []Candidate, turn uint64) int {
	var total, unit uint64
	for _, c := range candidates {
		total += uint64(c.Weight())
		unit = GCD(uint64(c.Weight()), unit)
	}
	at := place(turn, total/unit, w.step(total/unit))
	for i, c := range candidates {
		share := uint64(c.Weight()) / unit
		if at < share {
			return i
		}
		at -= share
	}
	return 0 // a weight has changed meanwhile
}

// place is where on a ring of that length a turn comes to.
func place(turn, length, step uint64) uint64 {
	hi, lo := bits.Mul64(turn%length, step) // thousands of the highest weight are more than 64 bits
	return bits.Rem64(hi, lo, length)
}

// Prepare adds up the weights once: a choice is a search among the sums.
func (w *Weighted) Prepare(candidates []Candidate) Prepared {
	var unit uint64
	for _, c := range candidates {
		unit = GCD(uint64(c.Weight()), unit)
	}
	r := &ring{weighted: w, ends: make([]uint64, len(candidates))}
	end := uint64(0)
	for i, c := range candidates {
		end += uint64(c.Weight()) / unit
		r.ends[i] = end
	}
	r.step = stride(end)
	return r
}

// ring is the candidates laid out.
type ring struct {
	weighted *Weighted
	ends     []uint64 // of each candidate's part
	step     uint64
}

// Pick walks around the ring.
func (r *ring) Pick(Flow) int {
	at := place(r.weighted.turn.Add(1)-1, r.ends[len(r.ends)-1], r.step)
	i, found := slices.BinarySearch(r.ends, at)
	if found { // the end of a part is the next one's beginning
		i++
	}
	return i
}

// step returns the number nearest to total/φ that has no factor in common with
// total.
func (w *Weighted) step(total uint64) uint64 {
	if v := w.stride.Load(); v>>32 == total {
		return v & math.MaxUint32
	}
	s := stride(total)
	if total <= math.MaxUint32 {
		w.stride.Store(total<<32 | s)
	}
	return s
}

// stride looks at the numbers around the golden section for one that has no
// factor in common with total, and, of those, the most irrational one: the
// smaller the largest quotient of Euclid's algorithm, the more even the walk.
func stride(total uint64) uint64 {
	mid := uint64(float64(total)/math.Phi + 0.5)
	best, least := uint64(1), uint64(math.MaxUint64)
	for d := uint64(0); d < 64 && d < total; d++ {
		for _, s := range [2]uint64{mid + d, mid - min(d, mid)} {
			if q, ok := quotient(total, s); ok && q < least {
				best, least = s, q
			}
		}
	}
	return best
}

// quotient returns the largest quotient of Euclid's algorithm, and whether a
// and b have no factor in common.
func quotient(a, b uint64) (largest uint64, coprime bool) {
	for b != 0 {
		largest = max(largest, a/b)
		a, b = b, a%b
	}
	return largest, a == 1
}

// GCD is the greatest common divisor, of which 0 has all.
func GCD(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	weighted {
//		weight <target> <number>
//	}
func (w *Weighted) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume policy name
	return caddyopt.Block(d, caddyopt.Options{"weight": caddyopt.Many(caddyopt.Func(w.unmarshalWeight))})
}

func (w *Weighted) unmarshalWeight(d *caddyfile.Dispenser) error {
	args := d.RemainingArgs()
	if len(args) != 2 {
		return d.Errf("weight: want a target and a number, not %d arguments", len(args))
	}
	n, err := strconv.ParseUint(args[1], 10, 32)
	if err != nil {
		return d.Errf("weight: %q is not a number from 1 to %d", args[1], maxWeight)
	}
	if _, ok := w.ByTarget[args[0]]; ok {
		return d.Errf("weight: %s has one already", args[0])
	}
	if w.ByTarget == nil {
		w.ByTarget = make(map[string]uint32)
	}
	w.ByTarget[args[0]] = uint32(n)
	return nil
}

// Interface guards
var (
	_ Balancer              = (*Weighted)(nil)
	_ Peeker                = (*Weighted)(nil)
	_ Preparer              = (*Weighted)(nil)
	_ Weigher               = (*Weighted)(nil)
	_ caddy.Validator       = (*Weighted)(nil)
	_ caddyfile.Unmarshaler = (*Weighted)(nil)
)
