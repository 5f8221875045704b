// Package flow is what one connection or UDP session is to the rest of
// Wayhouse: who it belongs to, what it has moved and how it ended. The engines
// hold the flows; this package counts them by listener for as long as the
// process lives and keeps those that a foreign handler serves.
package flow

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Listener counts what a named listener has seen. It outlives configs: a
// listener of the same name goes on where the old one stopped.
type Listener struct {
	Name string

	Conns, Sessions atomic.Int64 // live now, TCP and UDP
	sources         sources

	Accepted prometheus.Counter
	NoRoute  prometheus.Counter
	Rejected prometheus.Counter // by a sniffer
	Turned   prometheus.Counter // away by a route
	Draining prometheus.Counter // the process is ending

	OutsidePrefix prometheus.Counter // sent to an address that is not served
	Loops         prometheus.Counter // whose backend would have been this process

	AcceptErrors prometheus.Counter
	BindFailures prometheus.Counter
	duration     prometheus.Observer
	closed       [2][relay.NumReasons]atomic.Uint64 // TCP, UDP
	panics       atomic.Uint64                      // of goroutines; the workers have their own

	workers atomic.Pointer[[]relay.Counters]
	rules   atomic.Pointer[map[string]*Rule] // by name; the map is not changed

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
			Name:     name,
			Accepted: connections.WithLabelValues(name, "accepted"),
			NoRoute:  connections.WithLabelValues(name, "no_route"),
			Rejected: connections.WithLabelValues(name, "sniffer_reject"),
			Turned:   connections.WithLabelValues(name, "reject"),
			Draining: connections.WithLabelValues(name, "draining"),

			OutsidePrefix: connections.WithLabelValues(name, "outside_prefix"),
			Loops:         connections.WithLabelValues(name, "loop"),

			AcceptErrors: acceptErrors.WithLabelValues(name),
			BindFailures: bindFailures.WithLabelValues(name),
			duration:     durations.WithLabelValues(name),
		}
		listeners[name] = l
		all := slices.Collect(maps.Values(listeners))
		everyListener.Store(&all)
	}
	return l
}

// Forget removes the counters of a listener that no config has any more. It
// reports false, and does nothing, while there are flows of it.
func Forget(name string) bool {
	listenersMu.Lock()
	defer listenersMu.Unlock()
	l := listeners[name]
	if l == nil {
		return true
	}
	if l.Conns.Load() != 0 || l.Sessions.Load() != 0 {
		return false
	}
	delete(listeners, name)
	all := slices.Collect(maps.Values(listeners))
	everyListener.Store(&all)
	return true
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

// Open counts a flow that begins, unless a bound is in its way. Each one that
// Open has counted is given back, for the same client, by Closed or Abandoned.
func (l *Listener) Open(udp bool, client netip.Addr, b Bounds) Full {
	client = cidr.Plain(client)
	full := l.sources.open(client, b)
	switch {
	case full != Room && b.Held:
		l.Release(udp)
	case full == Room && !b.Held && !l.Hold(udp, b.Process):
		l.sources.closed(client)
		full = FullProcess
	}
	return full
}

// Hold counts a flow that begins and whose client is not known yet, unless there
// are as many in the process already; 0 is no bound. It is given back by Release
// or ClosedHeld, or becomes a client's by Open.
func (l *Listener) Hold(udp bool, most int64) bool {
	if !addBelow(ofProcess(udp), most) {
		return false
	}
	l.active(udp).Add(1)
	return true
}

// Release gives back what Hold has counted.
func (l *Listener) Release(udp bool) {
	l.active(udp).Add(-1)
	ofProcess(udp).Add(-1)
}

// addBelow adds one unless there are max already; max 0 means no bound. It
// never shows more than there are, not even for a moment: a place that is free
// is given to who asks for it.
func addBelow(n *atomic.Int64, max int64) bool {
	if max <= 0 {
		n.Add(1)
		return true
	}
	for {
		now := n.Load()
		if now >= max {
			return false
		}
		if n.CompareAndSwap(now, now+1) {
			return true
		}
	}
}

// Abandoned gives back a flow that never reached a backend.
func (l *Listener) Abandoned(udp bool, client netip.Addr) {
	l.sources.closed(cidr.Plain(client))
	l.Release(udp)
}

// GaveUp gives back a connection that has ended, for that reason, before it
// reached a backend.
func (l *Listener) GaveUp(last *relay.Info, why relay.Reason) {
	l.Abandoned(false, last.Client.Addr())
	l.closed[0][why].Add(1)
	l.logClosed(last, why)
}

// Closed gives back a flow that has ended, as it was last.
func (l *Listener) Closed(last *relay.Info, why relay.Reason) {
	udp := last.ID.UDP()
	if !udp || last.PacketsS2C > 0 { // who was never answered may be anybody
		recent.note(cidr.Plain(last.Client.Addr()), sinceStart())
	}
	l.sources.closed(cidr.Plain(last.Client.Addr()))
	l.ClosedHeld(last, why)
}

// ClosedHeld is Closed for a flow whose client has not become known.
func (l *Listener) ClosedHeld(last *relay.Info, why relay.Reason) {
	udp := last.ID.UDP()
	l.Release(udp)
	l.duration.Observe(last.Age.Seconds())
	p := 0
	if udp {
		p = 1
	}
	l.closed[p][why].Add(1)
	l.logClosed(last, why)
}

// Live counts the flows of the process, those included whose route is still
// being decided.
func Live() (conns, sessions int64) { return live.conns.Load(), live.sessions.Load() }

func ofProcess(udp bool) *atomic.Int64 {
	if udp {
		return &live.sessions
	}
	return &live.conns
}

func (l *Listener) active(udp bool) *atomic.Int64 {
	if udp {
		return &l.Sessions
	}
	return &l.Conns
}

// Panicked counts a panic that has ended a flow in a goroutine of its own.
func (l *Listener) Panicked() { l.panics.Add(1) }

// Panics counts the panics that have ended a flow of the listener.
func (l *Listener) Panics() uint64 {
	n := l.panics.Load()
	l.each(func(c *relay.Counters) { n += c.Panics.Load() })
	return n
}

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
