package proxy

import (
	"fmt"
	"net/netip"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/offload"
)

// ruleKernel is what packets that the kernel has dropped are counted under,
// beside those that filters have refused.
const ruleKernel = "kernel"

// What a source that has all the flows a source_limit allows is let through at:
// how soon one of them ends is not known to the kernel.
const (
	capPerSecond = 5
	capBurst     = 20
)

// acquireOffload takes the kernel's help, where the config wants it.
func (a *App) acquireOffload() (*offload.Kernel, error) {
	if a.Offload == nil {
		return nil, nil
	}
	k, err := offload.Acquire(a.Offload, offload.Surroundings{
		Logger: processLog.Named("offload"),
		Flows:  clients,
		Count:  func(name string, packets uint64) { flow.ListenerOf(name).Rule(ruleKernel).Add(packets) },
	})
	if err != nil {
		return nil, fmt.Errorf("offload: %w", err)
	}
	return k, nil
}

// clients are those of all UDP sessions whose packets come from them, and not from
// a load balancer that tells of them.
func clients(yield func(netip.AddrPort) bool) {
	e := listener.Running()
	if e == nil {
		return
	}
	told := make(map[string]bool)
	if app := Running(); app != nil {
		for name, l := range app.Listeners {
			told[name] = l.AcceptProxy != nil
		}
	}
	e.Sessions(func(i *relay.Info) bool { return told[i.Path.Listener] || yield(i.Client) })
}

// shield has the listeners tell the kernel's side of their new flows. They are
// open and do not serve yet.
func (a *App) shield(k *offload.Kernel, opened []*listener.Listener) *offload.Use {
	var scopes []*offload.Scope
	for _, l := range opened {
		scopes = append(scopes, scopeOf(l))
	}
	use := k.Prepare(a.Offload, scopes)
	for _, l := range opened {
		if s := use.Shield(l.Name()); s != nil {
			l.SetShield(s)
		}
	}
	return use
}

// scopeOf is what the kernel may know of a listener.
func scopeOf(l *listener.Listener) *offload.Scope {
	s := &offload.Scope{Listener: l.Name(), Guard: l.Shieldable()}
	for _, b := range l.Bound() {
		s.Binds = append(s.Binds, offload.Bind{UDP: b.Network == "udp", Addr: b.Addr})
	}
	f := l.Filters()
	s.Denied = f.Denied
	perIP, perNet := f.Rates()
	capIP, capNet := f.Caps()
	s.PerIP, s.PerNet = passed(perIP, capIP), passed(perNet, capNet)
	return s
}

// passed is the rate at which a source over a limit is let through.
func passed(r filter.Rate, bound int64) offload.Rate {
	p := offload.Rate{PerSecond: float64(r.Rate), Burst: r.Most()}
	if bound > 0 {
		p.PerSecond, p.Burst = max(p.PerSecond, capPerSecond), max(p.Burst, capBurst)
	}
	return p
}
