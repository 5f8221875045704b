package listener

import (
	"context"
	"errors"
	"fmt"
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
)

// A walk takes one flow through the routes, in strict order. A route that
// cannot be decided on the bytes there are holds back all after it until more
// bytes have come or the budget is spent. It may stop where bytes are wanted
// that its source does not have yet, or where it would have to wait for somebody
// and may not, and go on from there later.
type walk struct {
	v        *view
	c        Conn     // of a flow in its goroutine; nil on a worker, where nothing may block
	conn     net.Conn // what the matchers' connection wraps
	src      source
	buf      []byte
	deadline time.Time
	spent    bool // no more bytes will be waited for
	silent   bool // …and none have come: routes that need bytes are passed over
	rejected bool // a sniffer wants the flow dropped
	handled  bool // handlers have had it and left it to the routes after theirs

	client, local netip.AddrPort // as conn has them

	begun time.Duration // how old the flow was
	stage stage
	at    int       // the route it has come to
	to    Forwarder // whom a decider has named…
	place *Place    // …and for which place

	first *sniff.Flow        // what matchers see, and what sniffers say of it
	cx    *layer4.Connection // the same, for those who want that; see connection
	stale bool               // cx has other bytes than buf

	trace *trace // hears of every step of a flow that nobody has sent, else nil
}

// stage is what is decided first, in this order.
type stage uint8

const (
	rejecting stage = iota // whether a sniffer wants the flow dropped
	hinting                // whether there is a hint for it
	routing
)

func newWalk(v *view, conn net.Conn, src source, client, local netip.AddrPort, deadline time.Time) *walk {
	return &walk{v: v, conn: conn, src: src, client: client, local: local, deadline: deadline, first: sniff.NewFlow(v.plan)}
}

// stop is why a walk has stopped.
type stop uint8

const (
	atRoute     stop = iota // the route at matches and its handlers are to have the flow
	atForwarder             // a decider has named one
	atReject                // a sniffer wants the flow dropped
	atEnd                   // no route matches, or one is undecided to the end
	atBytes                 // the source has no more bytes yet
	atWait                  // what comes next may block, and may not do so here
)

// next goes on to where the walk stops. After atRoute the walk goes on only
// with continueOn.
func (w *walk) next() (stop, error) {
	if w.stage == rejecting {
		switch w.mayBeRejected() {
		case yes:
			return atReject, nil
		case later:
			return atBytes, nil
		case elsewhere:
			return atWait, nil
		}
		w.stage = hinting
	}
	if w.stage == hinting {
		if w.v.hint != nil {
			if s, err := w.decide(w.v.hint, w.v.hinted); s != atRoute {
				return s, err
			}
		}
		w.stage = routing
	}
	for {
		var got verdict
		var err error
		switch w.at, got, err = w.find(w.at); got {
		case yes:
		case later:
			return atBytes, nil
		case elsewhere:
			return atWait, nil
		default:
			if w.rejected {
				return atReject, nil
			}
			return atEnd, err
		}
		d := w.v.routes[w.at].decider
		if d == nil || w.handled {
			return atRoute, nil
		}
		if s, err := w.decide(d, w.v.places[w.at]); s != atRoute {
			return s, err
		}
		w.at++
	}
}

type verdict uint8

const (
	no verdict = iota
	yes
	undecided

	// Of a walk that cannot wait for an answer:
	later     // when there are more bytes
	elsewhere // where it may wait
)

// find returns the first route from i on that matches, or the verdict no when
// none does, or undecided when the budget ended on route i.
func (w *walk) find(i int) (int, verdict, error) {
	for i < len(w.v.routes) {
		r := w.v.routes[i]
		if w.mayNotWait() && !r.prompt {
			return i, elsewhere, nil
		}
		got, err := w.match(r)
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
			if !w.wait() {
				return i, later, nil
			}
		}
	}
	return i, no, nil
}

// mayNotWait reports whether the walk is on a worker.
func (w *walk) mayNotWait() bool { return w.c == nil && w.trace == nil }

