package listener

import (
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

// AcceptorAt decides about connections to a bound address; nil: nobody does.
func AcceptorAt(at netip.AddrPort) tcprelay.Acceptor {
	bound.mu.Lock()
	defer bound.mu.Unlock()
	for k, eps := range bound.byPort {
		for _, ep := range eps {
			if k.network == "tcp" && ep.addr().Addr == at {
				return ep
			}
		}
	}
	return nil
}

// BoundGuests sets how many guests a listener may have.
func BoundGuests(name string, most int64) { guestsOf(flow.ListenerOf(name)).most = most }

// SweepGuests sweeps the guests of a listener, now or when all have been idle for
// too long.
func SweepGuests(name string, later bool) {
	now := sinceStarted()
	if later {
		now += int64(heldIdle)
	}
	guestsOf(flow.ListenerOf(name)).sweep(now)
}

// HeadersRead counts what PROXY headers have told a listener.
func HeadersRead(listener, told string) prometheus.Counter {
	return headersRead.WithLabelValues(listener, told)
}

// CountersOf are the counters of a listener, by worker.
func CountersOf(listener string) []relay.Counters {
	return flow.ListenerOf(listener).Workers(max(Running().TCP.Workers(), Running().UDP.Workers()))
}
