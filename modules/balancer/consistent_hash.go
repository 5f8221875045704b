package balancer

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

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

// Pick returns the candidate that the client comes to first; see ranks.go.
func (c *ConsistentHash) Pick(candidates []Candidate, f Flow) int {
	s := c.search(f)
	weight := candidates[0].Weight()
	s.even = !slices.ContainsFunc(candidates[1:], func(b Candidate) bool { return b.Weight() != weight })
	for i, b := range candidates {
		backend := hash(seedBackend, b.Addr())
		for _, p := range placesOf(backend) {
			s.meet(i, s.order.rank(p), b.Weight(), backend)
		}
	}
	return s.at
}

func (c *ConsistentHash) search(f Flow) search {
	client := c.client(f)
	return search{order: orderOf(client), client: client, at: -1}
}

// client is the hash of what makes a flow's client.
func (c *ConsistentHash) client(f Flow) uint64 {
	port := uint16(0)
	if c.HashOn == srcIPPort {
		port = f.Client.Port()
	}
	return hash(seedClient, netip.AddrPortFrom(f.Client.Addr(), port))
}

// Prepare hashes the candidates once, and sorts them into classes of weights.
func (c *ConsistentHash) Prepare(candidates []Candidate) Prepared {
	var classes [33]class // by the length of a weight in bits
	h := &hashed{hash: c, even: true}
	for i, b := range candidates {
		backend, w := hash(seedBackend, b.Addr()), b.Weight()
		g := &classes[bits.Len32(w)]
		g.heaviest = max(g.heaviest, w)
		g.members = append(g.members, member{i, w, backend, placesOf(backend)})
		h.even = h.even && w == g.members[0].weight
	}
	for i := len(classes) - 1; i >= 0; i-- { // the heaviest first: they leave the others less to search
		if g := &classes[i]; len(g.members) > 0 {
			g.index()
			h.classes = append(h.classes, *g)
		}
	}
	h.even = h.even && len(h.classes) == 1
	return h
}

// hashed is the candidates as they are searched.
type hashed struct {
	hash    *ConsistentHash
	even    bool
	classes []class
}

// Pick returns the candidate that the client comes to first.
func (h *hashed) Pick(f Flow) int {
	at, _ := h.pick(f)
	return at
}

// pick also returns how many steps it took.
func (h *hashed) pick(f Flow) (at, steps int) {
	s := h.hash.search(f)
	s.even = h.even
	for i := range h.classes {
		steps += h.classes[i].search(&s)
	}
	return s.at, steps
}

// Peek implements Peeker: there are no turns.
func (c *ConsistentHash) Peek(candidates []Candidate, f Flow, _ int) int {
	return c.Pick(candidates, f)
}

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
