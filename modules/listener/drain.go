package listener

import (
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// What becomes of the flows of an address that no config uses any more. A UDP
// endpoint keeps its sockets for its sessions and is in draining meanwhile. The
// connections of a TCP endpoint need no socket of it, so it is closed at once
// and its address is in leaving; when the grace has passed, those connections
// end that no other endpoint would take now. So a listener may be renamed, or
// an address go from one to another, and its connections do not notice.

var leaving leavingSet

type leavingSet struct {
	mu   sync.Mutex
	list []left
}

type left struct {
	ep  *endpoint // closed
	due time.Time
}

// together is how far apart addresses may fall due that are dealt with in one
// walk over the connections.
const together = 100 * time.Millisecond

func (s *leavingSet) add(ep *endpoint, grace time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, left{ep, time.Now().Add(grace)})
	time.AfterFunc(grace, s.sweep)
}

// sweep ends the connections of the addresses that are due.
func (s *leavingSet) sweep() {
	now := time.Now().Add(together)
	due := newReach()
	var logger *zap.Logger
	s.mu.Lock()
	s.list = slices.DeleteFunc(s.list, func(l left) bool {
		if l.due.After(now) {
			return false
		}
		due.add(l.ep)
		logger = l.ep.last.logger
		return true
	})
	s.mu.Unlock()
	e := Running()
	if e == nil || len(due.at) == 0 {
		return
	}
	if n := e.closeUnbound(due); n > 0 {
		logger.Info("the grace has passed; closed the connections of addresses that are no longer listened on", zap.Int("connections", n))
	}
}

// A drain is a UDP endpoint that waits for its sessions to end.
type drain struct {
	ep   *endpoint
	over chan struct{} // closed when somebody else has decided
}

// run closes the endpoint when it is idle or the grace has passed.
func (d *drain) run(grace time.Duration) {
	end := time.NewTimer(grace)
	defer end.Stop()
	poll := time.NewTicker(drainPoll)
	defer poll.Stop()
	for idle := false; !idle; {
		select {
		case <-d.over:
			return
		case <-end.C:
			idle = true
		case <-poll.C:
			idle = d.ep.udp.Sessions() == 0
		}
	}
	if draining.remove(d) {
		d.ep.closeUDP(relay.Drain)
	}
}

// drainPoll is how often a draining endpoint is asked whether it is idle.
const drainPoll = 100 * time.Millisecond

// draining are the UDP endpoints that no config uses and that still have
// sessions. Whoever takes one of them out decides what becomes of it.
var draining = drainSet{drains: map[endpointKey]*drain{}}

type drainSet struct {
	mu     sync.Mutex
	drains map[endpointKey]*drain
}

// begin drains an endpoint whose last view was last.
func (s *drainSet) begin(ep *endpoint, last *view) {
	d := &drain{ep, make(chan struct{})}
	s.mu.Lock()
	s.drains[ep.key] = d
	s.mu.Unlock()
	last.logger.Info("draining an address that is no longer listened on",
		zap.Stringer("local", ep.addr()), zap.Int("sessions", ep.udp.Sessions()), zap.Duration("grace", last.grace))
	go d.run(last.grace)
}

func (s *drainSet) remove(d *drain) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.drains[d.ep.key] != d {
		return false
	}
	delete(s.drains, d.ep.key)
	return true
}

// revive takes the endpoint of that key out, for a config that wants it.
func (s *drainSet) revive(key endpointKey) *endpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.drains[key]
	if d == nil {
		return nil
	}
	delete(s.drains, key)
	close(d.over)
	return d.ep
}

// yield closes what drains on the address of ep with other options. Both have
// sockets there, and the kernel would give the old ones part of the new clients.
func (s *drainSet) yield(ep *endpoint) {
	s.mu.Lock()
	var same []*drain
	for key, d := range s.drains {
		if key.Bind == ep.key.Bind && key.any == ep.key.any {
			same = append(same, d)
			delete(s.drains, key)
		}
	}
	s.mu.Unlock()
	for _, d := range same {
		close(d.over)
		d.ep.closeUDP(relay.Drain)
	}
}

func (s *drainSet) closeAll(why relay.Reason) {
	s.mu.Lock()
	all := slices.Collect(maps.Values(s.drains))
	clear(s.drains)
	s.mu.Unlock()
	for _, d := range all {
		close(d.over)
		d.ep.closeUDP(why)
	}
}
