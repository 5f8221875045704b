// Package pool is the layer-4 handler that sends a flow to a backend of a
// pool. A flow that comes straight from a listener is handed to the engines
// and pumped there; one that an earlier handler has wrapped (tls, throttle, …)
// is copied by goroutines, in copy.go.
package pool

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func init() { caddy.RegisterModule(new(Handler)) }

// Handler sends connections and UDP sessions to a backend of a pool, named or
// given here with the same options as a pool of the wayhouse app.
type Handler struct {
	// The name of a pool of the wayhouse app. Refused beside options of a pool
	// given here.
	Pool string `json:"pool,omitempty"`

	// Companion routing, for UDP: a session goes to the backend that the same
	// source address uses on a TCP listener. Default: none.
	Follow *Follow `json:"follow,omitempty"`

	// The port of the backend, by the port that the client has hit, for listeners
	// with several: "same" is that port, "offset N" is N more, which may be
	// negative, and a list has a port for each that the listener has, in their
	// order, with ranges as "30000-30099". Health, limits and counts stay those of
	// the backend as it is configured. Default: the backend's own.
	TargetPort *TargetPort `json:"target_port,omitempty"`

	pool.Config

	ports    *portMap // of TargetPort, nil without
	pool     *pool.Pool
	header   *header
	resolver string // that chooses the pool, "" without
	logger   *zap.Logger

	mu    sync.Mutex // taken to add to paths
	paths atomic.Pointer[map[pathKey]*relay.Path]
}

type pathKey struct {
	at      *listener.Place
	backend *pool.Backend
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.handlers.pool",
		New: func() caddy.Module { return new(Handler) },
	}
}

// UnmarshalJSON decodes the handler with errors that name the key.
func (h *Handler) UnmarshalJSON(b []byte) error {
	type plain Handler
	return strictjson.Unmarshal(b, (*plain)(h))
}

// Provision finds the pool.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	h.paths.Store(&map[pathKey]*relay.Path{})
	app, err := proxy.From(ctx)
	if err != nil {
		return err
	}
	inline := !reflect.ValueOf(h.Config).IsZero()
	switch {
	case h.Pool != "" && inline:
		return fmt.Errorf("pool: %q is named and options of a pool are given too: name one or give one", h.Pool)
	case h.Pool == "" && !inline:
		return errors.New("pool: neither a name nor targets: write {\"pool\": \"NAME\"} or {\"targets\": [\"ip:port\"]}")
	case inline:
		h.pool, err = app.InlinePool(&h.Config)
	default:
		h.pool, err = app.Pool(h.Pool)
	}
	if err == nil && h.TargetPort != nil {
		if h.ports, err = h.TargetPort.portsOf(listener.PortsOf(ctx)); err != nil {
			return fmt.Errorf("target_port: %w", err)
		}
	}
	if err != nil {
		return err
	}
	h.header = headerOf(h.pool)
	listener.Met(ctx, h)
	if h.Follow == nil {
		return nil
	}
	if err := h.Follow.provision(app); err != nil {
		return fmt.Errorf("follow.%w", err)
	}
	return nil
}

// Cleanup gives back what Provision took.
func (h *Handler) Cleanup() error {
	if h.Follow != nil {
		h.Follow.cleanup()
	}
	return nil
}

// Validate checks nothing: Provision has, and the options of a named pool,
// which are not here, must not be found missing.
func (h *Handler) Validate() error { return nil }

// UsedPool is the pool that flows go to, for the checks of the app.
func (h *Handler) UsedPool() *pool.Pool { return h.pool }

// UsedHeader is the header that backends get, and where it is configured.
func (h *Handler) UsedHeader() (path string, form proxyproto.Form) {
	return "pools." + h.pool.Name(), h.header.form
}

// path is what flows at a place to a backend share. Those of backends that have
// left the pool are forgotten when one is added.
func (h *Handler) path(at *listener.Place, b *pool.Backend) *relay.Path {
	key := pathKey{at, b}
	if p := (*h.paths.Load())[key]; p != nil {
		return p
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	old := *h.paths.Load()
	if p := old[key]; p != nil {
		return p
	}
	live := make(map[*pool.Backend]bool)
	for _, b := range h.pool.Backends() {
		live[b] = true
	}
	paths := make(map[pathKey]*relay.Path, len(old)+1)
	for k, p := range old {
		if live[k.backend] {
			paths[k] = p
		}
	}
	p := newPath(h.pool, b, at, h.ports, h.resolver)
	paths[key] = p
	h.paths.Store(&paths)
	return p
}

func newPath(p *pool.Pool, b *pool.Backend, at *listener.Place, ports *portMap, resolver string) *relay.Path {
	s, stats := p.Settings(), at.Stats
	w := &owner{backend: b, pool: p.Name(), ports: ports, stats: stats, tracked: stats.Tracked()}
	path := &relay.Path{
		Listener: at.Listener, Route: at.Route, Resolver: resolver, Pool: p.Name(), Backend: b.Addr(),
		Transparent: at.Transparent, Mapped: ports != nil,
		Idle: s.IdleTimeout, Lifetime: s.MaxLifetime,
		Counters: at.Counters, Owner: w, Opened: stats.Opened, Proxy: s.Proxy,
	}
	if w.tracked {
		path.Opened = func(i *relay.Info) {
			if !i.ID.UDP() {
				stats.Reached(i.Client.Addr(), b.Addr())
			}
			stats.Opened(i)
		}
	}
	return path
}

// Handle gives a connection that has come through other handlers, or from a
// server of another app, to a backend.
func (h *Handler) Handle(cx *layer4.Connection, _ layer4.Handler) error {
	switch c := listener.Socket(cx).(type) {
	case *listener.TCPConn:
		prefix := append([]byte(nil), cx.MatchingBytes()...)
		c.ForwardTCP(prefix, listener.Hosted(h.TCPDialer(c.Place()), sniff.Of(cx).Known()))
		return nil
	case *listener.UDPConn:
		return h.copyDatagrams(cx, c.Place(), c.Client(), c.Local())
	}
	at := foreign
	if c := listener.ConnOf(cx); c != nil {
		at = c.Place()
	}
	client, local := addrPort(cx.RemoteAddr()), addrPort(cx.LocalAddr())
	// The local address may be that of a network of Caddy's, such as ours.
	if cx.RemoteAddr().Network() == "udp" {
		return h.copyDatagrams(cx, at, client, local)
	}
	return h.copyStream(cx, at, client, local)
}

// foreign is the place of flows that come from servers of other apps.
var foreign = &listener.Place{
	Listener: "layer4", Route: -1, Stats: flow.ListenerOf("layer4"), Counters: flow.ListenerOf("layer4").Workers(1),
}

func addrPort(a interface{ String() string }) netip.AddrPort {
	ap, _ := netip.ParseAddrPort(a.String())
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// Interface guards
var (
	_ caddy.Provisioner  = (*Handler)(nil)
	_ caddy.CleanerUpper = (*Handler)(nil)
	_ layer4.NextHandler = (*Handler)(nil)
	_ listener.Forwarder = (*Handler)(nil)
	_ listener.Rehomer   = (*owner)(nil)
)
