package listener

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// A walk takes one flow through the routes, in strict order. A route that
// cannot be decided on the bytes there are holds back all after it until more
// bytes have come or the budget is spent.
type walk struct {
	v        *view
	conn     net.Conn // what the matchers' connection wraps
	src      source
	buf      []byte
	deadline time.Time
	spent    bool // no more bytes will be waited for
	silent   bool // …and none have come: routes that need bytes are passed over
	rejected bool // a sniffer wants the flow dropped

	cx    *layer4.Connection
	first *sniff.Flow // what cx has for matchers, and what sniffers say of it

	trace *trace // hears of every step of a flow that nobody has sent, else nil
}

func newWalk(v *view, conn net.Conn, src source, deadline time.Time) *walk {
	return &walk{v: v, conn: conn, src: src, deadline: deadline, first: sniff.NewFlow(v.plan)}
}

type verdict uint8

const (
	no verdict = iota
	yes
	undecided
)

// find returns the first route from i on that matches, or the verdict no when
// none does, or undecided when the budget ended on route i.
func (w *walk) find(i int) (int, verdict, error) {
	for i < len(w.v.routes) {
		got, err := w.v.routes[i].match(w.cx, w.trace)
		means := w.judge(got, err)
		if w.trace != nil {
			w.trace.route(i, means, err)
		}
		switch means {
		case failed:
			return i, no, err
		case matched:
			if w.v.mayReject { // with what it has read since mayBeRejected
				if w.rejected, _ = w.first.Rejected(); w.rejected {
					return i, no, nil
				}
			}
			return i, yes, nil
		case unmatched, passedSilent, passedNext:
			i++
		case cutOff:
			return i, undecided, nil
		case heldBack:
			w.wait()
		}
	}
	return i, no, nil
}

// mayBeRejected waits, where a sniffer of the listener may want a flow dropped,
// until that is known or the budget is spent. That comes before everything else
// that is decided about the flow.
func (w *walk) mayBeRejected() bool {
	for w.v.mayReject {
		var known bool
		if w.rejected, known = w.first.Rejected(); known || w.spent {
			break
		}
		w.wait()
	}
	return w.rejected
}

// outcome is what becomes of a flow at a route.
type outcome uint8

const (
	unmatched outcome = iota
	matched
	failed
	heldBack     // more bytes are waited for
	passedSilent // the client has sent nothing: on to routes that need no bytes
	passedNext   // undecided to the end, and on_undecided is next
	cutOff       // undecided to the end, and on_undecided is refuse
)

func (w *walk) judge(got verdict, err error) outcome {
	switch {
	case err != nil:
		return failed
	case got == yes:
		return matched
	case got == no:
		return unmatched
	case w.silent:
		return passedSilent
	case w.spent && w.v.peek.OnUndecided == onUndecidedNext:
		return passedNext
	case w.spent:
		return cutOff
	}
	return heldBack
}

// wait gets more bytes for the matchers, or finds the budget spent.
func (w *walk) wait() {
	if len(w.buf) >= w.v.peek.MaxBytes {
		w.spent = true
		w.first.End()
		return
	}
	buf, err := w.src.more(w.deadline, w.v.peek.MaxBytes)
	if len(buf) > len(w.buf) {
		w.buf = buf
		w.rewrap()
	}
	if err != nil {
		w.spent, w.silent = true, len(w.buf) == 0
		w.first.End()
	}
}

// decide asks a decider, and gets more bytes for it while it wants some.
func (w *walk) decide(d Decider, c Conn) (Forwarder, error) {
	for {
		f, err := d.Decide(w.cx, c, w.spent)
		if w.spent || !errors.Is(err, layer4.ErrConsumedAllPrefetchedBytes) {
			return f, err
		}
		w.wait()
	}
}

// rewrap shows the matchers w.buf, keeping what earlier handlers and matchers
// have left in the variables and the replacer.
func (w *walk) rewrap() {
	old := w.cx
	w.cx = layer4.WrapConnection(w.conn, w.buf, w.v.logger)
	defer w.show(w.buf)
	if old == nil {
		return
	}
	w.cx.Context = keepVars(old.Context, w.cx.Context)
	if vars, ok := old.Context.Value(layer4.VarsCtxKey).(map[string]any); ok {
		for k, val := range vars {
			w.cx.SetVar(k, val)
		}
	}
	w.cx.Replacer().Map(old.Replacer().Get)
}

