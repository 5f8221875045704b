package intent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

var (
	overlayEntries  = metrics.Desc("overlay_entries", "What operators have changed about backends; change is added, removed or state.", "change")
	instanceDrained = metrics.Desc("instance_drained", "1 while an operator has drained the instance.")
	routeHints      = metrics.Desc("route_hints", "Route hints there are.")
)

func init() {
	metrics.Add(metrics.Func{
		Descs: []*prometheus.Desc{overlayEntries, instanceDrained, routeHints},
		Send:  Process.collect,
	})
}

func (s *Store) collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, n int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	changes := map[string]int{"added": 0, "removed": 0, "state": 0}
	for _, e := range s.Entries() {
		changes[e.Change]++
	}
	for c, n := range changes {
		send(overlayEntries, n, c)
	}
	drained := 0
	if _, ok := s.Drained(); ok {
		drained = 1
	}
	send(instanceDrained, drained)
	send(routeHints, s.hints.Len())
}
