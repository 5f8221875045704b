package pool

import (
	"errors"
	"net"
	"net/netip"
	"sync/atomic"

	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

var misfits = metrics.Counter("proxy_protocol_misfits_total", "Connections and UDP sessions refused because the pool's PROXY header is not for them.", "pool")

var errMisfit = errors.New("the backend expects a PROXY header that is not for flows of this kind")

// header is what backends of a pool, or a target, are told of a flow.
type header struct {
	pool string
	form proxyproto.Form
	host []byte // that the client has named

	trace []byte // that the flow's set-up is in
}

func headerOf(p *pool.Pool) *header { return &header{pool: p.Name(), form: p.Settings().Proxy} }

// fits reports whether flows of a kind may go where the header is expected. A
// backend that takes one from anybody would take it from a client.
func (h *header) fits(udp bool) bool {
	if proxyopt.Fits(h.form, udp) == nil {
		return true
	}
	misfits.WithLabelValues(h.pool).Inc()
	return false
}

// sent counts a flow that has the header.
func (h *header) sent() {
	if h.form.Version != proxyproto.None {
		pool.CountHeader(h.pool, h.form.Version)
	}
}

// of is the header for a connection's target, nil for none.
func (h *header) of() tcprelay.Header {
	if h.form.Version == proxyproto.None {
		return nil
	}
	return h
}

// with is the header for a connection whose client has named a host.
func (h *header) with(host []byte) (*header, bool) {
	if !h.form.Authority || len(host) == 0 {
		return h, false
	}
	own := *h
	own.host = append([]byte(nil), host...)
	return &own, true
}

// in is the header for a connection whose set-up is traced.
func (h *header) in(trace []byte) (*header, bool) {
	if !h.form.Trace || len(trace) == 0 {
		return h, false
	}
	own := *h
	own.trace = trace
	return &own, true
}

// AppendHeader implements tcprelay.Header.
func (h *header) AppendHeader(b []byte, id relay.ID, client, local netip.AddrPort) []byte {
	h.sent()
	f := proxyproto.Flow{Client: client, Local: local, Host: h.host, Trace: h.trace}
	if h.form.UniqueID {
		f.ID = id.AppendTo(nil)
	}
	return h.form.Append(b, &f)
}

// copied is the header of a flow that is copied here.
func (h *header) copied(cx *layer4.Connection, client, local netip.AddrPort) []byte {
	h.sent()
	f := proxyproto.Flow{Client: client, Local: local, Host: sniff.Of(cx).Known()}
	if c, ok := listener.ConnOf(cx).(interface{ ID() relay.ID }); ok {
		f.ID = c.ID().AppendTo(nil)
	}
	if c := listener.ConnOf(cx); c != nil {
		f.Trace = c.Setup().TraceParent()
		if !local.IsValid() {
			f.Local = c.Local()
		}
	}
	return h.form.Append(nil, &f)
}

// beginStream sends the header of a connection that is copied.
func (h *header) beginStream(cx *layer4.Connection, up net.Conn, client, local netip.AddrPort) error {
	if h.form.Version == proxyproto.None {
		return nil
	}
	_, err := up.Write(h.copied(cx, client, local))
	return err
}

// datagrams is up with headers in front of the datagrams to it.
func (h *header) datagrams(cx *layer4.Connection, up net.Conn, client, local netip.AddrPort) net.Conn {
	if h.form.Version == proxyproto.None {
		return up
	}
	c := &headedConn{Conn: up, form: h.form, head: h.copied(cx, client, local)}
	c.heading.Store(true)
	return c
}

// headedConn is a socket toward a backend of a session that is copied. One
// goroutine reads, another writes.
type headedConn struct {
	net.Conn
	form    proxyproto.Form
	head    []byte
	heading atomic.Bool
	buf     []byte // of Write
}

// Write sends a datagram behind its header, as long as there is one.
func (c *headedConn) Write(p []byte) (int, error) {
	if !c.heading.Load() {
		return c.Conn.Write(p)
	}
	c.buf = append(append(c.buf[:0], c.head...), p...)
	n, err := c.Conn.Write(c.buf)
	if err == nil && c.form.First() {
		c.heading.Store(false)
	}
	return max(n-len(c.head), 0), err
}

// Read takes a datagram, and its header off.
func (c *headedConn) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if err != nil {
			return n, err
		}
		if c.form.UntilReply() {
			c.heading.Store(false)
		}
		rest, ok := c.form.Answer(p[:n], c.head)
		if ok {
			return copy(p, rest), nil
		}
	}
}
