package listener

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
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
	w.enter(relay.Peek)
	began := w.steps().wait()
	buf, err := w.src.more(w.deadline, w.v.peek.MaxBytes)
	w.steps().waited(began)
	w.enter(relay.Routing)
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

// enter notes how far a connection in its goroutine has come.
func (w *walk) enter(p relay.Phase) {
	if c, ok := w.c.(*TCPConn); ok && !w.handled {
		c.enter(p)
	}
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
			w.enter(relay.Resolve)
			w.matched()
			w.to, err = d.Decide(w.connection(), w.c, w.spent)
			w.enter(relay.Routing)
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
		w.steps().again()
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
