// Package adminapi is the admin API of an instance. The module
// admin.api.wayhouse serves it on Caddy's admin endpoint, and the handler
// http.handlers.wayhouse_admin on any site of Caddy's http app, to whoever has
// a token.
package adminapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func init() { caddy.RegisterModule(new(API)) }

// API serves the calls. It has no state of its own: what it tells and changes
// belongs to the process.
type API struct{}

// CaddyModule returns the Caddy module information.
func (*API) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.wayhouse",
		New: func() caddy.Module { return new(API) },
	}
}

// Provision starts nothing. The context is the first that this process hears of
// a config, and tells what becomes of it. The endpoint stays that of this config
// also when it is refused, without our app perhaps, and then it has to have the
// metrics of the one that runs.
func (a *API) Provision(ctx caddy.Context) error {
	proxy.Follow(ctx)
	return metrics.Register(ctx.GetMetricsRegistry())
}

// call answers a request or says why not.
type call func(http.ResponseWriter, *http.Request) error

// calls are the paths and, by method, what answers there.
func (a *API) calls() map[string]map[string]call {
	return map[string]map[string]call{
		"/healthz":      {http.MethodGet: a.healthz},
		"/readyz":       {http.MethodGet: a.readyz},
		"/listeners":    {http.MethodGet: a.listeners},
		"/pools":        {http.MethodGet: a.pools},
		"/pools/{pool}": {http.MethodGet: a.pool},

		"/pools/{pool}/backends":        {http.MethodPost: a.addBackend},
		"/pools/{pool}/backends/{addr}": {http.MethodDelete: a.removeBackend, http.MethodPatch: a.setBackend},

		"/overlay": {http.MethodGet: a.overlay, http.MethodDelete: a.dropOverlay},

		"/sessions":         {http.MethodGet: a.sessions},
		"/sessions/{id}":    {http.MethodGet: a.session, http.MethodDelete: a.closeSession},
		"/sessions/resolve": {http.MethodGet: a.resolveSession},

		"/route-hint":           {http.MethodPost: a.pushHint},
		"/route-hints":          {http.MethodGet: a.hints},
		"/route-hints/{src_ip}": {http.MethodDelete: a.dropHint},

		"/admin/drain":   {http.MethodPost: a.drain},
		"/admin/undrain": {http.MethodPost: a.undrain},

		"/admin/overload": {http.MethodGet: a.overloadState, http.MethodPost: a.setOverload},

		"/wayhouse/config/last-rejected": {http.MethodGet: a.lastRejected},

		"/web": {http.MethodGet: a.web},

		"/explain": {http.MethodPost: a.explain},

		"/admin/reload":                   {http.MethodPost: a.reload},
		"/admin/sniffers":                 {http.MethodGet: a.sniffers, http.MethodPost: a.putSniffer},
		"/admin/sniffers/{name}":          {http.MethodDelete: a.deleteSniffer},
		"/admin/sniffers/{name}/rollback": {http.MethodPost: a.rollBackSniffer},
	}
}

// Routes implements caddy.AdminRouter.
func (a *API) Routes() []caddy.AdminRoute {
	var routes []caddy.AdminRoute
	for path, methods := range a.calls() {
		routes = append(routes, caddy.AdminRoute{Pattern: path, Handler: caddy.AdminHandlerFunc(
			func(w http.ResponseWriter, r *http.Request) error {
				serve(methods, w, r)
				return nil // answered here: a client's mistake is no error to log
			})})
	}
	return append(routes, loadRoute()...)
}

// plainMethod is the method of a request, GET for HEAD.
func plainMethod(r *http.Request) string {
	if r.Method == http.MethodHead {
		return http.MethodGet
	}
	return r.Method
}

