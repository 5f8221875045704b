package listener

import (
	"net/netip"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

// The spans of a flow's set-up. A worker keeps times alone and makes the spans
// when it has decided; a goroutine has the span of its flow from the beginning.

// steps are the times of a flow in its goroutine. Its methods may be called on nil,
// and do nothing before begin.
type steps struct {
	on           bool
	peek, peeked time.Time // from the first wait for bytes to the last
	matching     time.Time // since when the routes are asked with what there is
}

func (s *steps) begin() { s.on, s.matching = true, time.Now() }

// wait begins to wait for bytes.
func (s *steps) wait() time.Time {
	if s == nil || !s.on {
		return time.Time{}
	}
	return time.Now()
}

// waited ends what wait began.
func (s *steps) waited(began time.Time) {
	if s == nil || !s.on {
		return
	}
	if s.peek.IsZero() {
		s.peek = began
	}
	s.peeked = time.Now()
	s.again()
}

// again notes that the routes are asked from here on.
func (s *steps) again() {
	if s != nil && s.on {
		s.matching = time.Now()
	}
}

// matched tells the set-up of what has been done until the route was known.
func (s *steps) matched(setup *tracing.Setup) {
	if s == nil || !s.on {
		return
	}
	if !s.peek.IsZero() {
		setup.Step(tracing.Peek, s.peek, s.peeked)
		s.peek = time.Time{}
	}
	if !s.matching.IsZero() {
		setup.Step(tracing.Match, s.matching, time.Now())
		s.matching = time.Time{}
	}
}

// steps are the times of the flow of a walk in its goroutine, nil on a worker.
func (w *walk) steps() *steps {
	if w.handled {
		return nil
	}
	switch c := w.c.(type) {
	case *TCPConn:
		return &c.steps
	case *UDPConn:
		return &c.steps
	}
	return nil
}

// matched tells the set-up of a flow of what has been done before somebody is asked.
func (w *walk) matched() {
	if s := w.steps(); s != nil && s.on {
		s.matched(w.c.Setup())
	}
}

// Setup is the traced set-up of the connection, nil while it is not.
func (c *TCPConn) Setup() *tracing.Setup { return c.setupSpan }

// Setup is the traced set-up of the session, nil while it is not.
func (c *UDPConn) Setup() *tracing.Setup { return c.setupSpan }

// traced begins the span of a connection, if anybody wants that. looked is set for
// one whose bytes a worker has looked at.
func (c *TCPConn) traced(looked bool) {
	if !tracing.On() {
		return
	}
	c.setupSpan = tracing.Begin(c.opened, tracing.Flow{Listener: c.view.name, Client: c.client, Local: c.local})
	c.steps.begin()
	if looked {
		c.steps.peek, c.steps.peeked = c.opened, c.steps.matching
	}
}

// endSetup ends the span of a connection that has ended here: with the set-up, or
// in the hands of a handler that has no pool.
func (c *TCPConn) endSetup(last *relay.Info) {
	if last.Phase == relay.Handled {
		c.setupSpan.End(c.handled, last.Path, tracing.Handler)
		return
	}
	c.setupSpan.End(time.Now(), last.Path, relay.Reason(c.why.Load()).String())
}

// at is where the session is handled.
func (c *UDPConn) at() *relay.Path {
	if c.place == nil {
		return nil
	}
	return &relay.Path{Route: c.place.Route}
}

// now is the time, if it is wanted.
func now(wanted bool) (t time.Time) {
	if wanted {
		t = time.Now()
	}
	return t
}

// traceDirect has the set-up of a connection traced that a worker has decided about
// by its addresses.
func (v *view) traceDirect(o *tcprelay.Opening) {
	if tracing.On() {
		o.Dialer = traced(o.Dialer, v.beginOn(o, time.Now()))
	}
}

// traceLooked is traceDirect for one whose bytes the worker has looked at, for the
// last time since began.
func (v *view) traceLooked(o *tcprelay.Opening, began time.Time) {
	if began.IsZero() {
		return
	}
	s := v.beginOn(o, began)
	if o.Age > 0 {
		s.Step(tracing.Peek, began.Add(-o.Age), began)
	}
	s.Step(tracing.Match, began, time.Now())
	o.Dialer = traced(o.Dialer, s)
}

// beginOn begins the span of a connection that has its age at that time.
func (v *view) beginOn(o *tcprelay.Opening, at time.Time) *tracing.Setup {
	return tracing.Begin(at.Add(-o.Age), tracing.Flow{Listener: v.name, Client: o.Client, Local: o.Local})
}

// traced is the dialer for a connection whose set-up is traced.
func traced(d tcprelay.Dialer, s *tracing.Setup) tcprelay.Dialer {
	if s == nil {
		return d
	}
	if in, ok := d.(TraceDialer); ok {
		d = in.InTrace(s.TraceParent())
	}
	return &tracedDialer{inner: d, setup: s}
}

// tracedDialer makes a span of every try of a connection. One worker uses it.
type tracedDialer struct {
	inner tcprelay.Dialer
	setup *tracing.Setup
	path  *relay.Path // that is being tried
	began time.Time
}

// Next implements tcprelay.Dialer.
func (d *tracedDialer) Next(client, local netip.AddrPort, attempt int, tried []*relay.Path) (tcprelay.Target, bool) {
	d.failed("failed")
	t, ok := d.inner.Next(client, local, attempt, tried)
	if ok {
		d.path, d.began, t.Connected = t.Path, time.Now(), d.connected
	}
	return t, ok
}

func (d *tracedDialer) failed(why string) {
	if d.path != nil {
		d.setup.Tried(d.path, d.began, time.Now(), why)
		d.path = nil
	}
}

func (d *tracedDialer) connected() {
	now := time.Now()
	d.setup.Tried(d.path, d.began, now, "")
	d.setup.End(now, d.path, tracing.Established)
	d.path = nil
}

// GaveUp implements tcprelay.Dialer.
func (d *tracedDialer) GaveUp(last *relay.Info, why relay.Reason) {
	d.failed("failed")
	d.inner.GaveUp(last, why)
	d.setup.End(time.Now(), last.Path, why.String())
}

// forwardUDP gives a session to the handler of a route, on the worker.
func (v *view) forwardUDP(o *udprelay.Opening, route int) udprelay.Decision {
	f, at := v.routes[route].native, v.places[route]
	if !tracing.On() {
		return f.ForwardUDP(o, at)
	}
	s := tracing.Begin(time.Now(), tracing.Flow{Listener: v.name, UDP: true, Client: o.Client, Local: o.Local})
	o.Trace = s.TraceParent()
	d := forwardTraced(f, o, at, s)
	if d == udprelay.Refuse {
		s.End(time.Now(), &relay.Path{Route: route}, o.Reason.String())
	}
	return d
}

// forwardTraced gives a session to a handler. Of one that is taken the span ends
// here: its socket is connected.
func forwardTraced(f Forwarder, o *udprelay.Opening, at *Place, s *tracing.Setup) udprelay.Decision {
	if s == nil {
		return f.ForwardUDP(o, at)
	}
	began := time.Now()
	d := f.ForwardUDP(o, at)
	if d == udprelay.Forward {
		now := time.Now()
		s.Tried(o.Path, began, now, "")
		s.End(now, o.Path, tracing.Established)
	}
	return d
}

// Interface guard
var _ tcprelay.Dialer = (*tracedDialer)(nil)
