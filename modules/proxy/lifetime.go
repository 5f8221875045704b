package proxy

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// instances follows the apps of this process through reloads: which one is
// running.
var instances lifetimes

type lifetimes struct {
	mu      sync.Mutex
	current *App
	before  map[*App]*App // what was running when an app started

	departed departed
}

// Running is the app of the config that runs, nil without one.
func Running() *App {
	instances.mu.Lock()
	defer instances.mu.Unlock()
	return instances.current
}

func (l *lifetimes) started(a *App) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.before == nil {
		l.before = make(map[*App]*App)
		l.departed = make(departed)
	}
	l.before[a] = l.current
	l.current = a
	a.since = time.Now()
	configs.started()
	for _, n := range l.departed.see(a.names(), a.since) {
		if forget(n) {
			delete(l.departed, n)
		}
	}
}

// stopped hears that a has stopped. Caddy stops the old config only after the
// new one has wholly started; when it is the new one that stops, another of its
// apps has failed and the old one goes on.
func (l *lifetimes) stopped(a *App) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.before[a]
	delete(l.before, a)
	if l.current == a {
		l.current = old
	}
	for newer, old := range l.before {
		if old == a {
			l.before[newer] = nil // a comes back no more
		}
	}
}

// watcher ends or moves flows whose backend is down or gone.
type watcher struct{}

// BackendDown implements pool.Watcher. It is about UDP: a TCP connection whose
// backend is gone ends by itself.
func (watcher) BackendDown(p *pool.Pool, addr netip.AddrPort, mode pool.DownMode) {
	e := listener.Running()
	if e == nil {
		return
	}
	if mode == pool.DownRehome {
		e.UDP.Rehome(to(p, addr))
		return
	}
	e.UDP.ClosePaths(to(p, addr), relay.BackendDown)
}

// BackendRemoved implements pool.Watcher.
func (watcher) BackendRemoved(p *pool.Pool, addr netip.AddrPort, mode pool.RemovedMode) {
	e := listener.Running()
	if e == nil {
		return
	}
	if mode == pool.RemovedDrain {
		drains.begin(e, p.Name(), addr, p.Settings().DrainSpread())
		return
	}
	e.ClosePaths(to(p, addr), relay.BackendDown)
}

// BackendReturned implements pool.Watcher.
func (watcher) BackendReturned(p *pool.Pool, addr netip.AddrPort) { drains.end(p.Name(), addr) }

// to selects the paths to one backend of a pool.
func to(p *pool.Pool, addr netip.AddrPort) func(*relay.Path) bool {
	name := p.Name()
	return func(path *relay.Path) bool { return path.Pool == name && path.Backend == addr }
}

// stopping is set when the process has begun to end.
var stopping atomic.Bool

// Stopping reports whether the process has begun to end and takes no new
// flows.
func Stopping() bool { return stopping.Load() || caddy.Exiting() }

// shutDown turns new flows away and waits for those there are, for the grace at
// the most. A second signal ends the wait.
func (a *App) shutDown() {
	stopping.Store(true)
	for _, l := range a.Listeners {
		l.Refuse()
	}
	if live := a.engines.Live(); live > 0 {
		a.logger.Info("waiting for flows to end", zap.Int("flows", live), zap.Duration("grace", a.grace))
	}
	// A stop by the admin API comes without a signal; the one that made Caddy
	// stop may be counted a moment later.
	first, settled := int32(1), false
	began := time.Now()
	poll := time.NewTicker(shutdownPoll)
	defer poll.Stop()
	for live := a.engines.Live(); live > 0; live = a.engines.Live() {
		waited := time.Since(began)
		if !settled && waited > firstSignal {
			first, settled = min(signals.ends.Load(), 1), true
		}
		if signals.ends.Load() > first {
			a.logger.Warn("a second signal; closing what is left", zap.Int("flows", live))
			return
		}
		if waited >= a.grace {
			a.logger.Info("the grace has passed; closing what is left", zap.Int("flows", live))
			return
		}
		<-poll.C
	}
}

// firstSignal is how long the signal that has made Caddy stop may take to
// reach us too.
const firstSignal = 200 * time.Millisecond

const shutdownPoll = 20 * time.Millisecond

// leave gives the engines back. When this was the last config that used them,
// the flows they still have get the grace first; at the end of the process
// shutDown has given it.
func (a *App) leave() {
	e := a.engines
	a.engines = nil
	if caddy.Exiting() || e.Live() == 0 || Running() != nil {
		listener.ReleaseEngines()
		endSessionLog(a.logger.Named(flow.LogName))
		return
	}
	a.logger.Info("no listeners are left; draining", zap.Int("flows", e.Live()), zap.Duration("grace", a.grace))
	go func() {
		end := time.NewTimer(a.grace)
		defer end.Stop()
		poll := time.NewTicker(shutdownPoll)
		defer poll.Stop()
		for e.Live() > 0 {
			select {
			case <-poll.C:
				continue
			case <-end.C:
			}
			break
		}
		listener.ReleaseEngines()
		endSessionLog(processLog.Named(flow.LogName))
	}()
}
