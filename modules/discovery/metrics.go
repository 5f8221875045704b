package discovery

import (
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

var (
	refreshTotal = metrics.Counter("discovery_refresh_total",
		"Times that a pool's source was asked, by result: ok, empty, error or withdrawn.", "pool", "kind", "result")
	skippedTotal = metrics.Counter("discovery_endpoints_skipped_total",
		"Endpoints of answers that were left out; reason is invalid, duplicate or too_many.", "pool", "kind", "reason")
	backends    = metrics.Desc("discovery_backends", "Backends that a pool's source told of when it was last asked with success.", "pool")
	lastSuccess = metrics.Desc("discovery_last_success_timestamp_seconds",
		"Unix time at which a pool's source was last asked with success; 0 before the first.", "pool", "kind")
)

func init() {
	metrics.Add(metrics.Func{Descs: []*prometheus.Desc{backends, lastSuccess}, Send: collect})
}

// result is what became of one question.
type result uint8

const (
	resultOK result = iota
	resultEmpty
	resultError
	resultWithdrawn
	numResults
)

// counters are those of a pool and a kind.
type counters struct {
	refresh [numResults]prometheus.Counter
	skipped [numSkips]prometheus.Counter
}

// known are the counters there have been, one for each pool and kind.
var known = struct {
	mu sync.Mutex
	by map[[2]string]*counters
}{by: make(map[[2]string]*counters)}

func countersOf(pool, kind string) *counters {
	known.mu.Lock()
	defer known.mu.Unlock()
	key := [2]string{pool, kind}
	if c := known.by[key]; c != nil {
		return c
	}
	c := new(counters)
	for i, r := range [numResults]string{"ok", "empty", "error", "withdrawn"} {
		c.refresh[i] = refreshTotal.WithLabelValues(pool, kind, r)
	}
	for i, r := range [numSkips]string{"invalid", "duplicate", "too_many"} {
		c.skipped[i] = skippedTotal.WithLabelValues(pool, kind, r)
	}
	known.by[key] = c
	return c
}

// Forget removes the counters of a pool that no config has any more.
func Forget(pool string) {
	known.mu.Lock()
	defer known.mu.Unlock()
	for key := range known.by {
		if key[0] == pool {
			delete(known.by, key)
		}
	}
}

func (c *counters) add(r result, left skipped) {
	c.refresh[r].Inc()
	for i, n := range left {
		c.skipped[i].Add(float64(n))
	}
}

// running are the uses of running pools, in the order in which they started.
var running started

type started struct {
	mu  sync.Mutex
	all []*Use
}

func (s *started) add(u *Use) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, u)
}

func (s *started) drop(u *Use) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = slices.DeleteFunc(s.all, func(o *Use) bool { return o == u })
}

// newest are the uses by pool, of the newest config.
func (s *started) newest() map[string]*Use {
	s.mu.Lock()
	defer s.mu.Unlock()
	pools := make(map[string]*Use)
	for _, u := range s.all {
		pools[u.pool] = u
	}
	return pools
}

func collect(ch chan<- prometheus.Metric) {
	for pool, u := range running.newest() {
		u.task.mu.Lock()
		n, at := len(u.task.set), u.task.success
		u.task.mu.Unlock()
		seconds := 0.0
		if !at.IsZero() {
			seconds = float64(at.UnixMilli()) / 1000
		}
		ch <- prometheus.MustNewConstMetric(backends, prometheus.GaugeValue, float64(n), pool)
		ch <- prometheus.MustNewConstMetric(lastSuccess, prometheus.GaugeValue, seconds, pool, u.Kind())
	}
}
