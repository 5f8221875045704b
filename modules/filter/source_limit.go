package filter

import (
	"errors"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
)

func init() { caddy.RegisterModule(new(SourceLimit)) }

// SourceLimit bounds how many flows an address and its network have on the
// listener at a time. The listener keeps the counts.
type SourceLimit struct {
	// The most connections and sessions of one client address, at least 1.
	// Default: no limit; at least one of the two is needed.
	MaxPerIP *int64 `json:"max_per_ip,omitempty"`

	// The most of one network, a /24 of IPv4 or a /64 of IPv6, at least 1.
	// Default: no limit.
	MaxPerNet *int64 `json:"max_per_net,omitempty"`
}

// CaddyModule returns the Caddy module information.
func (*SourceLimit) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.filters.source_limit",
		New: func() caddy.Module { return new(SourceLimit) },
	}
}

// UnmarshalJSON decodes the filter with errors that name the key.
func (s *SourceLimit) UnmarshalJSON(b []byte) error {
	type plain SourceLimit
	return strictjson.Unmarshal(b, (*plain)(s))
}

// Validate refuses bounds that let nobody in, and none at all.
func (s *SourceLimit) Validate() error {
	if s.MaxPerIP == nil && s.MaxPerNet == nil {
		return errors.New("neither max_per_ip nor max_per_net is given: it would let everybody in; give one, as in max_per_ip 32")
	}
	for _, b := range []struct {
		key string
		n   *int64
	}{{"max_per_ip", s.MaxPerIP}, {"max_per_net", s.MaxPerNet}} {
		if b.n != nil && *b.n < 1 {
			return fmt.Errorf("%s: %d would let nobody in: at least 1, or leave it out for no limit", b.key, *b.n)
		}
	}
	return nil
}

// Caps implements Capper.
func (s *SourceLimit) Caps() (perIP, perNet int64) { return or0(s.MaxPerIP), or0(s.MaxPerNet) }

func or0(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}

// Check implements Filter. It spares a flow that is sure to be refused what
// filters after this one would take of it; the count that decides is made last.
func (s *SourceLimit) Check(f Flow) string {
	rule, _, _ := s.look(f)
	return rule
}

func (s *SourceLimit) look(f Flow) (rule string, ofIP, ofNet int64) {
	ofIP, ofNet = f.Stats.Live(f.Source)
	switch {
	case s.MaxPerIP != nil && ofIP >= *s.MaxPerIP:
		rule = RuleConnIP
	case s.MaxPerNet != nil && ofNet >= *s.MaxPerNet:
		rule = RuleConnNet
	}
	return rule, ofIP, ofNet
}

// Explain implements Explainer.
func (s *SourceLimit) Explain(f Flow) (rule, reason string) {
	rule, ofIP, ofNet := s.look(f)
	return rule, fmt.Sprintf("%s has %d flows, its network %d", f.Source, ofIP, ofNet)
}

// UnmarshalCaddyfile sets up the filter from Caddyfile tokens. Syntax:
//
//	source_limit {
//		max_per_ip  <number>
//		max_per_net <number>
//	}
func (s *SourceLimit) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	return caddyopt.Block(d, caddyopt.Options{
		"max_per_ip":  caddyopt.Ptr(&s.MaxPerIP, caddyopt.Int),
		"max_per_net": caddyopt.Ptr(&s.MaxPerNet, caddyopt.Int),
	})
}

// Interface guards
var (
	_ caddy.Validator       = (*SourceLimit)(nil)
	_ caddyfile.Unmarshaler = (*SourceLimit)(nil)
	_ Filter                = (*SourceLimit)(nil)
	_ Explainer             = (*SourceLimit)(nil)
	_ Capper                = (*SourceLimit)(nil)
)
