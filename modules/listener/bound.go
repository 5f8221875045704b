package listener

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// bound are the endpoints whose sockets this process has, draining ones
// included.
var bound = boundSet{byPort: map[portKey][]*endpoint{}}

type boundSet struct {
	mu     sync.Mutex
	byPort map[portKey][]*endpoint // by the port that was asked for
}

type portKey struct {
	network string
	port    uint16
}

func (k endpointKey) portKey() portKey { return portKey{k.Network, k.Addr.Port()} }

func (s *boundSet) add(ep *endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := ep.key.portKey()
	s.byPort[k] = append(s.byPort[k], ep)
}

func (s *boundSet) remove(ep *endpoint) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := ep.key.portKey()
	rest := slices.DeleteFunc(s.byPort[k], func(o *endpoint) bool { return o == ep })
	if s.byPort[k] = rest; len(rest) == 0 {
		delete(s.byPort, k)
	}
}

// inTheWay reports whether an endpoint of ours would be what a probe of that
// address finds.
func (s *boundSet) inTheWay(k endpointKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.byPort[k.portKey()], func(ep *endpoint) bool {
		a, b := ep.key.Addr.Addr(), k.Addr.Addr()
		return a == b || a.IsUnspecified() || b.IsUnspecified()
	})
}

// Takes reports whether a listener of this process takes what is sent to an
// address, over tcp or udp.
func Takes(network string, to netip.AddrPort) bool {
	exact, wild := bound.at(network, to)
	return exact || wild && sock.IsLocal(to.Addr())
}

// at reports whether an endpoint has that address, or its port at every address.
func (s *boundSet) at(network string, to netip.AddrPort) (exact, wild bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, port := range [...]uint16{to.Port(), 0} { // 0: the kernel has chosen another
		for _, ep := range s.byPort[portKey{network, port}] {
			a := ep.addr().Addr
			exact = exact || a == to
			wild = wild || a.Port() == to.Port() && a.Addr().IsUnspecified()
		}
	}
	return exact, wild
}

// replaced reports whether another endpoint has the same address, bound with
// other options.
func (s *boundSet) replaced(ep *endpoint) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.byPort[ep.key.portKey()], func(o *endpoint) bool {
		return o != ep && o.key.Bind == ep.key.Bind && o.key.any == ep.key.any
	})
}

// heir is what a UDP endpoint that drains does with new clients: as the wildcard
// wants that would have them if the sockets were closed by now. It is nil
// without one. The kernel prefers the narrower address, and so they would be
// lost for as long as the drain takes.
func (s *boundSet) heir(ep *endpoint) (v *view) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := ep.key.Addr.Addr()
	for _, o := range s.byPort[ep.key.portKey()] {
		wide := o.key.Addr.Addr()
		if o == ep || !wide.IsUnspecified() || wide == a || a.Is6() && wide.Is4() || o.key.Transparent || ep.key.Transparent {
			continue
		}
		// One without routes would answer by the socket that is about to go. Of
		// the two wildcards that of the family has them.
		if w := o.view.Load(); w != nil && len(w.routes) > 0 && (v == nil || wide.Is4()) {
			v = w
		}
	}
	return v
}

// tcp are the addresses on which connections arrive.
func (s *boundSet) tcp() reach {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := newReach()
	for k, eps := range s.byPort {
		for _, ep := range eps {
			if k.network == "tcp" {
				r.add(ep)
			}
		}
	}
	return r
}

// reach is a set of addresses, with wildcards and, of transparent endpoints and
// those that believe PROXY headers, listeners: their connections may have been
// made to any address.
type reach struct {
	at  map[netip.AddrPort]struct{}
	any map[string]struct{}
}

func newReach() reach {
	return reach{make(map[netip.AddrPort]struct{}), make(map[string]struct{})}
}

func (r reach) add(ep *endpoint) {
	r.at[ep.addr().Addr] = struct{}{}
	if ep.key.Transparent || ep.told.Load() {
		r.any[ep.listener()] = struct{}{}
	}
}

// has reports whether a connection arrives, or has arrived, here: by its address
// of ours or by its listener.
func (r reach) has(i *relay.Info) bool {
	at := func(a netip.Addr) bool {
		_, ok := r.at[netip.AddrPortFrom(a, i.Local.Port())]
		return ok
	}
	_, ok := r.any[i.Path.Listener]
	return ok || at(i.Local.Addr()) || at(netip.IPv6Unspecified()) || i.Local.Addr().Is4() && at(netip.IPv4Unspecified())
}

// closeUnbound ends the TCP connections that have come by one of the addresses
// in by and that no endpoint would take now, and returns how many it was.
func (e *Engines) closeUnbound(by reach) (n int) {
	now := bound.tcp()
	var ids []relay.ID
	collect := func(i *relay.Info) bool {
		if by.has(i) && !now.has(i) {
			ids = append(ids, i.ID)
		}
		return true
	}
	e.TCP.Flows(collect)
	taken.flows(collect)
	for _, id := range ids {
		if e.CloseFlow(id, relay.Drain) {
			n++
		}
	}
	return n
}
