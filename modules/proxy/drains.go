package proxy

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// The end of the flows of a backend whose drain deadline has passed. They are
// ended one by one in a random order, so that their clients do not all connect
// again in the same instant. This belongs to the process: a reload meanwhile
// changes nothing.

// ender ends flows; listener.Engines is one. When it has ended itself, CloseFlow
// knows no flow.
type ender interface {
	Flows(yield func(*relay.Info) bool)
	CloseFlow(id relay.ID, why relay.Reason) bool
	ClosePaths(match func(*relay.Path) bool, why relay.Reason)
}

var drains = drainSet{running: make(map[backendKey]chan struct{})}

type backendKey struct {
	pool string
	addr netip.AddrPort
}

// drainSet has a goroutine for each backend whose flows are being ended. It ends
// by itself in the time of the spread.
type drainSet struct {
	mu      sync.Mutex
	running map[backendKey]chan struct{} // closed to leave what is left
}

// begin ends the flows of a backend, spread over some time.
func (s *drainSet) begin(e ender, pool string, addr netip.AddrPort, spread time.Duration) {
	k := backendKey{pool, addr}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running[k] != nil {
		return
	}
	stop := make(chan struct{})
	s.running[k] = stop
	go func() {
		k.end(e, spread, stop)
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.running[k] == stop {
			delete(s.running, k)
		}
	}()
}

// end leaves the flows of a backend that have not been ended yet.
func (s *drainSet) end(pool string, addr netip.AddrPort) {
	k := backendKey{pool, addr}
	s.mu.Lock()
	defer s.mu.Unlock()
	if stop := s.running[k]; stop != nil {
		close(stop)
		delete(s.running, k)
	}
}

// drainTick is how often some of the flows are ended.
const drainTick = 50 * time.Millisecond

// end ends the flows of a backend until all have ended, stop is closed or the
// engines are gone.
func (k backendKey) end(e ender, spread time.Duration, stop <-chan struct{}) {
	match := func(p *relay.Path) bool { return p != nil && p.Pool == k.pool && p.Backend == k.addr }
	var ids []relay.ID
	e.Flows(func(i *relay.Info) bool {
		if match(i.Path) {
			ids = append(ids, i.ID)
		}
		return true
	})
	rand.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	processLog.Info("the drain deadline has passed; ending what is left",
		zap.String("pool", k.pool), zap.Stringer("upstream", k.addr), zap.Int("flows", len(ids)), zap.Duration("spread", spread))
	tick := time.NewTicker(drainTick)
	defer tick.Stop()
	began, done := time.Now(), 0
	for done < len(ids) {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		due := len(ids)
		if passed := time.Since(began); passed < spread {
			due = int(float64(due) * float64(passed) / float64(spread))
		}
		for ; done < due; done++ {
			select {
			case <-stop:
				return
			default:
				e.CloseFlow(ids[done], relay.Drain)
			}
		}
	}
	select {
	case <-stop:
	default:
		e.ClosePaths(match, relay.Drain) // those that were connecting meanwhile
	}
}

// Interface guard
var _ ender = (*listener.Engines)(nil)
