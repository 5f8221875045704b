package webfront

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// connect gets a connection to the backend at an address, or to one that the
// pool's balancer chooses when it has none there.
func connect(ctx context.Context, p *pool.Pool, address string) (net.Conn, error) {
	f := flowOf(ctx)
	if addr, err := netip.ParseAddrPort(address); err == nil {
		addr = netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
		if b, r := p.PickAddr(addr); b != nil {
			return open(ctx, p, b, f)
		} else if r == pool.AtCapacity {
			return nil, fmt.Errorf("%v of pool %s is at a limit", addr, p.Name())
		}
		if p.Has(addr) {
			return nil, fmt.Errorf("%v of pool %s takes no new connections", addr, p.Name())
		}
	}
	var tried []netip.AddrPort
	var last error
	for range p.Settings().MaxTries {
		b, r := p.Pick(f, tried)
		if b == nil {
			if last == nil {
				last = fmt.Errorf("pool %s: %v", p.Name(), r)
			}
			break
		}
		c, err := open(ctx, p, b, f)
		if err == nil {
			return c, nil
		}
		if last = err; ctx.Err() != nil {
			break
		}
		tried = append(tried, b.Addr())
	}
	return nil, last
}

// flowOf is the request's client, and the address of ours that it has come to.
func flowOf(ctx context.Context) (f balancer.Flow) {
	if i, ok := caddyhttp.GetVar(ctx, clientVar).(reverseproxy.ProxyProtocolInfo); ok {
		f.Client = netip.AddrPortFrom(i.AddrPort.Addr().Unmap().WithZone(""), i.AddrPort.Port())
	}
	if a, ok := ctx.Value(http.LocalAddrContextKey).(net.Addr); ok {
		f.Local = flowaddr.Of(a)
	}
	return f
}

// open connects to a backend at which a place was taken; the connection gives it
// back.
func open(ctx context.Context, p *pool.Pool, b *pool.Backend, f balancer.Flow) (net.Conn, error) {
	s := p.Settings()
	d := net.Dialer{Timeout: s.ConnectTimeout, KeepAlive: s.Keepalive}
	if s.Keepalive == 0 {
		d.KeepAlive = -1
	}
	if a := p.Source(b.Addr().Addr()); a.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0))
	}
	c, err := d.DialContext(ctx, "tcp", b.Addr().String())
	if err != nil {
		b.Release()
		if ctx.Err() == nil {
			b.Passive(failureOf(err))
		}
		return nil, err
	}
	t := c.(*net.TCPConn)
	if !s.NoDelay {
		_ = t.SetNoDelay(false) // it works all the same
	}
	if form := s.Proxy; form.Version != proxyproto.None {
		head := form.Append(nil, &proxyproto.Flow{Client: f.Client, Local: f.Local})
		if _, err := t.Write(head); err != nil {
			t.Close()
			b.Release()
			return nil, err
		}
		pool.CountHeader(p.Name(), form.Version)
	}
	return &conn{TCPConn: t, backend: b}, nil
}

func failureOf(err error) relay.Failure {
	var errno syscall.Errno
	var t net.Error
	switch {
	case errors.As(err, &errno):
		return relay.ConnectFailure(errno)
	case errors.As(err, &t) && t.Timeout():
		return relay.Timeout
	}
	return relay.Unreachable
}

// conn is a connection that has a place at a backend.
type conn struct {
	*net.TCPConn
	backend  *pool.Backend
	answered atomic.Bool
	over     sync.Once
}

// Read implements net.Conn, and tells the backend's first sign of life.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.TCPConn.Read(p)
	switch {
	case c.answered.Load():
	case n > 0:
		if c.answered.CompareAndSwap(false, true) {
			c.backend.PassiveOK()
		}
	case errors.Is(err, syscall.ECONNRESET):
		if c.answered.CompareAndSwap(false, true) {
			c.backend.Passive(relay.EarlyReset)
		}
	}
	return n, err
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.over.Do(c.backend.Release)
	return c.TCPConn.Close()
}
