package flow

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

var (
	connections  = metrics.Counter("listener_connections_total", "TCP connections by what became of them.", "listener", "result")
	acceptErrors = metrics.Counter("accept_errors_total", "Failed accepts, typically for want of file descriptors.", "listener")
	bindFailures = metrics.Counter("listener_bind_failures_total", "Loads that could not bind the listener.", "listener")
	blocked      = metrics.Counter("filter_blocked_total", "New connections and UDP sessions turned away by a filter or a limit.", "listener", "filter")
	durations    = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: metrics.Namespace, Name: "connection_duration_seconds",
		Help:    "How long connections and UDP sessions lasted.",
		Buckets: []float64{.01, .1, 1, 10, 60, 300, 900, 1800, 3600, 7200, 21600},
	}, []string{"listener"})

	activeConns    = metrics.Desc("active_connections", "Live TCP connections.", "listener")
	activeSessions = metrics.Desc("active_udp_sessions", "Live UDP sessions.", "listener")
	closedTotal    = metrics.Desc("flows_closed_total", "Connections and UDP sessions that have ended, by protocol and reason.", "listener", "proto", "reason")
	bytesTotal     = metrics.Desc("bytes_total", "Bytes passed on; dir is c2s or s2c.", "listener", "dir")
	packetsTotal   = metrics.Desc("packets_total", "Datagrams passed on; dir is c2s or s2c.", "listener", "dir")
	panicsTotal    = metrics.Desc("panics_total", "Panics of matchers, handlers, balancers and filters that were contained; the flow that one was about ends.", "listener")
	droppedTotal   = metrics.Desc("datagrams_dropped_total", "Datagrams not passed on, by reason.", "listener", "reason")
)

func init() {
	metrics.Add(durations, metrics.Func{
		Descs: []*prometheus.Desc{activeConns, activeSessions, closedTotal, bytesTotal, packetsTotal, droppedTotal, panicsTotal},
		Send:  collect,
	})
}

func collect(ch chan<- prometheus.Metric) {
	listenersMu.Lock()
	all := make([]*Listener, 0, len(listeners))
	for _, l := range listeners {
		all = append(all, l)
	}
	listenersMu.Unlock()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	for _, l := range all {
		var bc, bs, pc, ps uint64
		var dropped [relay.NumDrops]uint64
		l.each(func(c *relay.Counters) {
			bc += c.BytesC2S.Load()
			bs += c.BytesS2C.Load()
			pc += c.PacketsC2S.Load()
			ps += c.PacketsS2C.Load()
			for i := range dropped {
				dropped[i] += c.Dropped[i].Load()
			}
		})
		gauge(activeConns, float64(l.Conns.Load()), l.Name)
		gauge(activeSessions, float64(l.Sessions.Load()), l.Name)
		counter(panicsTotal, l.Panics(), l.Name)
		counter(bytesTotal, bc, l.Name, "c2s")
		counter(bytesTotal, bs, l.Name, "s2c")
		counter(packetsTotal, pc, l.Name, "c2s")
		counter(packetsTotal, ps, l.Name, "s2c")
		for p, proto := range []string{"tcp", "udp"} {
			for why := relay.ClientClose; why < relay.NumReasons; why++ {
				counter(closedTotal, l.closed[p][why].Load(), l.Name, proto, why.String())
			}
		}
		for i, n := range dropped {
			if relay.Drop(i) != relay.Filtered { // counted by filter_blocked_total
				counter(droppedTotal, n, l.Name, relay.Drop(i).String())
			}
		}
	}
}
