// Package flow is what one connection or UDP session is to the rest of
// Wayhouse: who it belongs to, what it has moved and how it ended. The engines
// hold the flows; this package counts them by listener for as long as the
// process lives and keeps those that a foreign handler serves.
package flow

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Listener counts what a named listener has seen. It outlives configs: a
// listener of the same name goes on where the old one stopped.
type Listener struct {
	Name string

	Conns, Sessions atomic.Int64 // live now, TCP and UDP

	Accepted     prometheus.Counter
	NoRoute      prometheus.Counter
	Rejected     prometheus.Counter // by a sniffer
	AcceptErrors prometheus.Counter
	BindFailures prometheus.Counter
	Panics       prometheus.Counter
	duration     prometheus.Observer
	closed       [2][relay.NumReasons]atomic.Uint64 // TCP, UDP

	workers atomic.Pointer[[]relay.Counters]

	companions atomic.Pointer[companions] // nil: nobody follows this listener

	mu        sync.Mutex // guards what follows
	followers int
	retired   []*[]relay.Counters // of engines that are gone
}

var (
	listenersMu sync.Mutex
	listeners   = map[string]*Listener{}
)

// ListenerOf returns the counters of the listener of that name.
func ListenerOf(name string) *Listener {
	listenersMu.Lock()
	defer listenersMu.Unlock()
	l := listeners[name]
	if l == nil {
		l = &Listener{
			Name:         name,
			Accepted:     connections.WithLabelValues(name, "accepted"),
			NoRoute:      connections.WithLabelValues(name, "no_route"),
			Rejected:     connections.WithLabelValues(name, "sniffer_reject"),
			AcceptErrors: acceptErrors.WithLabelValues(name),
			BindFailures: bindFailures.WithLabelValues(name),
			Panics:       panics.WithLabelValues(name),
			duration:     durations.WithLabelValues(name),
		}
		listeners[name] = l
	}
	return l
}

// Workers returns a set of counters for n workers, the same one for as long
// as n does not change.
func (l *Listener) Workers(n int) []relay.Counters {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.workers.Load(); p != nil {
		if len(*p) == n {
			return *p
		}
		l.retired = append(l.retired, p)
	}
	cs := make([]relay.Counters, n)
	l.workers.Store(&cs)
	return cs
}

// live counts the flows of the whole process.
var live struct{ conns, sessions atomic.Int64 }

// Open counts a flow that begins, unless the process has max of its kind
// already; max 0 means no bound. Each one that Open has counted is given back
// by Closed or Abandoned.
func (l *Listener) Open(udp bool, max int64) bool {
	n := &live.conns
	if udp {
		n = &live.sessions
	}
	if now := n.Add(1); max > 0 && now > max {
		n.Add(-1)
		return false
	}
	l.active(udp).Add(1)
	return true
}

// Abandoned gives back a flow that never reached a backend.
func (l *Listener) Abandoned(udp bool) {
	l.active(udp).Add(-1)
	if udp {
		live.sessions.Add(-1)
	} else {
		live.conns.Add(-1)
	}
}

// Closed gives back a flow that has ended after age.
func (l *Listener) Closed(udp bool, age time.Duration, why relay.Reason) {
	l.Abandoned(udp)
	l.duration.Observe(age.Seconds())
	p := 0
	if udp {
		p = 1
	}
	l.closed[p][why].Add(1)
}

// Live counts the flows of the process, those included whose route is still
// being decided.
func Live() (conns, sessions int64) { return live.conns.Load(), live.sessions.Load() }

func (l *Listener) active(udp bool) *atomic.Int64 {
	if udp {
		return &l.Sessions
	}
	return &l.Conns
}

// Blocked counts a flow that a filter or a limit has turned away.
func (l *Listener) Blocked(filter string) { blocked.WithLabelValues(l.Name, filter).Inc() }

// each calls f with every counter set of the listener, those of engines that
// are gone included, so that sums never fall.
func (l *Listener) each(f func(*relay.Counters)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sets := l.retired
	if p := l.workers.Load(); p != nil {
		sets = append(sets[:len(sets):len(sets)], p)
	}
	for _, set := range sets {
		for i := range *set {
			f(&(*set)[i])
		}
	}
}
