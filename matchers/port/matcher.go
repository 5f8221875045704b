// Package port matches flows by the port that the client chose.
package port

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

func init() { caddy.RegisterModule(new(Matcher)) }

// Matcher matches flows by the port of ours that the client chose.
type Matcher struct {
	// Ports, such as 30001, and ranges, such as "30002-30010". At least one is
	// needed.
	Ports []Range `json:"ports,omitempty"`

	set [1 << 16 / 64]uint64 // a bit for each port
}

// Range is a port or several in a row, in JSON a number or a string.
type Range struct{ First, Last uint16 }

// ParseRange reads a port or a range of ports.
func ParseRange(s string) (Range, error) {
	first, last, ranged := strings.Cut(s, "-")
	if !ranged {
		last = first
	}
	lo, err := strconv.ParseUint(first, 10, 16)
	if err != nil || lo == 0 {
		return Range{}, fmt.Errorf("%q is neither a port from 1 to 65535 nor a range such as 30000-30099", s)
	}
	hi, err := strconv.ParseUint(last, 10, 16)
	if err != nil {
		return Range{}, fmt.Errorf("%q is neither a port from 1 to 65535 nor a range such as 30000-30099", s)
	}
	if hi < lo {
		return Range{}, fmt.Errorf("%q runs backwards: %s-%s is the range", s, last, first)
	}
	return Range{uint16(lo), uint16(hi)}, nil
}

// UnmarshalJSON reads a number or a string.
func (r *Range) UnmarshalJSON(b []byte) (err error) {
	s := string(b)
	if len(b) > 0 && b[0] == '"' {
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
	}
	*r, err = ParseRange(s)
	return err
}

// MarshalJSON writes a number for one port and a string for several.
func (r Range) MarshalJSON() ([]byte, error) {
	if r.First == r.Last {
		return json.Marshal(r.First)
	}
	return json.Marshal(fmt.Sprintf("%d-%d", r.First, r.Last))
}

// CaddyModule returns the Caddy module information.
func (*Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.matchers.port",
		New: func() caddy.Module { return new(Matcher) },
	}
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
		r, err := ParseRange(p)
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
