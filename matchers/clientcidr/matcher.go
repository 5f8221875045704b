// Package clientcidr matches flows by the network that the client's address is
// in.
package clientcidr

import (
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/netlist"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

func init() { caddy.RegisterModule(new(Matcher)) }

// Matcher matches clients by their address.
type Matcher struct{ netlist.List }

// CaddyModule returns the Caddy module information.
func (*Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.matchers.client_cidr",
		New: func() caddy.Module { return new(Matcher) },
	}
}

// UnmarshalJSON decodes the matcher with errors that name the key.
func (m *Matcher) UnmarshalJSON(b []byte) error {
	type plain Matcher
	return strictjson.Unmarshal(b, (*plain)(m))
}

// MatchAddr implements listener.AddrMatcher.
func (m *Matcher) MatchAddr(client, _ netip.AddrPort) bool { return m.Contains(client.Addr()) }

// Match implements layer4.ConnMatcher.
func (m *Matcher) Match(cx *layer4.Connection) (bool, error) {
	return m.Contains(flowaddr.Of(cx.RemoteAddr()).Addr()), nil
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Matcher)(nil)
	_ caddy.Validator       = (*Matcher)(nil)
	_ caddyfile.Unmarshaler = (*Matcher)(nil)
	_ listener.AddrMatcher  = (*Matcher)(nil)
)