// show lets matchers and sniffers find what there is to see beside w.cx.
func (w *walk) show(matching []byte) {
	var datagrams [][]byte
	if u, ok := w.src.(*udpSource); ok {
		datagrams = u.tmp
	} else if d, ok := w.src.(*describedSource); ok {
		datagrams = d.datagrams()
	} else if w.conn.LocalAddr().Network() == "udp" && len(matching) > 0 {
		datagrams = [][]byte{matching} // what a handler has left of them
	}
	w.first.Show(w.cx, matching, datagrams)
}

// keepVars is the context of an earlier connection with the variables and the
// replacer of a later one.
func keepVars(old, with context.Context) context.Context {
	ctx := context.WithValue(old, layer4.VarsCtxKey, with.Value(layer4.VarsCtxKey))
	return context.WithValue(ctx, layer4.ReplacerCtxKey, with.Value(layer4.ReplacerCtxKey))
}

// match asks the matchers of a route. One set must match; in a set every
// matcher must. A definite no of one matcher decides a set in which another
// still needs bytes. t hears of every matcher that was asked, unless it is nil.
func (r *Route) match(cx *layer4.Connection, t *trace) (verdict, error) {
	if len(r.sets) == 0 {
		return yes, nil
	}
	result := no
	for i, set := range r.sets {
		got := yes
		for _, m := range set {
			ok, err := m.Match(cx)
			if t != nil {
				t.matcher(i, m[0], ok, err)
			}
			switch {
			case errors.Is(err, layer4.ErrConsumedAllPrefetchedBytes), errors.Is(err, layer4.ErrMatchingBufferFull):
				got = undecided
			case err != nil:
				return no, err
			case !ok:
				got = no
			}
			if got == no {
				break
			}
		}
		switch got {
		case yes:
			return yes, nil
		case undecided:
			result = undecided
		}
	}
	return result, nil
}

// run calls the handlers of a route. When they let the flow through to the
// next routes, it returns the connection they leave behind, else nil.
func (r *Route) run(cx *layer4.Connection) (through *layer4.Connection, err error) {
	var next layer4.Handler = layer4.HandlerFunc(func(cx *layer4.Connection) error {
		through = cx
		return nil
	})
	for i := len(r.handlers) - 1; i >= 0; i-- {
		h, after := r.handlers[i], next
		next = layer4.HandlerFunc(func(cx *layer4.Connection) error { return h.Handle(cx, after) })
	}
	return through, next.Handle(cx)
}

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
	SetPath(*relay.Path) // what operators see of it from now on
	End(relay.Reason)    // Close, and say why
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

// serveTCP decides the route of a connection and sees it handled.
func (v *view) serveTCP(fd int, client, local netip.AddrPort) {
	c, err := takeTCP(fd, client, local, v)
	if err != nil {
		v.stats.Abandoned(false, client.Addr())
		if held, ok := acceptLog.allow(); ok {
			v.logger.Warn("taking a connection failed", zap.Stringer("remote", client), zap.Error(err), zap.Int64("suppressed", held))
		}
		return
	}
	if len(v.routes) == 0 {
		v.offer(c)
		return
	}
	defer c.Close() // nothing, when it was detached
	defer v.contain(client, func() { c.because(relay.Error) })
	w := newWalk(v, c, &tcpSource{c: c}, c.opened.Add(v.peek.Timeout))
	w.rewrap()
	if w.mayBeRejected() {
		c.reject(v.stats.Rejected)
		return
	}
	if v.decideTCP(v.hint, w, c, v.hinted) {
		return
	}
	for i := 0; ; i++ {
		var got verdict
		if i, got, err = w.find(i); got != yes {
			v.unmatched(client, err)
			switch {
			case c.place.Load() != nil: // a handler has had it
			case w.rejected:
				c.reject(v.stats.Rejected)
			default:
				c.reject(v.stats.NoRoute)
			}
			return
		}
		r := v.routes[i]
		if r.decider != nil && w.conn == net.Conn(c) {
			if v.decideTCP(r.decider, w, c, v.places[i]) {
				return
			}
			continue
		}
		if r.rejects && c.place.Load() == nil {
			c.reject(v.stats.Turned)
			return
		}
		if c.place.Load() == nil {
			v.stats.Accepted.Inc()
		}
		c.place.Store(v.places[i])
		if r.native != nil && w.conn == net.Conn(c) {
			c.ForwardTCP(nil, v.dialers[i])
			return
		}
		if w.conn == net.Conn(c) {
			if err := c.discard(len(w.buf)); err != nil {
				return
			}
		}
		w.cx.SetVar(connVar, c)
		through, err := r.run(w.cx)
		if err != nil {
			v.logger.Debug("handling a connection", zap.Stringer("remote", client), zap.Error(err))
			c.because(relay.Error)
		}
		if through == nil || err != nil {
			return
		}
		w.continueOn(through)
	}
}

