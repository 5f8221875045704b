package webfront

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
	"unsafe"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

func init() { caddy.RegisterModule(new(Transport)) }

// Transport is Caddy's HTTP transport whose connections are flows of a pool: they
// count against its limits, what becomes of them tells of a backend's health, and
// they come from its source addresses, with its PROXY header and its connect
// timeout and keepalive. TLS, HTTP versions and the reuse of connections are as in
// Caddy's transport, with its options.
//
// An upstream that is a backend of the pool gets the connection itself. Any other
// name stands for the whole pool: its balancer chooses, and when a connect fails
// another backend is tried, up to max_tries.
type Transport struct {
	// The pool. It may be left out with the upstreams of dynamic wayhouse, whose
	// pool it is then.
	Pool string `json:"pool,omitempty"`

	reverseproxy.HTTPTransport

	pool *pool.Pool
}

// CaddyModule returns the Caddy module information.
func (*Transport) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.transport.wayhouse",
		New: func() caddy.Module { return new(Transport) },
	}
}

// What the pool says is not said twice, and what would lead past it is refused.
func (t *Transport) refused() error {
	for _, o := range []struct {
		set       bool
		name, why string
	}{
		{t.ProxyProtocol != "", "proxy_protocol", "the pool says which header its backends get"},
		{t.DialTimeout != 0, "dial_timeout", "the pool has connect_timeout"},
		{t.FallbackDelay != 0, "dial_fallback_delay", "backends of a pool are single addresses"},
		{t.LocalAddress != "", "local_address", "the pool has source_addresses"},
		{t.Resolver != nil, "resolver", "the pool resolves its targets"},
		{t.ForwardProxyURL != "", "forward_proxy_url", "the connection would not be the pool's"},
		{len(t.NetworkProxyRaw) > 0, "network_proxy", "the connection would not be the pool's"},
		{t.ReadTimeout != 0, "read_timeout", "the pool has idle_timeout"},
		{t.WriteTimeout != 0, "write_timeout", "the pool has idle_timeout"},
		{len(t.Versions) == 1 && t.Versions[0] == "3", "versions", "the pool's connections are TCP, and HTTP/3 is not"},
	} {
		if o.set {
			return fmt.Errorf("%s: leave it out: %s", o.name, o.why)
		}
	}
	return nil
}

// Provision sets up Caddy's transport with connections of the pool.
func (t *Transport) Provision(ctx caddy.Context) (err error) {
	if err := t.refused(); err != nil {
		return err
	}
	if t.Pool != "" {
		if t.pool, err = named(ctx, t.Pool); err != nil {
			return err
		}
		if err := fits(t.pool); err != nil {
			return err
		}
	}
	if err := t.HTTPTransport.Provision(ctx); err != nil {
		return err
	}
	rt := t.HTTPTransport.Transport
	rt.Proxy = nil
	rt.DialContext = t.dial
	rt.DialTLSContext = t.dialTLS
	return nil
}

// fits refuses a pool whose header is for datagrams.
func fits(p *pool.Pool) error {
	if v := p.Settings().Proxy.Version; v.UDP() {
		return fmt.Errorf("pool: %s has proxy_protocol %v, which is for datagrams", p.Name(), v)
	}
	return nil
}

// RoundTrip implements http.RoundTripper.
func (t *Transport) RoundTrip(r *http.Request) (*http.Response, error) {
	t.SetScheme(r)
	if p := t.poolOf(r.Context()); p != nil && p.Settings().Proxy.Version != proxyproto.None {
		r = ofOneClient(r)
	}
	return t.HTTPTransport.Transport.RoundTrip(r)
}

// ofOneClient gives a request a host by which it shares connections with those of
// the same client alone: the header on one tells who that is.
func ofOneClient(r *http.Request) *http.Request {
	own := r.WithContext(r.Context())
	u := *r.URL
	u.Host = url.QueryEscape(flowOf(r.Context()).Client.String() + "->" + r.URL.Host)
	if own.Host == "" {
		own.Host = r.URL.Host
	}
	own.URL = &u
	return own
}

