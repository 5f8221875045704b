package proxy

import (
	"cmp"
	"slices"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// Counters belong to the process, by names that configs give. A config that is
// made by a program may give new ones with every load, so what is counted under
// a name that no config has any more is forgotten after a while.

const (
	keepDeparted = 10 * time.Minute // long enough to be read by who collects
	mostDeparted = 256              // the oldest are forgotten sooner
)

// name is one that a config gives, as the value of a label.
type name struct{ label, value string }

// departed are the names that configs have had, and when each was first seen to
// be gone: zero for one that is there.
type departed map[name]time.Time

// see is told which names there are and returns those to forget, the ones that
// have been gone for longest first.
func (d departed) see(now map[name]bool, at time.Time) (forget []name) {
	for n := range now {
		d[n] = time.Time{}
	}
	var gone []name
	for n, since := range d {
		if now[n] {
			continue
		}
		if since.IsZero() {
			d[n] = at
		}
		gone = append(gone, n)
	}
	slices.SortFunc(gone, func(a, b name) int {
		return cmp.Or(d[a].Compare(d[b]), cmp.Compare(a.label, b.label), cmp.Compare(a.value, b.value))
	})
	for i, n := range gone {
		if len(gone)-i > mostDeparted || at.Sub(d[n]) >= keepDeparted {
			forget = append(forget, n)
		}
	}
	return forget
}

// names are those that a and the config it replaces give. The pools of other
// apps are among the running ones.
func (a *App) names() map[name]bool {
	now := make(map[name]bool)
	for l := range a.Listeners {
		now[name{"listener", l}] = true
	}
	for p := range pool.All() {
		now[name{"pool", p.Name()}] = true
	}
	for r := range a.resolvers {
		now[name{"resolver", r}] = true
	}
	for _, s := range a.sniffers.Names() {
		now[name{"name", s}] = true
	}
	return now
}

// forget removes what was counted under a name. It reports false while that is
// still being counted.
func forget(n name) bool {
	switch n.label {
	case "listener":
		if !flow.Forget(n.value) {
			return false
		}
	case "pool":
		pool.ForgetSelections(n.value)
		discovery.Forget(n.value)
	}
	metrics.Forget(n.label, n.value)
	return true
}
