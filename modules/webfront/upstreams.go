// Package webfront lets Caddy's HTTP server use pools: as upstreams of
// reverse_proxy, and as the way to them.
package webfront

import (
	"errors"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func init() { caddy.RegisterModule(new(Upstreams)) }

// Upstreams are the backends of a pool that take new flows: enabled, and healthy
// by the pool's checks. Which of them gets a request is for reverse_proxy to say
// (lb_policy); one of a higher weight stands there more than once.
type Upstreams struct {
	// The name of the pool, which the app wayhouse has to have.
	Pool string `json:"pool,omitempty"`

	pool *pool.Pool
}

// CaddyModule returns the Caddy module information.
func (*Upstreams) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.upstreams.wayhouse",
		New: func() caddy.Module { return new(Upstreams) },
	}
}

// UnmarshalJSON decodes the upstreams with errors that name the key.
func (u *Upstreams) UnmarshalJSON(b []byte) error {
	type plain Upstreams
	return strictjson.Unmarshal(b, (*plain)(u))
}

// Provision finds the pool.
func (u *Upstreams) Provision(ctx caddy.Context) (err error) {
	if u.Pool == "" {
		return errors.New("pool: missing; give the name of a pool of the app wayhouse")
	}
	u.pool, err = named(ctx, u.Pool)
	return err
}

func named(ctx caddy.Context, name string) (*pool.Pool, error) {
	app, err := proxy.From(ctx)
	if err != nil {
		return nil, err
	}
	return app.Pool(name)
}

// poolVar is the variable of a request in which the transport finds the pool that
// its upstream is of.
const poolVar = "wayhouse.pool"

// maxShares bounds how often backends stand in the list, all together.
const maxShares = 1024

// GetUpstreams implements reverseproxy.UpstreamSource.
func (u *Upstreams) GetUpstreams(r *http.Request) ([]*reverseproxy.Upstream, error) {
	caddyhttp.SetVar(r.Context(), poolVar, u.pool)
	backends := u.pool.Taking()
	shares := sharesOf(backends)
	list := make([]*reverseproxy.Upstream, 0, len(backends))
	for i, b := range backends {
		for range shares[i] {
			list = append(list, &reverseproxy.Upstream{Dial: b.Addr().String()})
		}
	}
	return list, nil
}

// sharesOf are how often each backend stands in a list: by its weight, as long as
// that does not make it too long.
func sharesOf(backends []*pool.Backend) []uint64 {
	shares := make([]uint64, len(backends))
	var common, sum uint64
	for i, b := range backends {
		shares[i] = uint64(b.Weight())
		common = balancer.GCD(common, shares[i])
		sum += shares[i]
	}
	if sum == 0 {
		return shares
	}
	for i := range shares {
		if shares[i] /= common; sum/common > maxShares {
			shares[i] = max(shares[i]*maxShares/(sum/common), 1)
		}
	}
	return shares
}

// UnmarshalCaddyfile sets up the upstreams from Caddyfile tokens. Syntax:
//
//	dynamic wayhouse <pool>
func (u *Upstreams) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the module's name
	if !d.NextArg() {
		return d.Errf("dynamic wayhouse: the pool is missing, as in dynamic wayhouse panel")
	}
	u.Pool = d.Val()
	return caddyopt.None(d)
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Upstreams)(nil)
	_ caddyfile.Unmarshaler       = (*Upstreams)(nil)
	_ reverseproxy.UpstreamSource = (*Upstreams)(nil)
)
