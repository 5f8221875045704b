package resolver

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

var (
	requestsTotal = metrics.Counter("resolver_requests_total", "Calls of a resolver by their result.", "resolver", "result")
	took          = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: metrics.Namespace, Name: "resolver_latency_seconds", Help: "How long calls of a resolver took, whatever became of them.",
		Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5},
	}, []string{"resolver"})
	cacheTotal = metrics.Counter("resolver_cache_total", "Flows by what the resolver's cache had for them.", "resolver", "result")
)

func init() { metrics.Add(took) }

// result is what became of a call.
type result uint8

const (
	resultOK result = iota
	resultEmpty
	resultTimeout
	resultError
	numResults
)

// found is what the cache had for a flow.
type found uint8

const (
	hit found = iota
	hitNegative
	miss
	stale
	uncacheable
	numFound
)

// counters of one resolver.
type counters struct {
	requests [numResults]prometheus.Counter
	took     prometheus.Observer
	cache    [numFound]prometheus.Counter
}

func countersOf(name string) *counters {
	c := &counters{took: took.WithLabelValues(name)}
	for i, r := range [numResults]string{"ok", "empty", "timeout", "error"} {
		c.requests[i] = requestsTotal.WithLabelValues(name, r)
	}
	for i, r := range [numFound]string{"hit", "hit_negative", "miss", "stale", "uncacheable"} {
		c.cache[i] = cacheTotal.WithLabelValues(name, r)
	}
	return c
}
