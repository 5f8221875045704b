package listener

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

// connVar is the variable in which handlers find the client's connection
// behind what earlier handlers have wrapped around it.
const connVar = "wayhouse.conn"

// Conn is a client's connection or session in a goroutine: a *TCPConn or a
// *UDPConn.
type Conn interface {
	net.Conn
	Client() netip.AddrPort
	Local() netip.AddrPort // the address of ours the client spoke to
	Listener() string
	Place() *Place // nil while the route is being decided
	Engines() *Engines
	Setup() *tracing.Setup // nil while that is not traced
	SetPath(*relay.Path)   // what operators see of it from now on
	End(relay.Reason)      // Close, and say why
}

// ConnOf is the client's connection behind cx, nil outside a Wayhouse listener.
func ConnOf(cx *layer4.Connection) Conn {
	c, _ := cx.GetVar(connVar).(Conn)
	return c
}

// Socket is the client's connection when nothing that a handler put in between
// changes its bytes, else nil. What cx has buffered is no longer in the socket.
func Socket(cx *layer4.Connection) net.Conn {
	switch c := cx.Conn.(type) {
	case unread:
		return Socket(c.cx)
	case *TCPConn, *UDPConn:
		return c
	}
	return nil
}

// serveTCP sees a connection handled. w is the walk that has begun to decide
// its route on a worker; nil: none has.
func (v *view) serveTCP(fd int, client, local netip.AddrPort, w *walk, age time.Duration) {
	c, err := takeTCP(fd, client, local, v, age)
	if err != nil {
		v.stats.Abandoned(false, client.Addr())
		if held, ok := acceptLog.allow(); ok {
			v.logger.Warn("taking a connection failed", zap.Stringer("remote", client), zap.Error(err), zap.Int64("suppressed", held))
		}
		return
	}
	c.traced(w != nil && age > 0)
	if len(v.routes) == 0 {
		v.offer(c)
		return
	}
	given := false
	defer func() {
		if !given {
			c.Close() // nothing, when it was detached
		}
	}()
	defer v.contain(client, func() { c.because(relay.Error) })
	if w == nil {
		w = newWalk(v, nil, nil, client, local, time.Time{})
		w.show(nil)
	}
	w.goOn(c)
	for {
		s, err := w.next()
		switch s {
		case atForwarder:
			v.stats.Accepted.Inc()
			c.steps.matched(c.setupSpan)
			c.place.Store(w.place)
			c.ForwardTCP(nil, Hosted(w.to.TCPDialer(w.place), w.first.Known()))
			return
		case atReject, atEnd:
			v.unmatched(client, err)
			c.steps.matched(c.setupSpan)
			switch {
			case w.handled: // a handler has had it
			case s == atReject:
				c.turnAway(v.stats.Rejected, relay.SnifferReject)
			default:
				c.turnAway(v.stats.NoRoute, relay.NoRoute)
			}
			return
		}
		r := v.routes[w.at]
		c.steps.matched(c.setupSpan)
		if r.rejects && !w.handled {
			c.turnAway(v.stats.Turned, relay.Reject)
			return
		}
		c.place.Store(v.places[w.at])
		if r.front.name != "" && !w.handled {
			given = true
			v.give(c, r.front)
			return
		}
		if !w.handled {
			v.stats.Accepted.Inc()
			if r.native != nil {
				c.ForwardTCP(nil, Hosted(v.dialers[w.at], w.first.Known()))
				return
			}
			if err := c.discard(len(w.buf)); err != nil {
				return
			}
		}
		c.enter(relay.Handled)
		c.handled = time.Now()
		cx := w.connection()
		cx.SetVar(connVar, c)
		through, err := r.run(cx)
		if err != nil {
			v.logger.Debug("handling a connection", zap.Stringer("remote", client), zap.Error(err))
			c.because(relay.Error)
		}
		if through == nil || err != nil {
			return
		}
		c.enter(relay.Routing)
		w.continueOn(through)
	}
}

// native hands a session to a handler that takes it from the engines, or counts
// it out.
func (v *view) native(c *UDPConn, f Forwarder) {
	if why, ok := c.Native(f); !ok {
		v.stats.Abandoned(true, c.client.Addr())
		v.tell(why.String(), c.client, c.local, true)
		c.setupSpan.End(time.Now(), nil, why.String())
		c.forwarded = true // and has been rejected
	}
}

// goOn lets a walk wait, from here on, for the bytes of a connection that has
// left the engine.
func (w *walk) goOn(c *TCPConn) {
	w.c, w.conn, w.stale = c, c, true
	c.enter(relay.Routing)
	w.src = &tcpSource{c: c, have: len(w.buf)}
	w.deadline = c.opened.Add(w.begun + w.v.peek.Timeout)
}

// continueOn makes what a handler has left behind the connection that the next
// routes see. Its bytes are no longer in the socket.
func (w *walk) continueOn(cx *layer4.Connection) {
	w.at++
	w.handled = true
	w.conn, w.client, w.local = unread{cx}, flowaddr.Of(cx.RemoteAddr()), flowaddr.Of(cx.LocalAddr())
	left := cx.MatchingBytes()
	own := append([]byte(nil), left...)
	w.src = &streamSource{conn: cx.Conn, buf: own}
	w.spent, w.silent = false, false
	w.deadline = time.Now().Add(w.v.peek.Timeout)
	w.first = sniff.NewFlow(w.v.plan)
	w.show(left)
	w.buf, w.cx, w.stale = own, cx, false
	w.first.Attach(cx)
}

