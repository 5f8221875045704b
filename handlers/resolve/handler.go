// Package resolve is the layer-4 handler that asks a resolver where a flow
// goes. The flow waits where it is: its bytes stay in the socket, or its
// datagrams within the limits of pending sessions.
package resolve

import (
	"context"
	"errors"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	poolhandler "github.com/wayhouse-proxy/wayhouse/handlers/pool"
	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
	"github.com/wayhouse-proxy/wayhouse/modules/resolver"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

func init() { caddy.RegisterModule(new(Handler)) }

// Handler sends connections and UDP sessions where a resolver says: to a pool
// of the wayhouse app, or to an address.
type Handler struct {
	// The name of a resolver of the wayhouse app.
	Resolver string `json:"resolver,omitempty"`

	host  *resolver.Host
	pools map[string]*poolhandler.Handler
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.handlers.resolve",
		New: func() caddy.Module { return new(Handler) },
	}
}

// UnmarshalJSON decodes the handler with errors that name the key.
func (h *Handler) UnmarshalJSON(b []byte) error {
	type plain Handler
	return strictjson.Unmarshal(b, (*plain)(h))
}

// Provision finds the resolver.
func (h *Handler) Provision(ctx caddy.Context) error {
	if h.Resolver == "" {
		return errors.New(`resolver: none is named: write {"resolver": "NAME"}`)
	}
	app, err := proxy.From(ctx)
	if err != nil {
		return err
	}
	if h.host, err = app.Resolver(h.Resolver); err != nil {
		return err
	}
	h.pools = make(map[string]*poolhandler.Handler)
	for p := range app.NamedPools {
		h.pools[p.Name()] = poolhandler.New(p, h.Resolver)
	}
	listener.Met(ctx, h)
	return nil
}

// UsedHeader is the header that targets get, and where it is configured.
func (h *Handler) UsedHeader() (path string, form proxyproto.Form) {
	return "resolvers." + h.Resolver, h.host.Settings().Proxy()
}

// targetPool stands for the pool of flows to a target.
const targetPool = "(resolver target)"

// Decide implements listener.Decider.
func (h *Handler) Decide(cx *layer4.Connection, c listener.Conn, final bool) (listener.Forwarder, error) {
	r, more := h.request(cx, c)
	if more && !final {
		return nil, layer4.ErrConsumedAllPrefetchedBytes
	}
	s := h.host.Settings()
	a, err := h.ask(c, r)
	switch {
	case err != nil && s.OnError == resolver.FallbackRoute:
		return nil, nil
	case err != nil:
		return nil, err
	case a.Target.IsValid():
		return &poolhandler.Direct{
			Resolver: h.Resolver, Name: targetPool, To: a.Target,
			ConnectTimeout: time.Duration(*s.TargetConnectTimeout), IdleTimeout: time.Duration(*s.TargetIdleTimeout), Proxy: s.Proxy(),
		}, nil
	}
	return h.pools[a.Pool], nil
}

// ask asks the resolver, in a span of the flow's set-up.
func (h *Handler) ask(c listener.Conn, r *resolver.Request) (resolver.Answer, error) {
	var setup *tracing.Setup
	if c != nil {
		setup = c.Setup()
	}
	parent, end := setup.Call(h.Resolver)
	r.TraceParent = parent
	a, err := h.host.Resolve(r)
	switch {
	case err == nil:
		end("ok")
	case errors.Is(err, resolver.ErrNoPlace):
		end("empty")
	case errors.Is(err, context.DeadlineExceeded):
		end("timeout")
	default:
		end("error")
	}
	return a, err
}

// Handle asks for a flow that other handlers have wrapped, or that comes from a
// server of another app. No more bytes are waited for.
func (h *Handler) Handle(cx *layer4.Connection, next layer4.Handler) error {
	f, err := h.Decide(cx, listener.ConnOf(cx), true)
	switch {
	case err != nil:
		return err
	case f == nil:
		return next.Handle(cx)
	}
	return f.Handle(cx, next)
}

// foreign is the listener of flows that come from servers of other apps.
const foreign = "layer4"

// request is what is known of a flow, and whether more bytes could tell what
// the resolver should be told.
func (h *Handler) request(cx *layer4.Connection, c listener.Conn) (r *resolver.Request, more bool) {
	first := sniff.Of(cx)
	in := first.Input()
	r = &resolver.Request{FirstBytes: in.Bytes[:min(len(in.Bytes), mostFirstBytes)]}
	if c == nil {
		r.Listener, r.Client, r.Local = foreign, flowaddr.Of(cx.RemoteAddr()), flowaddr.Of(cx.LocalAddr())
	} else {
		r.Listener, r.Client, r.Local = c.Listener(), c.Client(), c.Local()
	}
	s := h.host.Settings()
	name, v := first.ServerName()
	r.SNI = string(name)
	more = v == sniff.Undecided && s.Needs(resolver.PartSNI)
	winner, v, hint := first.Decide()
	more = more || v == sniff.Undecided && s.Needs(resolver.PartRoutingKey)
	switch {
	case winner == nil:
	case hint.HasHost: // which says more than the name of a protocol
		r.RoutingKey = string(hint.Host)
	case hint.HasKey:
		r.RoutingKey = string(hint.Key)
	}
	more = more || !in.UDP() && len(in.Bytes) < s.FirstBytes()
	return r, more
}

// mostFirstBytes is what a listener may peek of a connection; of a datagram no
// more is sent either.
const mostFirstBytes = layer4.MaxMatchingBytes

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	resolve <resolver>
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume handler name
	if !d.NextArg() {
		return d.Errf("resolve: the name of a resolver is missing, as in resolve matchmaker")
	}
	h.Resolver = d.Val()
	return caddyopt.BlockOf(d, "resolve "+h.Resolver, nil)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Handler)(nil)
	_ caddyfile.Unmarshaler = (*Handler)(nil)
	_ listener.Decider      = (*Handler)(nil)
)
