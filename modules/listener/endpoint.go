package listener

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"

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
// When the last view is gone the endpoint drains, see drain.go: a TCP endpoint
// closes its listening sockets, a UDP endpoint keeps them for the sessions it
// has and takes no new ones until they have ended, the grace has passed, or a
// config takes the endpoint up again.
type endpoint struct {
	key endpointKey

	view  atomic.Pointer[view] // the last of views; nil while draining
	told  atomic.Bool          // it has had a view that believes PROXY headers
	ready chan struct{}        // closed with the first view, or when there will be none
	once  sync.Once            // closes ready

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
		if !bound.inTheWay(key) { // or a probe would only find ourselves
			if err := sock.Probe(key.Network, key.Addr, key.Options); err != nil {
				return nil, err
			}
		}
		ep := &endpoint{key: key, ready: make(chan struct{})}
		var err error
		if key.Network == "udp" {
			ep.udp, err = e.UDP.Listen(key.Addr, key.Options, ep)
		} else {
			ep.tcp, err = e.TCP.Listen(key.Addr, key.Options, ep)
		}
		if err != nil {
			return nil, err
		}
		bound.add(ep)
		return ep, nil
	})
	if err != nil {
		return nil, err
	}
	return v.(*endpoint), nil
}

// giveEndpoint gives a reference back.
func giveEndpoint(ep *endpoint) error {
	_, err := processPool.Delete(ep.key)
	return err
}

func (ep *endpoint) push(v *view) {
	if v.proxied != nil {
		ep.told.Store(true)
	}
	ep.mu.Lock()
	ep.views = append(ep.views, v)
	ep.showLocked(v)
	first := false
	ep.once.Do(func() {
		close(ep.ready)
		first = true
	})
	ep.mu.Unlock()
	if first { // without the lock, for which a worker may wait
		draining.yield(ep)
	}
	// The clients of a server to which nothing leads now are sessions from here on.
	endGuests(func(g *guest) bool { return g.key.ep == ep && !v.leadsTo(g.to) }, relay.Drain)
}

// showLocked has new flows see v. What has come to be a client's by a header
// goes on, whatever v believes.
func (ep *endpoint) showLocked(v *view) {
	if ep.udp != nil {
		ep.udp.SetHeaders(v.headers)
	}
	ep.view.Store(v)
}

func (ep *endpoint) remove(v *view) {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.views = slices.DeleteFunc(ep.views, func(o *view) bool { return o == v })
	if n := len(ep.views); n > 0 {
		ep.showLocked(ep.views[n-1])
		return
	}
	ep.last = v
	if ep.udp != nil { // what a TCP socket still has queued goes to v
		ep.view.Store(nil)
	}
}

// listener is the name of the listener that has the endpoint, or had it last.
func (ep *endpoint) listener() string {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	switch {
	case len(ep.views) > 0:
		return ep.views[len(ep.views)-1].name
	case ep.last != nil:
		return ep.last.name
	}
	return ""
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
	ep.mu.Lock()
	last := ep.last
	ep.mu.Unlock()
	switch {
	case ep.tcp != nil:
		ep.once.Do(func() { close(ep.ready) })
		ep.tcp.Close()
		bound.remove(ep)
		if last != nil {
			leaving.add(ep, last.grace)
		}
	case last != nil && ep.udp.Sessions() > 0 && !bound.replaced(ep):
		draining.begin(ep, last)
	default:
		ep.closeUDP(relay.Drain)
	}
	return nil
}

func (ep *endpoint) closeUDP(why relay.Reason) {
	ep.udp.Close(why)
	endGuests(func(g *guest) bool { return g.key.ep == ep }, why)
	bound.remove(ep)
}
