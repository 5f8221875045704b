// Package tracing has OpenTelemetry spans of how flows are set up: session.setup
// with peek, route.match, resolver.call and backend.connect in it. What flows move
// afterwards is in no span. While no config wants any there is one question to an
// atomic pointer, and nothing else.
//
//	listener, handlers: Begin → Step, Call → End
//	provider:           batches → exporter, in goroutines of the SDK's
//
// The exporter is what the standard variables OTEL_… say. It belongs to the
// process: a reload loses no spans. Its queue is bounded, and nobody waits for it.
package tracing

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"google.golang.org/grpc/status"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/version"
)

// Config turns tracing on. It has no options: the exporter, the sampler and the
// resource are configured by the standard variables OTEL_….
type Config struct{}

// spansTotal counts spans. Those that have ended and were neither exported nor
// failed were dropped, for the queue was full, or are in it.
var spansTotal = metrics.Counter("trace_spans_total", "Spans by what became of them: they have ended, were exported, or could not be.", "result")

var (
	spansEnded    = spansTotal.WithLabelValues("ended")
	spansExported = spansTotal.WithLabelValues("exported")
	spansFailed   = spansTotal.WithLabelValues("failed")
)

// provider makes the spans of the process.
type provider struct {
	*sdk.TracerProvider
	tracer trace.Tracer
}

var (
	providers = caddy.NewUsagePool()
	current   atomic.Pointer[provider] // nil: off
)

type providerKey struct{}

// shutdown is how long spans that were not exported yet are given at the end.
const shutdown = 2 * time.Second

// Acquire turns tracing on. It is given back with Release; with the last one
// tracing is off.
func Acquire(logger *zap.Logger) error {
	_, _, err := providers.LoadOrNew(providerKey{}, func() (caddy.Destructor, error) {
		p, err := newProvider(logger)
		if err != nil {
			return nil, err
		}
		current.Store(p)
		return p, nil
	})
	return err
}

// Release gives back what Acquire took.
func Release() error {
	_, err := providers.Delete(providerKey{})
	return err
}

func newProvider(logger *zap.Logger) (*provider, error) {
	to, err := newExporter(context.Background())
	if err != nil {
		return nil, fmt.Errorf("making the exporter that the OTEL_… variables name: %w", err)
	}
	own := resource.NewSchemaless(attribute.String("service.name", "wayhouse"), attribute.String("service.version", version.Read().Version))
	res, err := resource.Merge(own, resource.Environment())
	if err != nil {
		return nil, fmt.Errorf("reading OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	p := &provider{TracerProvider: sdk.NewTracerProvider(
		sdk.WithResource(res),
		sdk.WithSpanProcessor(ended{}),
		sdk.WithBatcher(&exporter{SpanExporter: to, logger: logger}),
	)}
	p.tracer = p.Tracer("github.com/wayhouse-proxy/wayhouse")
	return p, nil
}

// newExporter makes what the OTEL_… variables name. Where they name no receiver it
// is that of their standard, on this host and without TLS; the SDK's has TLS.
func newExporter(ctx context.Context, more ...otlptracehttp.Option) (sdk.SpanExporter, error) {
	switch unnamed() {
	case "http/protobuf":
		return otlptracehttp.New(ctx, append(more, otlptracehttp.WithInsecure())...)
	case "grpc":
		return otlptracegrpc.New(ctx, otlptracegrpc.WithInsecure())
	}
	return autoexport.NewSpanExporter(ctx)
}

// unnamed is the protocol to a receiver of which nothing is said, or "".
func unnamed() (protocol string) {
	given := func(name string) string {
		return cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_"+name), os.Getenv("OTEL_EXPORTER_OTLP_"+name))
	}
	if cmp.Or(os.Getenv("OTEL_TRACES_EXPORTER"), "otlp") != "otlp" || given("ENDPOINT") != "" || given("INSECURE") != "" {
		return ""
	}
	return cmp.Or(given("PROTOCOL"), "http/protobuf")
}

// Destruct implements caddy.Destructor.
func (p *provider) Destruct() error {
	current.CompareAndSwap(p, nil)
	ctx, cancel := context.WithTimeout(context.Background(), shutdown)
	defer cancel()
	_ = p.Shutdown(ctx) // what could not be exported is counted and told of there
	return nil
}

// ended counts spans.
type ended struct{}

func (ended) OnStart(context.Context, sdk.ReadWriteSpan) {}
func (ended) OnEnd(s sdk.ReadOnlySpan) {
	if s.SpanContext().IsSampled() {
		spansEnded.Inc()
	}
}
func (ended) Shutdown(context.Context) error   { return nil }
func (ended) ForceFlush(context.Context) error { return nil }

// exporter counts what is exported. Failures stay here: they are told of once a
// minute at the most.
type exporter struct {
	sdk.SpanExporter
	logger *zap.Logger
	next   time.Time // for the next line; one batch is exported at a time
	held   int
}

// told is an error without the words of the collector, who may say back what it
// was sent, OTEL_EXPORTER_OTLP_HEADERS included.
func told(err error) string {
	if s, ok := status.FromError(err); ok {
		return "gRPC status " + s.Code().String()
	}
	text, _, _ := strings.Cut(err.Error(), " (body: ")
	return text
}

// ExportSpans implements sdk.SpanExporter.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	err := e.SpanExporter.ExportSpans(ctx, spans)
	if err == nil {
		spansExported.Add(float64(len(spans)))
		return nil
	}
	spansFailed.Add(float64(len(spans)))
	if now := time.Now(); now.After(e.next) {
		e.logger.Warn("exporting spans failed", zap.String("error", told(err)), zap.Int("spans", len(spans)), zap.Int("suppressed", e.held))
		e.next, e.held = now.Add(time.Minute), 0
	} else {
		e.held++
	}
	return nil
}
