// Package sni matches flows by the server name in the ClientHello of TLS, which
// is not ended here, and over UDP of QUIC.
package sni

import (
	"errors"
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

// Matcher matches TLS connections and QUIC sessions by the name they ask for.
// The hello may come in any number of records, segments and datagrams; until
// all of it has come, nothing is decided.
type Matcher struct {
	// Names: example.com itself, *.example.com for the names below it at any
	// depth, .example.com for both. Case and one trailing dot do not matter. At
	// least one is needed.
	Host []string `json:"host,omitempty"`

	hosts *sniff.Hosts
}

// CaddyModule returns the Caddy module information.
func (*Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.matchers.sni",
		New: func() caddy.Module { return new(Matcher) },
	}
}

// UnmarshalJSON decodes the matcher with errors that name the key.
func (m *Matcher) UnmarshalJSON(b []byte) error {
	type plain Matcher
	return strictjson.Unmarshal(b, (*plain)(m))
}

// Provision reads the names.
func (m *Matcher) Provision(caddy.Context) (err error) {
	m.hosts, err = sniff.ParseHosts(m.Host)
	return err
}

// Validate checks what Provision has left.
func (m *Matcher) Validate() error {
	if len(m.Host) == 0 {
		return errors.New("host: none; give at least one name, such as game.example.com or *.example.com")
	}
	return nil
}

// Match implements layer4.ConnMatcher.
func (m *Matcher) Match(cx *layer4.Connection) (bool, error) {
	return m.MatchFlow(sniff.Of(cx), netip.AddrPort{}, netip.AddrPort{})
}

// MatchFlow implements listener.FlowMatcher.
func (m *Matcher) MatchFlow(f *sniff.Flow, _, _ netip.AddrPort) (bool, error) {
	name, v := f.ServerName()
	if v == sniff.Undecided {
		return false, layer4.ErrConsumedAllPrefetchedBytes
	}
	return v == sniff.Recognised && m.hosts.Match(name), nil
}

// UnmarshalCaddyfile sets up the matcher from Caddyfile tokens. Syntax:
//
//	sni <names...>
func (m *Matcher) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume matcher name
	if err := caddyopt.Strings(&m.Host).Read(d); err != nil {
		return err
	}
	return caddyopt.None(d)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Matcher)(nil)
	_ caddy.Validator       = (*Matcher)(nil)
	_ caddyfile.Unmarshaler = (*Matcher)(nil)
	_ listener.FlowMatcher  = (*Matcher)(nil)
)
