// Package clientcidr matches flows by the network that the client's address is
// in.
package clientcidr

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

func init() { caddy.RegisterModule(new(Matcher)) }

// Matcher matches clients by their address.
type Matcher struct {
	// Networks and single addresses: 203.0.113.0/24, 2001:db8::/32, 192.0.2.1. An
	// IPv4-mapped IPv6 address is the IPv4 address in it. Placeholders are
	// replaced at load. At least one is needed.
	CIDRs []string `json:"cidrs,omitempty"`

	set cidr.Set
}

// CaddyModule returns the Caddy module information.
func (*Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.matchers.client_cidr",
		New: func() caddy.Module { return new(Matcher) },
	}
}

// Provision reads the networks.
func (m *Matcher) Provision(caddy.Context) error {
	repl := caddy.NewReplacer()
	for i, c := range m.CIDRs {
		if err := m.set.Add(repl.ReplaceAll(c, "")); err != nil {
			return fmt.Errorf("cidrs[%d]: %w", i, err)
		}
	}
	return nil
}

// Validate checks what Provision has left.
func (m *Matcher) Validate() error {
	if len(m.CIDRs) == 0 {
		return errors.New("cidrs: none; give at least one network, such as 203.0.113.0/24")
	}
	return nil
}

// MatchAddr implements listener.AddrMatcher.
func (m *Matcher) MatchAddr(client, _ netip.AddrPort) bool { return m.set.Contains(client.Addr()) }

// Match implements layer4.ConnMatcher.
func (m *Matcher) Match(cx *layer4.Connection) (bool, error) {
	return m.set.Contains(flowaddr.Of(cx.RemoteAddr()).Addr()), nil
}

// UnmarshalCaddyfile sets up the matcher from Caddyfile tokens. Syntax:
//
//	client_cidr <networks...>
func (m *Matcher) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume matcher name
	if err := caddyopt.Strings(&m.CIDRs).Read(d); err != nil {
		return err
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
