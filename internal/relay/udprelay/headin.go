package udprelay

import (
	"net/netip"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The headers by which proxies in front of us name their clients. What a proxy's
// socket has begun with holds for as long as it has sessions:
//
//	SPP      a header in front of each datagram, many clients by one socket;
//	         the header in front of answers too
//	version 2  one client, named in front of the first datagrams or of all
//	neither  the proxy is its own client, as it also says by LOCAL
//
// A datagram that goes against that is dropped. Sessions from before the endpoint took
// headers are let be, and those of a proxy that is no longer trusted go on.

// HeaderIn says of which peers an endpoint takes headers.
type HeaderIn struct {
	From     *cidr.Set        // the peers that are trusted with them
	Require  bool             // there are no sessions without one
	Counters []relay.Counters // by worker: who counts what is dropped outside a session, as relay.ProxyHeader

	// Refused, where it is set, hears of each of these. The workers call it; it must
	// not block.
	Refused func(peer, hit netip.AddrPort)
}

// SetHeaders makes the endpoint take headers, or with nil none, in datagrams that are
// looked at from now on. Any goroutine may call it.
func (ep *Endpoint) SetHeaders(h *HeaderIn) { ep.headers.Store(h) }

// trusts reports whether the peer of a key may name clients.
func (h *HeaderIn) trusts(k *key) bool {
	return h != nil && h.From.Contains(netip.AddrFrom16(k.client))
}

// tells reports whether the datagrams of a peer may have headers; via is what they go
// by already, or 0.
func (w *worker) tells(h *HeaderIn, so *socket, wire *key) (via uint32, may bool) {
	if so.vias > 0 {
		if i := w.viaIndex[*wire]; i != 0 {
			if v := &w.vias[i]; v.slot != 0 || !v.kept || !w.over(i) {
				return i, true
			}
			w.forget(i)
		}
	}
	return 0, h.trusts(wire)
}

// told passes on one datagram of a peer that tells of clients.
func (w *worker) told(h *HeaderIn, so *socket, i uint32, wire *key, p []byte) {
	if i != 0 {
		if w.vias[i].kind == proxyproto.SPP {
			w.toldSPP(h, so, i, wire, p)
		} else {
			w.toldAgain(h, so, i, p)
		}
		return
	}
	hash := w.table.hash(wire)
	if slot := w.table.find(&w.slab, wire, hash); slot != 0 {
		w.toldOwn(so, slot, p)
		return
	}
	hd, n, err := proxyproto.ReadDatagram(p)
	switch {
	case err == proxyproto.ErrNone && !h.Require, err == nil && !hd.SPP && !hd.Client.IsValid():
		w.flushUp()
		w.open(so, wire, hash, 0, p[n:], looked)
	case err != nil || !hd.Names():
		w.misled(h, so, wire)
	case hd.SPP:
		w.flushUp() // whose callbacks may panic, and nobody holds the via yet
		w.toldSPP(h, so, w.newVia(wire, proxyproto.SPP), wire, p)
	default:
		w.flushUp()
		i := w.newVia(wire, proxyproto.V2UDP)
		w.vias[i].id = identity(&hd, so, wire, i)
		w.openBy(so, i, p[n:])
	}
}

// identity is the key of the session that a header tells of.
func identity(h *proxyproto.Header, so *socket, wire *key, via uint32) key {
	dest := h.Dest
	if !h.SPP { // whose answers have to tell the same
		dest = so.hitBy(dest, wire)
	}
	return key{
		client: h.Client.Addr().As16(), port: swap(h.Client.Port()),
		local: dest.Addr().As16(), at: swap(dest.Port()),
		ep: wire.ep, scope: viaBit | via,
	}
}

// toldSPP is for a socket that has begun with SPP, or does now.
func (w *worker) toldSPP(h *HeaderIn, so *socket, i uint32, wire *key, p []byte) {
	hd, n, err := proxyproto.ReadDatagram(p)
	if err == nil && hd.SPP && hd.Names() {
		id := identity(&hd, so, wire, i)
		in := &w.in
		if s := w.slab.get(in.slot, in.gen); s != nil && s.key == id && s.flags&rehome == 0 {
			w.toBackend(in.slot, s, p[n:], 0)
			return
		}
		hash := w.table.hash(&id)
		if slot := w.table.find(&w.slab, &id, hash); slot != 0 {
			w.pass(so, slot, p[n:])
			return
		}
		if h.trusts(wire) {
			w.flushUp()
			w.open(so, &id, hash, 0, p[n:], 0)
			return
		}
	}
	if h.trusts(wire) {
		w.misled(h, so, wire)
		return
	}
	w.ordinary(h, so, wire, p)
}

// toldAgain is for a socket that has begun with version 2.
func (w *worker) toldAgain(h *HeaderIn, so *socket, i uint32, p []byte) {
	v := &w.vias[i]
	hd, n, err := proxyproto.ReadV2UDP(p)
	switch {
	case err == proxyproto.ErrNone:
	case err != nil || !hd.Names():
		w.misledBy(h, so, i)
		return
	default:
		switch id := identity(&hd, so, &v.wire, i); {
		case id == v.id:
		case v.slot == 0 && h.trusts(&v.wire): // nothing is in hand for the client before
			v.id = id
		default:
			w.misledBy(h, so, i)
			return
		}
	}
	if v.slot != 0 {
		w.pass(so, v.slot, p[n:])
		return
	}
	w.openBy(so, i, p[n:])
}

// toldOwn is for a socket with a session of its own address.
func (w *worker) toldOwn(so *socket, slot uint32, p []byte) {
	s := w.slab.at(slot)
	if s.flags&looked != 0 {
		hd, n, err := proxyproto.ReadV2UDP(p)
		if err != proxyproto.ErrNone && (err != nil || hd.Client.IsValid()) {
			w.drop(s.path, relay.ProxyHeader, 1)
			return
		}
		p = p[n:]
	}
	w.pass(so, slot, p)
}

// ordinary is for a datagram of a peer that is no longer trusted and not of a session
// from the time when it was.
func (w *worker) ordinary(h *HeaderIn, so *socket, wire *key, p []byte) {
	hash := w.table.hash(wire)
	switch slot := w.table.find(&w.slab, wire, hash); {
	case slot != 0:
		w.pass(so, slot, p)
	case h != nil && h.Require:
		w.misled(h, so, wire)
	default:
		w.flushUp()
		w.open(so, wire, hash, 0, p, 0)
	}
}

// openBy asks the acceptor about the client that a via of version 2 has.
func (w *worker) openBy(so *socket, i uint32, p []byte) {
	id := w.vias[i].id
	w.flushUp()
	w.open(so, &id, w.table.hash(&id), 0, p, 0)
}

// pass gives one datagram to a session, or asks where the session moves to.
func (w *worker) pass(so *socket, slot uint32, p []byte) {
	s := w.slab.at(slot)
	if s.flags&rehome == 0 {
		w.in.slot, w.in.gen = slot, s.gen
		w.toBackend(slot, s, p, 0)
		return
	}
	k := s.key
	w.flushUp()
	w.open(so, &k, w.table.hash(&k), slot, p, s.flags&looked)
}

// misled counts a datagram outside a session whose header is not what it must be.
func (w *worker) misled(h *HeaderIn, so *socket, wire *key) {
	count := &h.Counters[w.id]
	count.Dropped[relay.ProxyHeader].Add(1)
	if h.Refused != nil {
		w.asking = count
		h.Refused(addrPort(wire.client, wire.port), so.hit(wire))
	}
}

// misledBy counts one of a socket that has begun with version 2.
func (w *worker) misledBy(h *HeaderIn, so *socket, i uint32) {
	v := &w.vias[i]
	switch {
	case v.slot != 0:
		w.drop(w.slab.at(v.slot).path, relay.ProxyHeader, 1)
	case h != nil:
		w.misled(h, so, &v.wire)
	}
}