// poolOf is the pool of a request, nil when none is named.
func (t *Transport) poolOf(ctx context.Context) *pool.Pool {
	if t.pool != nil {
		return t.pool
	}
	p, _ := caddyhttp.GetVar(ctx, poolVar).(*pool.Pool)
	return p
}

// dial gets a connection of the pool.
func (t *Transport) dial(ctx context.Context, _, address string) (net.Conn, error) {
	p := t.poolOf(ctx)
	if p == nil {
		return nil, dialError(errors.New("transport wayhouse: no pool: name one, or take the upstreams from dynamic wayhouse"))
	}
	if err := fits(p); err != nil {
		return nil, dialError(err)
	}
	if info, ok := reverseproxy.GetDialInfo(ctx); ok {
		address = info.Address
	}
	c, err := connect(ctx, p, address)
	if err != nil {
		return nil, dialError(err)
	}
	return c, nil
}

// dialError says that nothing has been sent yet, so that any request may be tried
// again. Only Caddy's own package can make such an error in Go; it is a struct of
// one interface, as TestDialError holds.
func dialError(err error) error {
	var d reverseproxy.DialError
	*(*error)(unsafe.Pointer(&d)) = err
	return d
}

// The variables of Caddy's reverse proxy that its own transport looks at.
const (
	clientVar = "reverse_proxy.proxy_protocol_info"
	h1OnlyVar = "reverse_proxy.tls_h1_only"
)

func (t *Transport) dialTLS(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := t.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	conf := t.HTTPTransport.Transport.TLSClientConfig.Clone()
	if repl, ok := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok && strings.Contains(conf.ServerName, "{") {
		conf.ServerName = repl.ReplaceAll(conf.ServerName, "")
	}
	if conf.ServerName == "" {
		conf.ServerName, _, _ = net.SplitHostPort(c.RemoteAddr().String())
	}
	if caddyhttp.GetVar(ctx, h1OnlyVar) == true {
		conf.NextProtos = nil
	}
	limit := t.HTTPTransport.Transport.TLSHandshakeTimeout
	if limit == 0 {
		limit = handshakeTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	s := tls.Client(c, conf)
	if err := s.HandshakeContext(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// handshakeTimeout is for a transport that says nothing.
const handshakeTimeout = 10 * time.Second

// UnmarshalCaddyfile sets up the transport from Caddyfile tokens; the options are
// those of transport http. Syntax:
//
//	transport wayhouse [<pool>] {
//		...
//	}
func (t *Transport) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the transport's name
	name := d.Token()
	if d.NextArg() {
		t.Pool = d.Val()
		if d.NextArg() {
			return d.Errf("transport wayhouse: %q is one argument too many; it takes the name of a pool", d.Val())
		}
	}
	block := []caddyfile.Token{name}
	for d.NextBlock(0) {
		block = append(block, d.NextSegment()...)
	}
	if len(block) > 1 {
		open, end := name, d.Token()
		open.Text, end.Text = "{", "}"
		block = append(append([]caddyfile.Token{name, open}, block[1:]...), end)
	}
	return t.HTTPTransport.UnmarshalCaddyfile(caddyfile.NewDispenser(block))
}

// Interface guards
var (
	_ caddy.Provisioner                                = (*Transport)(nil)
	_ caddy.CleanerUpper                               = (*Transport)(nil)
	_ caddyfile.Unmarshaler                            = (*Transport)(nil)
	_ http.RoundTripper                                = (*Transport)(nil)
	_ reverseproxy.TLSTransport                        = (*Transport)(nil)
	_ reverseproxy.H2CTransport                        = (*Transport)(nil)
	_ reverseproxy.HealthCheckSchemeOverriderTransport = (*Transport)(nil)
)
