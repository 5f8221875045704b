package tracing

import (
	"fmt"
	"net/http"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/version"
)

func setVariables(t *testing.T, env map[string]string) {
	for _, part := range []string{"ENDPOINT", "INSECURE", "PROTOCOL"} {
		t.Setenv("OTEL_EXPORTER_OTLP_"+part, "")
		t.Setenv("OTEL_EXPORTER_OTLP_TRACES_"+part, "")
	}
	t.Setenv("OTEL_TRACES_EXPORTER", "")
	for k, v := range env {
		t.Setenv(k, v)
	}
}

func TestUnnamed(t *testing.T) {
	for _, tc := range []struct {
		env  map[string]string
		want string
	}{
		{nil, "http/protobuf"},
		{map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, "http/protobuf"},
		{map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"},
		{map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, "http/protobuf"},
		{map[string]string{"OTEL_TRACES_EXPORTER": "none"}, ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector.example.com:4318"}, ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector.example.com:9/x"}, ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_INSECURE": "false"}, ""},
	} {
		t.Run(fmt.Sprint(tc.env), func(t *testing.T) {
			setVariables(t, tc.env)
			if got := unnamed(); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// TestStandardReceiver has spans go to this host, without TLS, where nothing is
// said about the receiver.
func TestStandardReceiver(t *testing.T) {
	setVariables(t, nil)
	var to string
	e, err := newExporter(t.Context(), otlptracehttp.WithHTTPClient(&http.Client{Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
		to = r.URL.String()
		return &http.Response{StatusCode: http.StatusOK, Body: http.NoBody, Request: r}, nil
	})}))
	if err != nil {
		t.Fatal(err)
	}
	if err := e.ExportSpans(t.Context(), tracetest.SpanStubs{{Name: "x"}}.Snapshots()); err != nil {
		t.Error(err)
	}
	if err := e.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if want := "http://localhost:4318/v1/traces"; to != want {
		t.Errorf("spans go to %q, want %q", to, want)
	}
}

// TestResource has spans name the build of this module, not Caddy's version.
func TestResource(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "none")
	p, err := newProvider(zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Destruct()
	_, span := p.tracer.Start(t.Context(), "x")
	res := span.(sdk.ReadOnlySpan).Resource().Set()
	for key, want := range map[attribute.Key]string{"service.name": "wayhouse", "service.version": version.Read().Version} {
		if got, _ := res.Value(key); got.AsString() != want {
			t.Errorf("%s is %q, want %q", key, got.AsString(), want)
		}
	}
	span.End()
}
