package pool

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

var (
	poolBackends   = metrics.Desc("pool_backends", "Backends of a pool by state: healthy, unhealthy, draining or disabled.", "pool", "state")
	activeSessions = metrics.Desc("backend_active_sessions", "Flows that a backend has now.", "pool", "backend")
	connectErrors  = metrics.Desc("backend_connect_errors_total", "Failed connects to a backend; kind is timeout, refused or unreachable.", "pool", "backend", "kind")
	healthchecks   = metrics.Desc("healthcheck_total", "Health checks of a backend; result is ok or fail.", "pool", "backend", "result")
	lbSelections   = metrics.Desc("lb_selections_total", "Choices of a backend; result is ok, no_backend or at_capacity.", "pool", "strategy", "result")
)

func init() {
	metrics.Add(metrics.Func{
		Descs: []*prometheus.Desc{poolBackends, activeSessions, connectErrors, healthchecks, lbSelections},
		Send:  collect,
	})
}

func collect(ch chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, t prometheus.ValueType, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, t, v, labels...)
	}
	for p := range All() {
		states := map[string]int{"healthy": 0, "unhealthy": 0, "draining": 0, "disabled": 0}
		for _, b := range p.Backends() {
			addr := b.Addr().String()
			switch {
			case b.State() != Enabled:
				states[b.State().String()]++
			case b.Healthy():
				states["healthy"]++
			default:
				states["unhealthy"]++
			}
			send(activeSessions, prometheus.GaugeValue, float64(b.Active()), p.name, addr)
			for _, f := range []relay.Failure{relay.Timeout, relay.Refused, relay.Unreachable} {
				send(connectErrors, prometheus.CounterValue, float64(b.Failures(f)), p.name, addr, f.String())
			}
			passed, failed := b.Checks()
			send(healthchecks, prometheus.CounterValue, float64(passed), p.name, addr, "ok")
			send(healthchecks, prometheus.CounterValue, float64(failed), p.name, addr, "fail")
		}
		for state, n := range states {
			send(poolBackends, prometheus.GaugeValue, float64(n), p.name, state)
		}
	}
	Selections(func(pool, policy string, results [3]uint64) {
		for r, n := range results {
			send(lbSelections, prometheus.CounterValue, float64(n), pool, policy, Result(r).String())
		}
	})
}
