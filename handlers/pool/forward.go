package pool

import (
	"net/netip"
	"sync"
	"syscall"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
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
	path := func(b *pool.Backend) *relay.Path { return h.path(at, b) }
	if h.Follow != nil {
		if to, ok := h.Follow.target(o.Client.Addr()); ok {
			if b, result := h.pool.PickAddr(to); result == pool.OK && dialUp(o, h.pool, b, path) == 0 {
				return udprelay.Forward
			}
		}
	}
	return open(o, h.pool, path)
}

// open picks a backend for a session and connects a socket to it. A backend
// that cannot be connected to is passed over; a shortage of ours ends it.
func open(o *udprelay.Opening, p *pool.Pool, path func(*pool.Backend) *relay.Path) udprelay.Decision {
	f := balancer.Flow{Client: o.Client, Local: o.Local}
	var tried []netip.AddrPort
	o.Reason = relay.NoBackend
	for range p.Settings().MaxTries {
		b, result := p.Pick(f, tried)
		if result != pool.OK {
			break
		}
		errno := dialUp(o, p, b, path)
		if errno == 0 {
			return udprelay.Forward
		}
		if relay.ConnectFailure(errno) == relay.Shortage {
			o.Reason = relay.UpstreamBind
			break
		}
		tried = append(tried, b.Addr())
	}
	return udprelay.Refuse
}

// dialUp connects a socket to a backend at which a place was taken, and gives
// that back when it cannot.
func dialUp(o *udprelay.Opening, p *pool.Pool, b *pool.Backend, path func(*pool.Backend) *relay.Path) syscall.Errno {
	fd, errno := sock.DialUDP(b.Addr(), p.Source(b.Addr().Addr()))
	if errno == 0 {
		o.Path, o.FD = path(b), fd
		return 0
	}
	b.Release()
	b.Passive(relay.ConnectFailure(errno))
	return errno
}

// TCPDialer implements listener.Forwarder.
func (h *Handler) TCPDialer(at *listener.Place) tcprelay.Dialer { return &dialer{h, at} }

// dialer names backends for the connections of one place.
type dialer struct {
	h  *Handler
	at *listener.Place
}

// Next implements tcprelay.Dialer.
func (d *dialer) Next(client, local netip.AddrPort, attempt int, tried []*relay.Path) (tcprelay.Target, bool) {
	s := d.h.pool.Settings()
	if attempt >= s.MaxTries {
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
	return tcprelay.Target{
		Path: d.h.path(d.at, b), Source: d.h.pool.Source(b.Addr().Addr()),
		ConnectTimeout: s.ConnectTimeout, KeepAlive: s.Keepalive, NoDelay: s.NoDelay,
	}, true
}

// GaveUp implements tcprelay.Dialer.
func (d *dialer) GaveUp(client netip.AddrPort, _ relay.Reason) {
	d.at.Stats.Abandoned(false, client.Addr())
}

// owner hears of the flows of one path. It holds nothing of a config: flows
// outlive configs.
type owner struct {
	backend *pool.Backend
	pool    string
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
	d := open(o, p, func(b *pool.Backend) *relay.Path {
		if path, ok := w.moved.Load(b); ok {
			return path.(*relay.Path)
		}
		path, _ := w.moved.LoadOrStore(b, newPath(p, b, from.Listener, from.Route, from.Counters, w.stats))
		return path.(*relay.Path)
	})
	if d == udprelay.Forward {
		w.stats.Open(true, o.Client.Addr(), flow.Bounds{}) // of the listener that counts it out, which may be gone by now
	}
	return d
}
