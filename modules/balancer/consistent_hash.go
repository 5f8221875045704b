package balancer

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
)

func init() { caddy.RegisterModule(new(ConsistentHash)) }

// ConsistentHash sends a client to the same backend for as long as that backend
// takes flows. It is a rendezvous hash: it remembers nothing, every instance
// and every start of Wayhouse chooses alike, adding one backend to N moves
// about 1/(N+1) of the clients and removing one moves only its own.
type ConsistentHash struct {
	// What makes two flows the same client: src_ip, its address, or src_ip_port,
	// its address and port. IPv4-mapped IPv6 addresses count as IPv4. Default:
	// src_ip.
	HashOn string `json:"hash_on,omitempty"`
}

// The values of hash_on.
const (
	srcIP     = "src_ip"
	srcIPPort = "src_ip_port"
)

// CaddyModule returns the Caddy module information.
func (*ConsistentHash) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.balancers.consistent_hash",
		New: func() caddy.Module { return new(ConsistentHash) },
	}
}

// Provision sets the default.
func (c *ConsistentHash) Provision(caddy.Context) error {
	if c.HashOn == "" {
		c.HashOn = srcIP
	}
	return nil
}

// Validate checks what Provision has left.
func (c *ConsistentHash) Validate() error {
	if c.HashOn != srcIP && c.HashOn != srcIPPort {
		return fmt.Errorf("hash_on: %q is neither %s nor %s", c.HashOn, srcIP, srcIPPort)
	}
	return nil
}

// Pick returns the candidate with the highest score for the client.
func (c *ConsistentHash) Pick(candidates []Candidate, f Flow) int {
	client := c.client(f)
	best, weight := 0, candidates[0].Weight()
	high := score(client, candidates[0])
	for i := 1; i < len(candidates); i++ {
		s, w := score(client, candidates[i]), candidates[i].Weight()
		if higher(s, w, high, weight) {
			best, high, weight = i, s, w
		}
	}
	return best
}

// client is the hash of what makes a flow's client.
func (c *ConsistentHash) client(f Flow) uint64 {
	port := uint16(0)
	if c.HashOn == srcIPPort {
		port = f.Client.Port()
	}
	return hash(seedClient, netip.AddrPortFrom(f.Client.Addr(), port))
}

// Prepare hashes the candidates once. A choice still compares all of them, for
// every instance has to agree about it, but is one step for each.
func (c *ConsistentHash) Prepare(candidates []Candidate) Prepared {
	h := &hashed{hash: c}
	groups := make(map[uint32]int)
	for i, b := range candidates {
		w := b.Weight()
		at, ok := groups[w]
		if !ok {
			at = len(h.groups)
			groups[w] = at
			h.groups = append(h.groups, group{weight: w})
		}
		g := &h.groups[at]
		g.of, g.at = append(g.of, hash(seedBackend, b.Addr())), append(g.at, i)
	}
	return h
}

// hashed is the candidates as they are compared.
type hashed struct {
	hash   *ConsistentHash
	groups []group
}

// group is the candidates of one weight.
type group struct {
	weight uint32
	of     []uint64 // their hashes
	at     []int    // where they are in the list
}

// Pick returns the candidate with the highest score for the client: of those
// of one weight the hashes decide.
func (h *hashed) Pick(f Flow) int {
	client := h.hash.client(f)
	best, high, weight := -1, uint64(0), uint32(0)
	for i := range h.groups {
		g := &h.groups[i]
		at, score := 0, mix(client^seedScore, g.of[0])
		for k, b := range g.of[1:] {
			if s := mix(client^seedScore, b); s > score {
				at, score = k+1, s
			}
		}
		if best < 0 || higher(score, g.weight, high, weight) {
			best, high, weight = g.at[at], score, g.weight
		}
	}
	return best
}

// Peek implements Peeker: there are no turns.
func (c *ConsistentHash) Peek(candidates []Candidate, f Flow, _ int) int {
	return c.Pick(candidates, f)
}

func score(client uint64, b Candidate) uint64 {
	return mix(client^seedScore, hash(seedBackend, b.Addr()))
}

// higher compares two scores. Of equal weights the hashes decide; else each is
// stretched so that the chance to win is in proportion to the weight.
func higher(a uint64, v uint32, b uint64, w uint32) bool {
	if v == w {
		return a > b
	}
	return float64(v)/-math.Log(unit(a)) > float64(w)/-math.Log(unit(b))
}

// unit maps a hash into the open interval (0, 1).
func unit(h uint64) float64 { return (float64(h>>12) + 0.5) / (1 << 52) }

// The hash must never change: several instances in front of the same backends,
// of different versions during an upgrade, have to agree.
const (
	seedClient  = 0x9e3779b97f4a7c15
	seedBackend = 0xc2b2ae3d27d4eb4f
	seedScore   = 0x165667b19e3779f9
	odd         = 0xd6e8feb86659fd93
)

func hash(seed uint64, a netip.AddrPort) uint64 {
	b := a.Addr().As16() // IPv4 as IPv4-mapped; the zone does not count
	hi, lo := binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
	h := mix(hi^seed, odd)
	h = mix(h^lo, odd)
	return mix(h^uint64(a.Port()), odd)
}

// mix multiplies to 128 bits, folds them and stirs what is left, so that every
// bit of both inputs reaches every bit of the answer.
func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a|1, b|1)
	h := hi ^ lo ^ bits.RotateLeft64(a, 32) ^ b
	h ^= h >> 30
	h *= 0xbf58476d1ce4e5b9
	h ^= h >> 27
	h *= 0x94d049bb133111eb
	return h ^ h>>31
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	consistent_hash [src_ip|src_ip_port]
func (c *ConsistentHash) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume policy name
	if d.NextArg() {
		if v := d.Val(); v != srcIP && v != srcIPPort {
			return d.Errf("hash_on: %q is neither %s nor %s", v, srcIP, srcIPPort)
		}
		c.HashOn = d.Val()
	}
	return caddyopt.BlockOf(d, "consistent_hash", nil)
}

// Interface guards
var (
	_ Balancer              = (*ConsistentHash)(nil)
	_ Peeker                = (*ConsistentHash)(nil)
	_ Preparer              = (*ConsistentHash)(nil)
	_ caddy.Provisioner     = (*ConsistentHash)(nil)
	_ caddy.Validator       = (*ConsistentHash)(nil)
	_ caddyfile.Unmarshaler = (*ConsistentHash)(nil)
)
