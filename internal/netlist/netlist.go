// Package netlist is the option cidrs, for matchers of addresses to embed.
package netlist

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// List is a matcher's networks.
type List struct {
	// Networks and single addresses: 203.0.113.0/24, 2001:db8::/32, 192.0.2.1. An
	// IPv6 address that carries an IPv4 address, mapped or compatible, is that
	// address. A network with bits behind its prefix is refused. Placeholders are
	// replaced at load; one that is not known is refused. At least one is needed.
	CIDRs []string `json:"cidrs,omitempty"`

	set cidr.Set
}

// Provision reads the networks.
func (l *List) Provision(caddy.Context) error {
	repl := caddy.NewReplacer()
	for i, c := range l.CIDRs {
		network, err := repl.ReplaceOrErr(c, true, true)
		if err == nil {
			err = l.set.Add(network)
		}
		if err != nil {
			return fmt.Errorf("cidrs[%d]: %w", i, err)
		}
	}
	return nil
}

// Validate checks what Provision has left.
func (l *List) Validate() error {
	if len(l.CIDRs) == 0 {
		return errors.New("cidrs: none; give at least one network, such as 203.0.113.0/24")
	}
	return nil
}

// Contains reports whether an address is in one of the networks.
func (l *List) Contains(a netip.Addr) bool { return l.set.Contains(a) }

// UnmarshalCaddyfile reads a matcher that has networks and nothing else. Syntax:
//
//	<matcher> <networks...>
func (l *List) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume matcher name
	if err := caddyopt.Strings(&l.CIDRs).Read(d); err != nil {
		return err
	}
	return caddyopt.None(d)
}
