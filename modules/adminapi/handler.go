package adminapi

import (
	"errors"
	"fmt"
	"net/http"
	"path"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

func init() { caddy.RegisterModule(new(Handler)) }

// Handler is the admin API on a site of Caddy's http app: the same calls as at
// Caddy's admin endpoint, and GET /metrics, for whoever has a token. It answers
// every request that it is given. Below a path, take its prefix away first, as
// handle_path does.
type Handler struct {
	// Who may ask. A site that is reached from other hosts needs at least one.
	// Default: none, on a site that listens on loopback or a unix socket only.
	Tokens []*Token `json:"tokens,omitempty"`

	// Answer everybody who reaches the site, although other hosts do. It is not
	// for a site with tokens. Default: false.
	InsecureNoAuth bool `json:"insecure_no_auth,omitempty"`

	guard guard
	mux   *http.ServeMux
	calls map[string]map[string]call // by the patterns of mux
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.wayhouse_admin",
		New: func() caddy.Module { return new(Handler) },
	}
}

// Provision reads the tokens and refuses a site that anybody could use.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.guard = guard{logger: ctx.Logger()}
	srv, _ := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	elsewhere := foreignAddress(srv)
	switch {
	case len(h.Tokens) > 0 && h.InsecureNoAuth:
		return errors.New("insecure_no_auth: there are tokens too; leave one of the two out")
	case len(h.Tokens) == 0 && !h.InsecureNoAuth && elsewhere != "":
		return fmt.Errorf("tokens: none, and the site listens on %s, which is not loopback alone: give a token, bind the site to localhost, or say insecure_no_auth", elsewhere)
	}
	for i, t := range h.Tokens {
		if t == nil {
			return fmt.Errorf("tokens[%d]: is null", i)
		}
		s, err := t.secret()
		if err != nil {
			return fmt.Errorf("tokens[%d].%w", i, err)
		}
		if twin := h.guard.add(s); twin >= 0 {
			return fmt.Errorf("tokens[%d].token: the same as that of tokens[%d]", i, twin)
		}
	}
	h.guard.loopback = elsewhere == "" && !onlySockets(srv)
	switch {
	case h.InsecureNoAuth && elsewhere != "":
		h.guard.logger.Warn("the admin API has no login on a site that other hosts may reach", zap.String("local", elsewhere))
	case len(h.Tokens) > 0 && elsewhere != "" && (srv == nil || len(srv.TLSConnPolicies) == 0):
		h.guard.logger.Warn("tokens of the admin API are sent without TLS on a site that other hosts may reach", zap.String("local", elsewhere))
	}
	reg := ctx.GetMetricsRegistry()
	if err := metrics.Register(reg); err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	h.calls = new(API).calls()
	scrape := promhttp.HandlerFor(reg, promhttp.HandlerOpts{EnableOpenMetrics: true})
	h.calls["/metrics"] = map[string]call{http.MethodGet: func(w http.ResponseWriter, r *http.Request) error {
		scrape.ServeHTTP(w, r)
		return nil
	}}
	h.mux = http.NewServeMux()
	for pattern, methods := range h.calls {
		h.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { serve(methods, w, r) })
	}
	return nil
}

// foreignAddress is an address of a server at which other hosts reach it, or
// may for all that is known; "" when there is none.
func foreignAddress(srv *caddyhttp.Server) string {
	if srv == nil || len(srv.Listen) == 0 {
		return "an address that is not known here"
	}
	for _, s := range srv.Listen {
		if a, err := caddy.ParseNetworkAddress(s); err != nil || !local(a) {
			return s
		}
	}
	return ""
}

// local reports whether only this host reaches an address.
func local(a caddy.NetworkAddress) bool {
	switch a.Network {
	case "tcp", "tcp4", "tcp6", "udp", "udp4", "udp6":
		return hostport.Loopback(a.Host)
	}
	return a.IsUnixNetwork()
}

// onlySockets reports whether all addresses of a server are unix sockets, to
// which no browser is led by a name.
func onlySockets(srv *caddyhttp.Server) bool {
	for _, s := range srv.Listen {
		if a, err := caddy.ParseNetworkAddress(s); err != nil || !a.IsUnixNetwork() {
			return false
		}
	}
	return true
}

// bodyTime is how long a body may take to arrive.
const bodyTime = 30 * time.Second

// ServeHTTP answers. What the path and the method would do is told to nobody
// who may not ask at all.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	pattern := h.pattern(r)
	_, exists := h.calls[pattern][plainMethod(r)]
	need := roleOf(pattern, plainMethod(r))
	if !exists || need > nobody {
		who, role, err := h.guard.admit(w, r)
		switch {
		case err != nil:
			fail(w, err)
			return nil
		case pattern == "":
			fail(w, &problem{http.StatusNotFound, "there is no such call"})
			return nil
		case exists && role < need:
			refused.WithLabelValues("role").Inc()
			fail(w, &problem{http.StatusForbidden, fmt.Sprintf("the token has the role %s, and this needs %s", role, need)})
			return nil
		}
		r = who.from(r)
	}
	limitBody(w, r)
	h.mux.ServeHTTP(w, r)
	return nil
}

// pattern is which call a request is for; "": none. Paths are taken as they
// are: nothing is cleaned, and nobody is sent elsewhere.
func (h *Handler) pattern(r *http.Request) string {
	if p := r.URL.EscapedPath(); !path.IsAbs(p) || path.Clean(p) != p {
		return ""
	}
	_, pattern := h.mux.Handler(r)
	return pattern
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
