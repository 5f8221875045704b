package offload

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

var (
	up      = metrics.Gauge("offload_up", "1 while the kernel turns sources away for this process.")
	entries = metrics.Gauge("offload_entries", "What the kernel has been given: ranges of denied addresses, sources over their limit, clients to keep.", "kind")
	blocks  = metrics.Counter("offload_blocked_sources_total", "Sources over their limit that the kernel was given.", "listener")
	missed  = metrics.Counter("offload_missed_total", "What the kernel could not be given, by what was full.", "reason")
	remade  = metrics.Counter("offload_remade_total", "Tables made anew because the one before failed or was removed.")

	droppedTotal = metrics.Desc("offload_dropped_total", "Packets that the kernel has dropped.", "listener", "reason")
)

func init() {
	metrics.Add(metrics.Func{Descs: []*prometheus.Desc{droppedTotal}, Send: collect})
	for _, kind := range []string{"denied", "blocked", "kept"} {
		entries.WithLabelValues(kind)
	}
	for _, reason := range []string{"queue", "max_blocked", "kept"} {
		missed.WithLabelValues(reason)
	}
}

// drops are the packets dropped by every table there was.
var drops = dropCounts{byListener: make(map[string]*[causes]uint64)}

type dropCounts struct {
	mu         sync.Mutex
	byListener map[string]*[causes]uint64
}

func (d *dropCounts) add(listener string, cause int, n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := d.byListener[listener]
	if c == nil {
		c = new([causes]uint64)
		d.byListener[listener] = c
	}
	c[cause] += n
}

// readWait is how long a scrape waits for the table to be read.
const readWait = 500 * time.Millisecond

// collect asks the kernel, in the goroutine that has the table: no worker
// notices. When that is busy, what was read last has to do.
func collect(ch chan<- prometheus.Metric) {
	if k := current.Load(); k != nil {
		k.read(readWait)
	}
	drops.mu.Lock()
	defer drops.mu.Unlock()
	for listener, n := range drops.byListener {
		for cause, reason := range []string{byList: "denied", byLimit: "limited"} {
			ch <- prometheus.MustNewConstMetric(droppedTotal, prometheus.CounterValue, float64(n[cause]), listener, reason)
		}
	}
}

// read has run count now, and waits a while for it.
func (k *Kernel) read(wait time.Duration) {
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	done := make(chan struct{})
	select {
	case k.calls <- func() {
		defer close(done)
		if k.t != nil {
			k.count()
		}
	}:
	case <-timeout.C:
		return
	case <-k.done:
		return
	}
	select {
	case <-done:
	case <-timeout.C:
	}
}
