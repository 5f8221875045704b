package listener

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

var current atomic.Pointer[Engines]

// Running returns the engines of the process, nil when no config is running.
func Running() *Engines { return current.Load() }

// endpointKey is what makes two binds the same: flows of one survive a reload
// that has it too.
type endpointKey struct {
	Bind
	sock.Options
	any string // for port 0: the listener and the position, for each gets a port of its own
}

// An endpoint is a bound address. It belongs to the process: a config that
// uses the address pushes its view, and the sockets and their flows stay for
// as long as any config has one. New flows see the view pushed last.
//
// When the last view is gone the endpoint drains: a TCP endpoint closes its
// listening sockets, a UDP endpoint keeps them for the sessions it has and
// takes no new ones until they have ended, the grace has passed, or a config
// takes the endpoint up again.
type endpoint struct {
	key endpointKey

	view atomic.Pointer[view] // the last of views; nil while draining

	mu    sync.Mutex // guards what follows
	views []*view
	last  *view // the last of views when that became empty

	udp *udprelay.Endpoint
	tcp *tcprelay.Endpoint
}

// takeEndpoint returns the endpoint of that key, bound if no config has it.
func takeEndpoint(e *Engines, key endpointKey) (*endpoint, error) {
	v, _, err := processPool.LoadOrNew(key, func() (caddy.Destructor, error) {
		if ep := draining.revive(key); ep != nil {
			return ep, nil
		}
		if !ownPorts.has(key.Bind) { // or a probe would only find ourselves
			if err := sock.Probe(key.Network, key.Addr, key.Options); err != nil {
				return nil, err
			}
		}
		ep := &endpoint{key: key}
		var err error
		if key.Network == "udp" {
			ep.udp, err = e.UDP.Listen(key.Addr, key.Options, ep)
		} else {
			ep.tcp, err = e.TCP.Listen(key.Addr, key.Options, ep)
		}
		if err != nil {
			return nil, err
		}
		ownPorts.add(key.Bind, 1)
		return ep, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*endpoint), nil
}

// ports counts the endpoints that this process has on each port.
type ports struct {
	mu sync.Mutex
	n  map[portKey]int
}

type portKey struct {
	network string
	port    uint16
}

var ownPorts = ports{n: map[portKey]int{}}

func (p *ports) add(b Bind, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := portKey{b.Network, b.Addr.Port()}
	if p.n[k] += n; p.n[k] == 0 {
		delete(p.n, k)
	}
}

func (p *ports) has(b Bind) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.n[portKey{b.Network, b.Addr.Port()}] > 0
}

// giveEndpoint gives a reference back.
func giveEndpoint(ep *endpoint) error {
	_, err := processPool.Delete(ep.key)
	return err
}

func (ep *endpoint) push(v *view) {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.views = append(ep.views, v)
	ep.view.Store(v)
}

func (ep *endpoint) remove(v *view) {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.views = slices.DeleteFunc(ep.views, func(o *view) bool { return o == v })
	if n := len(ep.views); n > 0 {
		ep.view.Store(ep.views[n-1])
		return
	}
	ep.last = v
	if ep.udp != nil { // what a TCP socket still has queued goes to v
		ep.view.Store(nil)
	}
}

// addr is the bound address, with the port the kernel chose for port 0.
func (ep *endpoint) addr() Bind {
	if ep.udp != nil {
		return Bind{"udp", ep.udp.Addr()}
	}
	return Bind{"tcp", ep.tcp.Addr()}
}

// Destruct implements caddy.Destructor: the last config that used the endpoint
// has stopped.
func (ep *endpoint) Destruct() error {
	if ep.tcp != nil {
		ep.tcp.Close()
		ownPorts.add(ep.key.Bind, -1)
		return nil
	}
	ep.mu.Lock()
	last := ep.last
	ep.mu.Unlock()
	if last == nil || ep.udp.Sessions() == 0 {
		ep.closeUDP(relay.Drain)
		return nil
	}
	draining.add(ep)
	last.logger.Info("draining an address that is no longer listened on",
		zap.Stringer("local", ep.addr()), zap.Int("sessions", ep.udp.Sessions()), zap.Duration("grace", last.grace))
	go ep.drain(last.grace)
	return nil
}

func (ep *endpoint) closeUDP(why relay.Reason) {
	ep.udp.Close(why)
	ownPorts.add(ep.key.Bind, -1)
}

// drain closes ep when it is idle or the grace has passed, unless a config has
// taken it up again or the engines have ended by then.
func (ep *endpoint) drain(grace time.Duration) {
	end := time.NewTimer(grace)
	defer end.Stop()
	poll := time.NewTicker(drainPoll)
	defer poll.Stop()
	for idle := false; !idle; {
		select {
		case <-end.C:
			idle = true
		case <-poll.C:
			idle = ep.udp.Sessions() == 0
		}
		if !draining.has(ep) {
			return
		}
	}
	if draining.remove(ep) {
		ep.closeUDP(relay.Drain)
	}
}

// drainPoll is how often a draining endpoint is asked whether it is idle.
const drainPoll = 100 * time.Millisecond

// draining are the UDP endpoints that no config uses and that still have
// sessions. Whoever removes one of them decides what becomes of it.
var draining = drainSet{eps: map[endpointKey]*endpoint{}}

type drainSet struct {
	mu  sync.Mutex
	eps map[endpointKey]*endpoint
}

func (d *drainSet) add(ep *endpoint) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.eps[ep.key] = ep
}

func (d *drainSet) has(ep *endpoint) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.eps[ep.key] == ep
}

func (d *drainSet) remove(ep *endpoint) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.eps[ep.key] != ep {
		return false
	}
	delete(d.eps, ep.key)
	return true
}

// revive takes the endpoint of that key out, for a config that wants it.
func (d *drainSet) revive(key endpointKey) *endpoint {
	d.mu.Lock()
	defer d.mu.Unlock()
	ep := d.eps[key]
	delete(d.eps, key)
	return ep
}

func (d *drainSet) closeAll(why relay.Reason) {
	d.mu.Lock()
	eps := slices.Collect(maps.Values(d.eps))
	clear(d.eps)
	d.mu.Unlock()
	for _, ep := range eps {
		ep.closeUDP(why)
	}
}
