package flow

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Rule is one thing that keeps flows out of a listener: a filter, a limit.
type Rule struct {
	blocked func() prometheus.Counter // made when it is first asked for: some rules are counted elsewhere

	tell atomic.Int64 // when the next flow may be told of, nanoseconds after started
	held atomic.Int64 // how many were not since the last one
}

// tellEvery is how often one of the flows that a rule keeps out is told of.
const tellEvery = 10 * time.Second

// Rule is the rule of that name, which must be one of a few. The look-up takes
// no lock.
func (l *Listener) Rule(name string) *Rule {
	if m := l.rules.Load(); m != nil {
		if r := (*m)[name]; r != nil {
			return r
		}
	}
	return l.addRule(name)
}

func (l *Listener) addRule(name string) *Rule {
	l.mu.Lock()
	defer l.mu.Unlock()
	more := make(map[string]*Rule)
	if m := l.rules.Load(); m != nil {
		maps.Copy(more, *m)
	}
	if more[name] == nil {
		more[name] = &Rule{blocked: sync.OnceValue(func() prometheus.Counter { return blocked.WithLabelValues(l.Name, name) })}
		l.rules.Store(&more)
	}
	return more[name]
}

// Counter counts the flows that the rule keeps out.
func (r *Rule) Counter() prometheus.Counter { return r.blocked() }

// Count counts a flow that the rule keeps out.
func (r *Rule) Count() { r.blocked().Inc() }

// Add counts n of them, which somebody else has turned away.
func (r *Rule) Add(n uint64) { r.blocked().Add(float64(n)) }

// Tell reports whether this flow is one to tell of, and how many were not since
// the last that was.
func (r *Rule) Tell() (held int64, ok bool) {
	now := int64(sinceStart())
	next := r.tell.Load()
	if now < next || !r.tell.CompareAndSwap(next, now+int64(tellEvery)) {
		r.held.Add(1)
		return 0, false
	}
	return r.held.Swap(0), true
}