func serve(methods map[string]call, w http.ResponseWriter, r *http.Request) {
	answer := methods[plainMethod(r)]
	if answer == nil {
		allowed := slices.Sorted(maps.Keys(methods))
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		fail(w, &problem{http.StatusMethodNotAllowed, fmt.Sprintf("%s is not allowed here", r.Method)})
		return
	}
	if e := r.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		fail(w, &problem{http.StatusUnsupportedMediaType, fmt.Sprintf("Content-Encoding: %.60q; send the body as it is", e)})
		return
	}
	if f := r.URL.Query().Get("format"); f != "" && f != "text" && f != "json" {
		fail(w, &problem{http.StatusBadRequest, fmt.Sprintf("format: %q is neither json nor text", f)})
		return
	}
	if config := proxy.Applied(); config.Hash != "" {
		w.Header().Set(configHeader, config.Hash)
	}
	if err := answer(w, r); err != nil {
		fail(w, err)
	}
}

// problem is an answer that is no success.
type problem struct {
	status int
	text   string
}

func (p *problem) Error() string { return p.text }

func fail(w http.ResponseWriter, err error) {
	p, ok := err.(*problem)
	if !ok {
		p = &problem{http.StatusInternalServerError, err.Error()}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(p.status)
	json.NewEncoder(w).Encode(struct {
		Error string `json:"error"`
	}{p.text})
}

func text(r *http.Request) bool { return r.URL.Query().Get("format") == "text" }

// knownParams refuses a query parameter that the call does not have: a filter
// with a typing error must not select everything.
func knownParams(q url.Values, known ...string) error {
	known = append(known, "format")
	for _, key := range slices.Sorted(maps.Keys(q)) {
		switch {
		case !slices.Contains(known, key):
			return &problem{http.StatusBadRequest, fmt.Sprintf("%s: no such parameter; there is %s", key, strings.Join(known, ", "))}
		case len(q[key]) > 1:
			return &problem{http.StatusBadRequest, fmt.Sprintf("%s: given %d times", key, len(q[key]))}
		}
	}
	return nil
}

// poolJSON is a pool as operators see it.
type poolJSON struct {
	Name     string        `json:"name"`
	Balancer string        `json:"balancer"`
	Source   string        `json:"source"`
	Backends []backendJSON `json:"backends"`
}

type backendJSON struct {
	Addr          string     `json:"addr"`
	Weight        uint32     `json:"weight"`
	Origin        string     `json:"origin"`
	Healthy       bool       `json:"healthy"`
	DomainDown    bool       `json:"domain_down"`
	State         string     `json:"state"`
	Active        int64      `json:"active"`
	SessionsTotal uint64     `json:"sessions_total"`
	LastCheck     *time.Time `json:"last_check"`
	LastError     string     `json:"last_error"`
}

func viewPool(p *pool.Pool) poolJSON {
	v := poolJSON{Name: p.Name(), Balancer: p.Policy(), Source: p.Discovery(), Backends: []backendJSON{}}
	for _, b := range p.Backends() {
		bv := backendJSON{
			Addr: b.Addr().String(), Weight: b.Weight(), Origin: b.Origin().String(), Healthy: b.Healthy(), State: b.State().String(),
			Active: b.Active(), SessionsTotal: b.Total(),
		}
		at, text := b.LastCheck()
		if !at.IsZero() {
			at = at.UTC()
			bv.LastCheck = &at
		}
		bv.LastError = text
		v.Backends = append(v.Backends, bv)
	}
	return v
}

func (p poolJSON) text(w http.ResponseWriter) {
	for _, b := range p.Backends {
		health := "healthy"
		if !b.Healthy {
			health = "unhealthy"
		}
		fmt.Fprintf(w, "pool=%s backend=%s %s state=%s weight=%d active=%d total=%d\n", p.Name, b.Addr, health, b.State, b.Weight, b.Active, b.SessionsTotal)
	}
}

func (a *API) pools(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	views := []poolJSON{}
	for p := range pool.All() {
		views = append(views, viewPool(p))
	}
	if text(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		for _, v := range views {
			v.text(w)
		}
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(views)
}

func (a *API) pool(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	name := r.PathValue("pool")
	if p := pool.Running(name); p != nil {
		v := viewPool(p)
		if text(r) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			v.text(w)
			return nil
		}
		w.Header().Set("Content-Type", "application/json")
		return json.NewEncoder(w).Encode(v)
	}
	return &problem{http.StatusNotFound, fmt.Sprintf("no pool is named %q", name)}
}
