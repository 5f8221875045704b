package pool

import (
	"net/netip"
	"sync"
	"syscall"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// The way of a flow to the engines. Everything here runs on their workers:
// nothing blocks, and the only locks are taken when a backend is new.
//
//	UDP: ForwardUDP → Pick → socket → engine
//	TCP: dialer.Next → Pick → engine connects → ConnectFailed → Next …
//	both, later: owner.Answered, owner.Failed, owner.Closed

// ForwardUDP implements listener.Forwarder.
func (h *Handler) ForwardUDP(o *udprelay.Opening, at *listener.Place) udprelay.Decision {
	if !h.header.fits(true) {
		o.Reason = relay.ProxyHeader
		return udprelay.Refuse
	}
	w := &way{h.pool, h.ports, func(b *pool.Backend) *relay.Path { return h.path(at, b) }}
	if h.Follow != nil {
		if to, ok := h.Follow.target(o.Client.Addr()); ok {
			if b, result := h.pool.PickAddr(to); result == pool.OK {
				if ok, _ := w.dial(o, b); ok {
					return udprelay.Forward
				}
			}
		}
	}
	return w.open(o)
}

// open picks a backend for a session and connects a socket to it. A backend
// that cannot be connected to is passed over; a shortage of ours ends it.
func (w *way) open(o *udprelay.Opening) udprelay.Decision {
	f := balancer.Flow{Client: o.Client, Local: o.Local}
	var tried []netip.AddrPort
	o.Reason = relay.NoBackend
	for range w.pool.Settings().MaxTries {
		b, result := w.pool.Pick(f, tried)
		if result != pool.OK {
			break
		}
		ok, another := w.dial(o, b)
		if ok {
			return udprelay.Forward
		}
		if !another {
			break
		}
		tried = append(tried, b.Addr())
	}
	return udprelay.Refuse
}

// dial connects a socket to a backend at which a place was taken, and gives that
// back when it cannot. It sets the reason then; another says that it is the
// backend's, so that another one may do.
func (w *way) dial(o *udprelay.Opening, b *pool.Backend) (ok, another bool) {
	path := w.path(b)
	to, mapped := w.ports.target(b.Addr(), o.Local)
	switch {
	case !mapped:
		b.Release()
		o.Reason = relay.NoRoute
		return false, false
	case path.Transparent && listener.Loops(o.Client, to):
		b.Release()
		o.Reason = relay.Loop
		return false, false
	}
	fd, errno := dialUDP(path, o.Client, to, w.pool.Source(to.Addr()))
	if errno == 0 {
		o.Path, o.FD = path, fd
		headerOf(w.pool).sent()
		return true, false
	}
	failure := relay.ConnectFailure(errno)
	b.Release()
	b.Passive(failure)
	if failure == relay.Shortage {
		o.Reason = relay.UpstreamBind
		return false, false
	}
	return false, true
}

// TCPDialer implements listener.Forwarder.
func (h *Handler) TCPDialer(at *listener.Place) tcprelay.Dialer {
	none := &relay.Path{Listener: at.Listener, Route: at.Route, Resolver: h.resolver, Pool: h.pool.Name(), Proxy: h.header.form}
	return &dialer{h, at, h.header, none}
}

// dialer names backends for the connections of one place.
type dialer struct {
	h      *Handler
	at     *listener.Place
	header *header
	none   *relay.Path // of those for whom there is no backend
}

// WithHost implements listener.HostDialer.
func (d *dialer) WithHost(host []byte) tcprelay.Dialer {
	if own, ok := d.header.with(host); ok {
		return &dialer{d.h, d.at, own, d.none}
	}
	return d
}

// InTrace implements listener.TraceDialer.
func (d *dialer) InTrace(trace []byte) tcprelay.Dialer {
	if own, ok := d.header.in(trace); ok {
		return &dialer{d.h, d.at, own, d.none}
	}
	return d
}

// Next implements tcprelay.Dialer.
func (d *dialer) Next(client, local netip.AddrPort, attempt int, tried []*relay.Path) (tcprelay.Target, bool) {
	s := d.h.pool.Settings()
	if attempt >= s.MaxTries || attempt == 0 && !d.header.fits(false) {
		return tcprelay.Target{}, false
	}
	var failed []netip.AddrPort
	for _, p := range tried {
		failed = append(failed, p.Backend)
	}
	b, result := d.h.pool.Pick(balancer.Flow{Client: client, Local: local}, failed)
	if result != pool.OK {
		return tcprelay.Target{}, false
	}
	path := d.h.path(d.at, b)
	to, mapped := d.h.ports.target(b.Addr(), local)
	switch {
	case !mapped:
		b.Release()
		d.at.Stats.NoRoute.Inc()
		return tcprelay.Target{}, false
	case path.Transparent && listener.Loops(client, to):
		b.Release()
		d.at.Stats.Loops.Inc()
		return tcprelay.Target{}, false
	}
	asClient(path, client, to) // tells when it cannot be
	return tcprelay.Target{
		Path: path, To: to, Source: d.h.pool.Source(to.Addr()),
		ConnectTimeout: s.ConnectTimeout, KeepAlive: s.Keepalive, NoDelay: s.NoDelay,
		Header: d.header.of(),
	}, true
}

// GaveUp implements tcprelay.Dialer.
func (d *dialer) GaveUp(last *relay.Info, why relay.Reason) {
	if last.Path == nil {
		last.Path = d.none
	}
	d.at.Stats.GaveUp(last, why)
}

// owner hears of the flows of one path. It holds nothing of a config: flows
// outlive configs.
type owner struct {
	backend *pool.Backend
	pool    string
	ports   *portMap
	stats   *flow.Listener
	tracked bool     // the listener is followed: tell it who leaves
	moved   sync.Map // *pool.Backend → *relay.Path of the sessions that Rehome gave it
}

// ConnectFailed implements relay.Owner.
func (w *owner) ConnectFailed(_ *relay.Path, f relay.Failure, _ syscall.Errno) {
	w.backend.Passive(f)
	w.backend.Release()
}

// Answered implements relay.Owner.
func (w *owner) Answered(*relay.Path) { w.backend.PassiveOK() }

// Failed implements relay.Owner.
func (w *owner) Failed(_ *relay.Path, f relay.Failure, _ syscall.Errno) { w.backend.Passive(f) }

// Closed implements relay.Owner.
func (w *owner) Closed(_ *relay.Path, s *relay.Info, why relay.Reason) {
	w.backend.Release()
	w.stats.Closed(s, why)
	if w.tracked && !s.ID.UDP() {
		w.stats.Left(s.Client.Addr(), w.backend.Addr())
	}
}

// Rehome implements listener.Rehomer: it opens the session of a backend that
// is down anew, at another backend of the pool as the running config has it.
func (w *owner) Rehome(o *udprelay.Opening) udprelay.Decision {
	from := o.From
	p := pool.Running(w.pool)
	if p == nil {
		o.Reason = relay.NoBackend
		return udprelay.Refuse
	}
	to := &way{p, w.ports, func(b *pool.Backend) *relay.Path {
		if path, ok := w.moved.Load(b); ok {
			return path.(*relay.Path)
		}
		at := &listener.Place{Listener: from.Listener, Route: from.Route, Stats: w.stats, Counters: from.Counters, Transparent: from.Transparent}
		path, _ := w.moved.LoadOrStore(b, newPath(p, b, at, w.ports, from.Resolver))
		return path.(*relay.Path)
	}}
	d := to.open(o)
	if d == udprelay.Forward {
		w.stats.Open(true, o.Client.Addr(), flow.Bounds{}) // of the listener that counts it out, which may be gone by now
	}
	return d
}