// decideTCP asks a decider, if there is one, and reports whether that was the
// end of the walk.
func (v *view) decideTCP(d Decider, w *walk, c *TCPConn, at *Place) bool {
	if d == nil {
		return false
	}
	f, err := w.decide(d, c)
	switch {
	case err != nil:
		v.logger.Debug("no decision on a connection", zap.Stringer("remote", c.client), zap.Error(err))
		c.reject(v.stats.NoRoute)
	case f == nil:
		return false
	default:
		v.stats.Accepted.Inc()
		c.place.Store(at)
		c.ForwardTCP(nil, f.TCPDialer(at))
	}
	return true
}

// decideUDP is decideTCP for a session.
func (v *view) decideUDP(d Decider, w *walk, c *UDPConn, at *Place) bool {
	if d == nil {
		return false
	}
	f, err := w.decide(d, c)
	switch {
	case err != nil:
		v.logger.Debug("no decision on a session", zap.Stringer("remote", c.client), zap.Error(err))
	case f == nil:
		return false
	default:
		c.place = at
		v.native(c, f)
	}
	return true
}

// native hands a session to a handler that takes it from the engines, or counts
// it out.
func (v *view) native(c *UDPConn, f Forwarder) {
	if !c.Native(f) {
		v.stats.Abandoned(true, c.client.Addr())
		c.forwarded = true // and has been rejected
	}
}

// continueOn makes what a handler has left behind the connection that the next
// routes see. Its bytes are no longer in the socket.
func (w *walk) continueOn(cx *layer4.Connection) {
	w.buf = append([]byte(nil), cx.MatchingBytes()...)
	w.conn, w.cx = unread{cx}, cx
	w.src = &streamSource{conn: cx.Conn, buf: w.buf}
	w.spent, w.silent = false, false
	w.deadline = time.Now().Add(w.v.peek.Timeout)
	w.first = sniff.NewFlow(w.v.plan)
	w.show(cx.MatchingBytes())
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
	fd, err := c.Detach()
	if err != nil {
		c.because(relay.Error) // a shortage of descriptors, if nothing has ended it before
		return
	}
	err = c.view.engines.TCP.Forward(tcprelay.Flow{FD: fd, Client: c.client, Local: c.local, Prefix: prefix, Dialer: d})
	if err != nil {
		unix.Close(fd)
		c.view.stats.Abandoned(false, c.client.Addr())
	}
}

// serveUDP decides the route of a session and sees it handled.
func (v *view) serveUDP(uc *udprelay.Conn, client, local netip.AddrPort, worker int) {
	c := &UDPConn{Conn: uc, client: client, local: local, worker: worker, view: v}
	attached, why := false, relay.NoRoute
	defer func() {
		switch {
		case c.forwarded: // its path's owner counts it out
		case attached:
			c.Close() // and v.Closed counts it out
		default:
			c.Reject(why)
			v.stats.Abandoned(true, client.Addr())
		}
	}()
	defer v.contain(client, func() {
		if attached {
			c.End(relay.Error)
		}
	})
	w := newWalk(v, c, &udpSource{c: uc}, time.Now().Add(v.peek.Timeout))
	w.buf, _ = w.src.more(time.Time{}, v.peek.MaxBytes)
	w.rewrap()
	if w.mayBeRejected() {
		why = relay.SnifferReject
		return
	}
	if v.decideUDP(v.hint, w, c, v.hinted) {
		return
	}
	for i := 0; ; i++ {
		var got verdict
		var err error
		if i, got, err = w.find(i); got != yes {
			if w.rejected {
				why = relay.SnifferReject
			}
			v.unmatched(client, err)
			return
		}
		r := v.routes[i]
		if r.decider != nil && w.conn == net.Conn(c) {
			if v.decideUDP(r.decider, w, c, v.places[i]) {
				return
			}
			continue
		}
		c.place = v.places[i]
		if r.native != nil && w.conn == net.Conn(c) {
			v.native(c, r.native)
			return
		}
		if !attached {
			if !c.Attach() {
				return
			}
			attached = true
			// Handlers read datagram by datagram from c, not from the bytes that
			// the matchers saw in one piece.
			io.CopyN(io.Discard, w.cx, int64(len(w.cx.MatchingBytes())))
		}
		w.cx.SetVar(connVar, c)
		through, err := r.run(w.cx)
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
		v.stats.Panics.Inc()
		if held, ok := panicLog.allow(); ok {
			v.logger.Error("a matcher or handler panicked; its flow was closed",
				zap.Stringer("remote", client), zap.Any("panic", p), zap.Int64("suppressed", held), zap.Stack("stack"))
		}
	}
}
