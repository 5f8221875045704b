// Package routehint is the layer-4 handler that sends a flow to the pool that a
// launcher has pushed for its client.
package routehint

import (
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	poolhandler "github.com/wayhouse-proxy/wayhouse/handlers/pool"
	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/intent"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func init() { caddy.RegisterModule(new(Handler)) }

var applied = metrics.Counter("route_hints_applied_total", "Connections and UDP sessions that a route hint has sent to a pool.", "listener")

// Handler sends connections and UDP sessions to the pool of the route hint for
// their client's address, and lets those without one, or whose pool there no
// longer is, go on to the next route.
type Handler struct {
	pools map[string]*poolhandler.Handler
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.handlers.route_hint",
		New: func() caddy.Module { return new(Handler) },
	}
}

// UnmarshalJSON decodes the handler with errors that name the key.
func (h *Handler) UnmarshalJSON(b []byte) error {
	type plain Handler
	return strictjson.Unmarshal(b, (*plain)(h))
}

// Provision finds the pools that hints may name.
func (h *Handler) Provision(ctx caddy.Context) error {
	app, err := proxy.From(ctx)
	if err != nil {
		return err
	}
	h.pools = make(map[string]*poolhandler.Handler)
	for p := range app.NamedPools {
		h.pools[p.Name()] = poolhandler.New(p, "")
	}
	return nil
}

// Decide implements listener.Decider.
func (h *Handler) Decide(_ *layer4.Connection, c listener.Conn, _ bool) (listener.Forwarder, error) {
	return h.DecideAddr(c.Client(), c.Local(), c.Listener()), nil
}

// DecideAddr implements listener.AddrDecider.
func (h *Handler) DecideAddr(client, _ netip.AddrPort, name string) listener.Forwarder {
	if f := h.hinted(client.Addr(), name); f != nil {
		return f
	}
	return nil
}

// hinted is the way to the pool of a client's hint, nil without one.
func (h *Handler) hinted(client netip.Addr, listener string) *poolhandler.Handler {
	name, ok := intent.RouteHints.Get(client)
	if !ok {
		return nil
	}
	f := h.pools[name]
	if f != nil {
		applied.WithLabelValues(listener).Inc()
	}
	return f
}

// Handle sends on a flow that other handlers have wrapped, or that comes from a
// server of another app.
func (h *Handler) Handle(cx *layer4.Connection, next layer4.Handler) error {
	name, client := "layer4", netip.AddrPort{}
	if c := listener.ConnOf(cx); c != nil {
		name, client = c.Listener(), c.Client()
	} else {
		client = flowaddr.Of(cx.RemoteAddr())
	}
	if f := h.hinted(client.Addr(), name); f != nil {
		return f.Handle(cx, next)
	}
	return next.Handle(cx)
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	route_hint
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume handler name
	return caddyopt.None(d)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Handler)(nil)
	_ caddyfile.Unmarshaler = (*Handler)(nil)
	_ listener.AddrDecider  = (*Handler)(nil)
)