// unread is a connection without the bytes that its layer4.Connection has
// buffered: the walk has them.
type unread struct{ cx *layer4.Connection }

func (u unread) Read(p []byte) (int, error)         { return u.cx.Conn.Read(p) }
func (u unread) Write(p []byte) (int, error)        { return u.cx.Write(p) }
func (u unread) Close() error                       { return u.cx.Close() }
func (u unread) CloseWrite() error                  { return closeWrite(u.cx.Conn) }
func (u unread) LocalAddr() net.Addr                { return u.cx.LocalAddr() }
func (u unread) RemoteAddr() net.Addr               { return u.cx.RemoteAddr() }
func (u unread) SetDeadline(t time.Time) error      { return u.cx.SetDeadline(t) }
func (u unread) SetReadDeadline(t time.Time) error  { return u.cx.SetReadDeadline(t) }
func (u unread) SetWriteDeadline(t time.Time) error { return u.cx.SetWriteDeadline(t) }

func closeWrite(c net.Conn) error {
	if cw, ok := c.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// ForwardTCP gives a connection to the engine. prefix is what has been read of
// it already.
func (c *TCPConn) ForwardTCP(prefix []byte, d tcprelay.Dialer) {
	d = traced(d, c.setupSpan)
	fd, err := c.Detach()
	if err != nil {
		c.because(relay.Error) // a shortage of descriptors, if nothing has ended it before
		return
	}
	err = c.view.engines.TCP.Forward(tcprelay.Flow{FD: fd, Client: c.client, Local: c.local, Prefix: prefix, Dialer: d, Counters: c.view.counters(0), Age: time.Since(c.opened)})
	if err != nil {
		unix.Close(fd)
		c.view.stats.Abandoned(false, c.client.Addr())
	}
}

// serveUDP decides the route of a session and sees it handled.
func (v *view) serveUDP(uc *udprelay.Conn, client, local netip.AddrPort, worker int) {
	c := &UDPConn{Conn: uc, client: client, local: local, worker: worker, view: v}
	if tracing.On() {
		c.setupSpan = tracing.Begin(time.Now(), tracing.Flow{Listener: v.name, UDP: true, Client: client, Local: local})
		c.steps.begin()
	}
	attached, why := false, relay.NoRoute
	defer func() {
		switch {
		case c.forwarded: // its path's owner counts it out
		case attached:
			c.setupSpan.End(c.handled, c.at(), tracing.Handler)
			c.Close() // and v.Closed counts it out
		default:
			c.Reject(why)
			v.stats.Abandoned(true, client.Addr())
			v.tell(why.String(), client, local, true)
			c.setupSpan.End(time.Now(), nil, why.String())
		}
	}()
	defer v.contain(client, func() {
		if attached {
			c.End(relay.Error)
		}
	})
	w := newWalk(v, c, &udpSource{c: uc}, client, local, time.Now().Add(v.peek.Timeout))
	w.c = c
	first, _ := w.src.more(time.Time{}, v.peek.MaxBytes)
	w.show(first)
	for {
		s, err := w.next()
		switch s {
		case atForwarder:
			c.steps.matched(c.setupSpan)
			c.place = w.place
			c.SetHost(w.first.Known())
			v.native(c, w.to)
			return
		case atReject:
			why = relay.SnifferReject
			return
		case atEnd:
			v.unmatched(client, err)
			return
		}
		c.steps.matched(c.setupSpan)
		r := v.routes[w.at]
		if r.rejects && !w.handled {
			why = relay.Reject
			return
		}
		c.place = v.places[w.at]
		if r.front.name != "" && !w.handled {
			why, c.forwarded = v.invite(c, w.at)
			return
		}
		if r.native != nil && !w.handled {
			c.SetHost(w.first.Known())
			v.native(c, r.native)
			return
		}
		cx := w.connection()
		if !attached {
			if !c.Attach() {
				return
			}
			attached, c.handled = true, time.Now()
			// Handlers read datagram by datagram from c, not from the bytes that
			// the matchers saw in one piece.
			io.CopyN(io.Discard, cx, int64(len(cx.MatchingBytes())))
		}
		cx.SetVar(connVar, c)
		through, err := r.run(cx)
		if err != nil {
			v.logger.Debug("handling a session", zap.Stringer("remote", client), zap.Error(err))
			c.End(relay.Error)
		}
		if through == nil || err != nil {
			return
		}
		w.continueOn(through)
	}
}

func (v *view) unmatched(client netip.AddrPort, err error) {
	if err != nil {
		v.logger.Debug("matching failed", zap.Stringer("remote", client), zap.Error(err))
	}
}

// contain keeps a panic of a matcher or a handler to the flow it happened in,
// which end ends.
func (v *view) contain(client netip.AddrPort, end func()) {
	if p := recover(); p != nil {
		end()
		v.stats.Panicked()
		if held, ok := panicLog.allow(); ok {
			v.logger.Error("a matcher or handler panicked; its flow was closed",
				zap.Stringer("remote", client), zap.Any("panic", p), zap.Int64("suppressed", held), zap.Stack("stack"))
		}
	}
}
