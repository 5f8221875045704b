// Package sniffer matches flows by what a sniffer says of their first bytes.
package sniffer

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func init() { caddy.RegisterModule(new(Matcher)) }

// Matcher matches flows that a sniffer recognises. The sniffers of a listener
// are asked in the order in which its routes name them, and the first that
// recognises a flow is its only one: routes that name another do not match.
type Matcher struct {
	// The sniffer: a native one by its kind, such as minecraft, or one that the
	// app declares. Required.
	Name string `json:"name,omitempty"`

	// The hosts it must have read, as those of sni. Default: any, or none.
	Host []string `json:"host,omitempty"`

	// What else it must have read: its key, such as quic, or parts of the form
	// name=value, such as state=login. Of several with one name any will do; of
	// each name one is needed. Default: anything.
	Key []string `json:"key,omitempty"`

	hosts *sniff.Hosts
	keys  *keys
	named *sniff.Named
}

// CaddyModule returns the Caddy module information.
func (*Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.matchers.sniffer",
		New: func() caddy.Module { return new(Matcher) },
	}
}

// UnmarshalJSON decodes the matcher with errors that name the key.
func (m *Matcher) UnmarshalJSON(b []byte) error {
	type plain Matcher
	return strictjson.Unmarshal(b, (*plain)(m))
}

// Provision finds the sniffer and reads the hosts and keys.
func (m *Matcher) Provision(ctx caddy.Context) (err error) {
	if m.Name == "" {
		return errors.New("name: no sniffer is named, such as minecraft")
	}
	set, err := sniff.From(ctx)
	if err != nil {
		return err
	}
	if m.named, err = set.Get(m.Name); err != nil {
		return fmt.Errorf("name: %w", err)
	}
	if m.hosts, err = sniff.ParseHosts(m.Host); err != nil {
		return err
	}
	m.keys, err = parseKeys(m.Key)
	return err
}

// Sniffers implements sniff.User.
func (m *Matcher) Sniffers() []*sniff.Named { return []*sniff.Named{m.named} }

// Match implements layer4.ConnMatcher.
func (m *Matcher) Match(cx *layer4.Connection) (bool, error) {
	return m.MatchFlow(sniff.Of(cx), netip.AddrPort{}, netip.AddrPort{})
}

// MatchFlow implements listener.FlowMatcher.
func (m *Matcher) MatchFlow(f *sniff.Flow, _, _ netip.AddrPort) (bool, error) {
	v, h := f.Ask(m.named)
	switch {
	case v == sniff.Unrecognised || v == sniff.Recognised && h.Reject:
		return false, nil
	case v == sniff.Recognised:
		return (m.hosts.Empty() || h.HasHost && m.hosts.Match(h.Host)) && m.keys.match(h), nil
	case v == sniff.Partial && !h.Reject && m.hosts.Empty() && m.keys.match(h):
		return true, nil // the host does not matter
	}
	return false, layer4.ErrConsumedAllPrefetchedBytes
}

// UnmarshalCaddyfile sets up the matcher from Caddyfile tokens. Syntax:
//
//	sniffer <name> [<hosts...>] {
//		key <keys...>
//	}
func (m *Matcher) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume matcher name
	if !d.NextArg() {
		return d.Errf("sniffer: the name is missing, as in sniffer minecraft play.example.com")
	}
	m.Name = d.Val()
	m.Host = append(m.Host, d.RemainingArgs()...)
	return caddyopt.BlockOf(d, "sniffer", caddyopt.Options{"key": caddyopt.Strings(&m.Key)})
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Matcher)(nil)
	_ caddyfile.Unmarshaler = (*Matcher)(nil)
	_ listener.FlowMatcher  = (*Matcher)(nil)
	_ sniff.User            = (*Matcher)(nil)
)
