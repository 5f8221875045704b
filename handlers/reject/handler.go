// Package reject is the layer-4 handler that closes connections and drops UDP
// sessions, and tells nobody but the counters.
package reject

import (
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

func init() { caddy.RegisterModule(new(Handler)) }

// Handler closes a connection, or drops the datagrams of a UDP session,
// without a word to the client.
type Handler struct{}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.handlers.reject",
		New: func() caddy.Module { return new(Handler) },
	}
}

// UnmarshalJSON decodes the handler with errors that name the key.
func (h *Handler) UnmarshalJSON(b []byte) error {
	type plain Handler
	return strictjson.Unmarshal(b, (*plain)(h))
}

// Rejects implements listener.Rejecter.
func (*Handler) Rejects() {}

// ForwardUDP implements listener.Forwarder.
func (*Handler) ForwardUDP(o *udprelay.Opening, _ *listener.Place) udprelay.Decision {
	o.Reason = relay.Reject
	return udprelay.Refuse
}

// TCPDialer implements listener.Forwarder.
func (*Handler) TCPDialer(at *listener.Place) tcprelay.Dialer { return nowhere{at.Stats} }

// nowhere has no backend for any connection.
type nowhere struct{ stats *flow.Listener }

// Next implements tcprelay.Dialer.
func (nowhere) Next(_, _ netip.AddrPort, _ int, _ []*relay.Path) (tcprelay.Target, bool) {
	return tcprelay.Target{}, false
}

// GaveUp implements tcprelay.Dialer.
func (n nowhere) GaveUp(last *relay.Info, _ relay.Reason) {
	n.stats.Abandoned(false, last.Client.Addr())
}

// Handle ends a flow that other handlers have wrapped, or that comes from a
// server of another app, which closes it.
func (*Handler) Handle(cx *layer4.Connection, _ layer4.Handler) error {
	switch c := listener.ConnOf(cx); {
	case c != nil:
		c.End(relay.Rejected)
	case cx.RemoteAddr().Network() == "udp":
		flow.ListenerOf("layer4").Workers(1)[0].Dropped[relay.Reject].Add(1)
	default:
		flow.ListenerOf("layer4").Turned.Inc()
	}
	return nil
}

// Explain implements listener.Explainer.
func (*Handler) Explain(*listener.Question, string) listener.Account {
	return listener.Account{Rejects: true}
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	reject
func (*Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume handler name
	return caddyopt.None(d)
}

// Interface guards
var (
	_ caddyfile.Unmarshaler = (*Handler)(nil)
	_ layer4.NextHandler    = (*Handler)(nil)
	_ listener.Rejecter     = (*Handler)(nil)
	_ listener.Explainer    = (*Handler)(nil)
)
