// Package cidr has sets of networks: asking one costs the same with 20 networks
// as with 200,000. An IPv6 address that carries an IPv4 address is that address,
// here and in what is asked, so that neither form slips past the other.
package cidr

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/gaissmai/bart"
)

// Set is a set of networks. The zero value is empty. Adding is for one
// goroutine, asking for many.
type Set struct{ t bart.Lite }

// Parse reads a network or a single address. What is behind the prefix must be
// zero, for it would be a mistake whose meaning nobody can tell.
func Parse(s string) (netip.Prefix, error) {
	if !strings.Contains(s, "/") {
		a, err := netip.ParseAddr(s)
		if err != nil || a.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("%q is no network, such as 203.0.113.0/24 or 2001:db8::/32, and no address", s)
		}
		a = Plain(a)
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return p, fmt.Errorf("%q is no network, such as 203.0.113.0/24 or 2001:db8::/32", s)
	}
	if m := p.Masked(); m != p {
		return p, fmt.Errorf("%q has bits behind its prefix: %s is the network", s, m)
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return p, fmt.Errorf("%q is more than all IPv4 addresses: write 0.0.0.0/0 for these", s)
		}
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96), nil
	}
	if a := Plain(p.Addr()); a.Is4() && p.Addr().Is6() && p.Bits() > 96 {
		return netip.PrefixFrom(a, p.Bits()-96), nil
	}
	return p, nil
}

// Add adds a network as Parse reads it.
func (s *Set) Add(network string) error {
	p, err := Parse(network)
	if err == nil {
		s.t.Insert(p)
	}
	return err
}

// AddAll adds networks; the error names the index of one that is wrong.
func (s *Set) AddAll(networks []string) error {
	for i, n := range networks {
		if err := s.Add(n); err != nil {
			return fmt.Errorf("[%d]: %w", i, err)
		}
	}
	return nil
}

// Contains reports whether an address is in a network of the set.
func (s *Set) Contains(a netip.Addr) bool { return s.t.Contains(Plain(a)) }

// Len is how many networks there are.
func (s *Set) Len() int { return s.t.Size() }
