package tracing

import (
	"context"
	"net/netip"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The names of the spans.
const (
	session = "session.setup"

	Peek    = "peek"            // first bytes are waited for
	Match   = "route.match"     // the last look at them, which has decided
	Ask     = "resolver.call"   // a resolver is asked
	Connect = "backend.connect" // a backend is tried
)

// Outcomes of session.setup beside the reasons of drops and ends.
const (
	Established = "established" // it has reached its backend
	Handler     = "handler"     // a handler of others or a server has it
)

// Setup is how one flow is set up. All methods may be called on nil, which is what
// Begin returns while tracing is off, and do nothing then. One goroutine at a time
// uses it, but for End, which counts once.
type Setup struct {
	tracer trace.Tracer
	ctx    context.Context // with the span
	span   trace.Span
	over   atomic.Bool
}

// On reports whether tracing is on.
func On() bool { return current.Load() != nil }

// Flow is whose set-up it is.
type Flow struct {
	Listener      string
	UDP           bool
	Client, Local netip.AddrPort
}

// Begin starts the span of a flow that has come at some time, which may be a while
// ago. Whether it is sampled is decided here.
func Begin(at time.Time, f Flow) *Setup {
	p := current.Load()
	if p == nil {
		return nil
	}
	ctx, span := p.tracer.Start(context.Background(), session, trace.WithTimestamp(at), trace.WithSpanKind(trace.SpanKindServer), trace.WithNewRoot())
	s := &Setup{tracer: p.tracer, ctx: ctx, span: span}
	if span.IsRecording() {
		transport := "tcp"
		if f.UDP {
			transport = "udp"
		}
		span.SetAttributes(attribute.String("wayhouse.listener", f.Listener), attribute.String("network.transport", transport),
			attribute.String("client.address", f.Client.Addr().String()), attribute.Int("client.port", int(f.Client.Port())),
			attribute.String("network.local.address", f.Local.Addr().String()), attribute.Int("network.local.port", int(f.Local.Port())))
	}
	return s
}

// Step adds a span of what has been done between two times.
func (s *Setup) Step(name string, from, to time.Time) {
	if s != nil && s.span.IsRecording() {
		_, span := s.tracer.Start(s.ctx, name, trace.WithTimestamp(from))
		span.End(trace.WithTimestamp(to))
	}
}

// Tried adds a span of an attempt to reach a backend; failure is "" for one that
// has succeeded.
func (s *Setup) Tried(p *relay.Path, from, to time.Time, failure string) {
	if s == nil || !s.span.IsRecording() {
		return
	}
	_, span := s.tracer.Start(s.ctx, Connect, trace.WithTimestamp(from), trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(
		attribute.String("wayhouse.pool", p.Pool), attribute.String("network.peer.address", p.Backend.Addr().String()),
		attribute.Int("network.peer.port", int(p.Backend.Port()))))
	finish(span, to, or(failure, "ok"), failure != "")
}

// Call starts the span of a question to a resolver. traceparent is what tells the
// resolver of it, "" while tracing is off; end is called with what has become of
// it.
func (s *Setup) Call(resolver string) (traceparent string, end func(outcome string)) {
	if s == nil {
		return "", func(string) {}
	}
	_, span := s.tracer.Start(s.ctx, Ask, trace.WithSpanKind(trace.SpanKindClient), trace.WithAttributes(attribute.String("wayhouse.resolver", resolver)))
	return parent(span.SpanContext()), func(outcome string) { finish(span, time.Now(), outcome, outcome != "ok") }
}

// End ends the span of the flow, once. p is where the flow goes, nil where that is
// not known.
func (s *Setup) End(at time.Time, p *relay.Path, outcome string) {
	if s == nil || s.over.Swap(true) {
		return
	}
	if s.span.IsRecording() && p != nil {
		if p.Route >= 0 {
			s.span.SetAttributes(attribute.Int("wayhouse.route", p.Route))
		}
		if p.Pool != "" {
			s.span.SetAttributes(attribute.String("wayhouse.pool", p.Pool))
		}
		if p.Resolver != "" {
			s.span.SetAttributes(attribute.String("wayhouse.resolver", p.Resolver))
		}
	}
	finish(s.span, at, outcome, outcome != Established && outcome != Handler)
}

// TraceParent is the span of the flow as W3C's traceparent, nil while tracing is
// off.
func (s *Setup) TraceParent() []byte {
	if s == nil {
		return nil
	}
	return []byte(parent(s.span.SpanContext()))
}

func finish(span trace.Span, at time.Time, outcome string, failed bool) {
	if span.IsRecording() {
		span.SetAttributes(attribute.String("wayhouse.outcome", outcome))
		if failed {
			span.SetStatus(codes.Error, outcome)
		}
	}
	span.End(trace.WithTimestamp(at))
}

func parent(c trace.SpanContext) string {
	return "00-" + c.TraceID().String() + "-" + c.SpanID().String() + "-" + (c.TraceFlags() & trace.FlagsSampled).String()
}

func or(s, def string) string {
	if s == "" {
		return def
	}
	return s
}
