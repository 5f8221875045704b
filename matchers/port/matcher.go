// Package port matches flows by the port that the client chose.
package port

import (
	"errors"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/portrange"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

func init() { caddy.RegisterModule(new(Matcher)) }

// Matcher matches flows by the port of ours that the client chose.
type Matcher struct {
	// Ports, such as 30001, and ranges, such as "30002-30010". At least one is
	// needed.
	Ports []portrange.Range `json:"ports,omitempty"`

	set [1 << 16 / 64]uint64 // a bit for each port
}

// CaddyModule returns the Caddy module information.
func (*Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.matchers.port",
		New: func() caddy.Module { return new(Matcher) },
	}
}

// UnmarshalJSON decodes the matcher with errors that name the key.
func (m *Matcher) UnmarshalJSON(b []byte) error {
	type plain Matcher
	return strictjson.Unmarshal(b, (*plain)(m))
}

// Provision makes a set of the ports.
func (m *Matcher) Provision(caddy.Context) error {
	for _, r := range m.Ports {
		for p := int(r.First); p <= int(r.Last); p++ {
			m.set[p/64] |= 1 << (p % 64)
		}
	}
	return nil
}

// Validate checks what Provision has left.
func (m *Matcher) Validate() error {
	if len(m.Ports) == 0 {
		return errors.New(`ports: none; give at least one, such as 30001 or "30000-30099"`)
	}
	return nil
}

// MatchAddr implements listener.AddrMatcher.
func (m *Matcher) MatchAddr(_, local netip.AddrPort) bool {
	p := local.Port()
	return m.set[p/64]&(1<<(p%64)) != 0
}

// Match implements layer4.ConnMatcher.
func (m *Matcher) Match(cx *layer4.Connection) (bool, error) {
	return m.MatchAddr(netip.AddrPort{}, flowaddr.Of(cx.LocalAddr())), nil
}

// UnmarshalCaddyfile sets up the matcher from Caddyfile tokens. Syntax:
//
//	port <ports...>
func (m *Matcher) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume matcher name
	var ports []string
	if err := caddyopt.Strings(&ports).Read(d); err != nil {
		return err
	}
	for _, p := range ports {
		r, err := portrange.Parse(p)
		if err != nil {
			return d.Errf("port: %v", err)
		}
		m.Ports = append(m.Ports, r)
	}
	return caddyopt.None(d)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Matcher)(nil)
	_ caddy.Validator       = (*Matcher)(nil)
	_ caddyfile.Unmarshaler = (*Matcher)(nil)
	_ listener.AddrMatcher  = (*Matcher)(nil)
)