// mayBeRejected waits, where a sniffer of the listener may want a flow dropped,
// until that is known or the budget is spent. That comes before everything else
// that is decided about the flow.
func (w *walk) mayBeRejected() verdict {
	for w.v.mayReject {
		if w.mayNotWait() && !w.v.plan.Prompt() {
			return elsewhere
		}
		rejected, known := w.first.Rejected()
		if rejected {
			w.rejected = true
			return yes
		}
		if known || w.spent {
			break
		}
		if !w.wait() {
			return later
		}
	}
	return no
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

// wait gets more bytes for the matchers, or finds the budget spent. It reports
// false when the source has none yet.
func (w *walk) wait() bool {
	if len(w.buf) >= w.v.peek.MaxBytes {
		w.end()
		return true
	}
	buf, err := w.src.more(w.deadline, w.v.peek.MaxBytes)
	if err == errNotYet {
		return false
	}
	if len(buf) > len(w.buf) {
		w.show(buf)
	}
	if err != nil {
		w.end()
	}
	return true
}

// end notes that no more bytes will be waited for.
func (w *walk) end() {
	w.spent, w.silent = true, len(w.buf) == 0
	w.first.End()
}

// decide asks a decider, and gets more bytes for it while it wants some. It
// answers atRoute where the flow is to go on to the routes.
func (w *walk) decide(d Decider, at *Place) (stop, error) {
	if a, ok := d.(AddrDecider); ok {
		w.to = a.DecideAddr(w.client, w.local, w.v.name)
	} else if w.mayNotWait() {
		return atWait, nil
	} else {
		var err error
		for {
			w.to, err = d.Decide(w.connection(), w.c, w.spent)
			if w.spent || !errors.Is(err, layer4.ErrConsumedAllPrefetchedBytes) {
				break
			}
			w.wait()
		}
		if err != nil {
			return atEnd, fmt.Errorf("no decision: %w", err)
		}
	}
	if w.to == nil {
		return atRoute, nil
	}
	w.place = at
	return atForwarder, nil
}

// show lets matchers and sniffers find b, which is all that has come.
func (w *walk) show(b []byte) {
	w.buf, w.stale = b, true
	var datagrams [][]byte
	switch s := w.src.(type) {
	case datagramSource:
		datagrams = s.datagrams()
	case *streamSource:
		if w.conn.LocalAddr().Network() == "udp" && len(b) > 0 {
			datagrams = [][]byte{b} // what a handler has left of them
		}
	}
	w.first.Show(nil, b, datagrams)
}

// connection is the flow as caddy-l4's matchers and handlers see it, with what
// earlier ones have left in the variables and the replacer. Our own matchers do
// without, for making it costs more than all they do.
func (w *walk) connection() *layer4.Connection {
	if w.cx != nil && !w.stale {
		return w.cx
	}
	old := w.cx
	w.cx, w.stale = layer4.WrapConnection(w.conn, w.buf, w.v.logger), false
	defer w.first.Attach(w.cx)
	if old == nil {
		return w.cx
	}
	w.cx.Context = keepVars(old.Context, w.cx.Context)
	if vars, ok := old.Context.Value(layer4.VarsCtxKey).(map[string]any); ok {
		for k, val := range vars {
			w.cx.SetVar(k, val)
		}
	}
	w.cx.Replacer().Map(old.Replacer().Get)
	return w.cx
}

// keepVars is the context of an earlier connection with the variables and the
// replacer of a later one.
func keepVars(old, with context.Context) context.Context {
	ctx := context.WithValue(old, layer4.VarsCtxKey, with.Value(layer4.VarsCtxKey))
	return context.WithValue(ctx, layer4.ReplacerCtxKey, with.Value(layer4.ReplacerCtxKey))
}

// match asks the matchers of a route. One set must match; in a set every
// matcher must. A definite no of one matcher decides a set in which another
// still needs bytes.
func (w *walk) match(r *Route) (verdict, error) {
	if len(r.sets) == 0 {
		return yes, nil
	}
	result := no
	for i, set := range r.sets {
		got := yes
		for k := range set {
			ok, err := w.ask(&set[k])
			if w.trace != nil {
				w.trace.matcher(i, set[k].matcher(), ok, err)
			}
			switch {
			case err == nil && ok:
			case err == nil:
				got = no
			case wantsMore(err):
				got = undecided
			default:
				return no, err
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

// wantsMore reports whether the error of a matcher says that it needs more
// bytes.
func wantsMore(err error) bool {
	return errors.Is(err, layer4.ErrConsumedAllPrefetchedBytes) || errors.Is(err, layer4.ErrMatchingBufferFull)
}

// asked is a matcher in the forms in which it may be asked.
type asked struct {
	alone layer4.MatcherSet // of it and no other, as caddy-l4 asks it
	flow  FlowMatcher       // itself, if it is one
	addr  AddrMatcher       // likewise
}

func newAsked(m layer4.ConnMatcher) asked {
	a := asked{alone: layer4.MatcherSet{m}}
	a.flow, _ = m.(FlowMatcher)
	a.addr, _ = m.(AddrMatcher)
	return a
}

func (a *asked) matcher() layer4.ConnMatcher { return a.alone[0] }

func (w *walk) ask(a *asked) (bool, error) {
	switch {
	case a.flow != nil:
		return a.flow.MatchFlow(w.first, w.client, w.local)
	case a.addr != nil && w.client.IsValid() && w.local.IsValid():
		return a.addr.MatchAddr(w.client, w.local), nil
	}
	return a.alone.Match(w.connection())
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
	if len(v.routes) == 0 {
		v.offer(c)
		return
	}
	defer c.Close() // nothing, when it was detached
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
			c.place.Store(w.place)
			c.ForwardTCP(nil, Hosted(w.to.TCPDialer(w.place), w.first.Known()))
			return
		case atReject, atEnd:
			v.unmatched(client, err)
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
		if r.rejects && !w.handled {
			c.turnAway(v.stats.Turned, relay.Reject)
			return
		}
		c.place.Store(v.places[w.at])
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
		w.continueOn(through)
	}
}

// native hands a session to a handler that takes it from the engines, or counts
// it out.
func (v *view) native(c *UDPConn, f Forwarder) {
	if !c.Native(f) {
		v.stats.Abandoned(true, c.client.Addr())
		c.forwarded = true // and has been rejected
	}
}

// goOn lets a walk wait, from here on, for the bytes of a connection that has
// left the engine.
func (w *walk) goOn(c *TCPConn) {
	w.c, w.conn, w.stale = c, c, true
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
	fd, err := c.Detach()
	if err != nil {
		c.because(relay.Error) // a shortage of descriptors, if nothing has ended it before
		return
	}
	err = c.view.engines.TCP.Forward(tcprelay.Flow{FD: fd, Client: c.client, Local: c.local, Prefix: prefix, Dialer: d, Counters: c.view.counters(0)})
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
			v.tell(why.String(), client, local, true)
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
		r := v.routes[w.at]
		if r.rejects && !w.handled {
			why = relay.Reject
			return
		}
		c.place = v.places[w.at]
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
			attached = true
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
