// Package tracing holds the tests of spans: what an OTLP receiver is told by a real
// process of how flows are set up, and that nobody is told anything without.
package tracing

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// receiver takes spans by OTLP over HTTP: a POST of an ExportTraceServiceRequest
// in protobuf to /v1/traces, as its specification has it.
type receiver struct {
	*httptest.Server

	mu       sync.Mutex
	spans    []span
	services map[string]bool
	requests int
}

// span is a span with its attributes by name.
type span struct {
	*otlp.Span
	attrs map[string]any
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{services: map[string]bool{}}
	r.Server = httptest.NewServer(http.HandlerFunc(r.take))
	t.Cleanup(r.Close)
	return r
}

func (r *receiver) take(w http.ResponseWriter, req *http.Request) {
	body := io.Reader(req.Body)
	if req.Header.Get("Content-Encoding") == "gzip" {
		zr, err := gzip.NewReader(body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		body = zr
	}
	b, err := io.ReadAll(body)
	var m collector.ExportTraceServiceRequest
	if err != nil || req.URL.Path != "/v1/traces" || proto.Unmarshal(b, &m) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.requests++
	for _, rs := range m.ResourceSpans {
		for _, a := range rs.Resource.Attributes {
			if a.Key == "service.name" {
				r.services[a.Value.GetStringValue()] = true
			}
		}
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				one := span{s, map[string]any{}}
				for _, a := range s.Attributes {
					if v := a.Value.GetStringValue(); v != "" {
						one.attrs[a.Key] = v
					} else {
						one.attrs[a.Key] = int(a.Value.GetIntValue())
					}
				}
				r.spans = append(r.spans, one)
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// tree waits for the set-up of a flow of a listener, and returns it and the spans
// in it by name.
func (r *receiver) tree(t *testing.T, listener string) (root span, children map[string][]span) {
	t.Helper()
	find := func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		root, children = span{}, map[string][]span{}
		for _, s := range r.spans {
			if s.Name == "session.setup" && s.attrs["wayhouse.listener"] == listener {
				root = s
			}
		}
		for _, s := range r.spans {
			if root.Span != nil && string(s.TraceId) == string(root.TraceId) && s.Span != root.Span {
				children[s.Name] = append(children[s.Name], s)
			}
		}
		return root.Span != nil
	}
	if !kit.Poll(20*time.Second, find) {
		t.Fatalf("no span of %s", listener)
	}
	return root, children
}
