package udprelay

import (
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The way from clients to backends. A batch of datagrams comes in; those of
// one session that follow each other go out together. The buffers of the
// batch are in use until it is through.

// inbox is the batch in hand.
type inbox struct {
	so   *socket
	i, n int // buffers from i on are still to be delivered
	off  int // bytes of buffer i that have been

	slot, gen uint32 // session of the datagram before
}

// receive takes one batch from an endpoint's socket. What is left waits until
// the others have had a turn.
func (w *worker) receive(so *socket, ev unix.EpollEvent) {
	n, errno := w.rx.recv(so.fd, 0, batch)
	if errno == unix.EAGAIN {
		return
	}
	for errno == 0 && n < batch && w.rx.burst(n) {
		var more int
		if more, errno = w.rx.recv(so.fd, n, batch-n); more > 0 {
			n += more
		}
	}
	if errno != 0 && errno != unix.EAGAIN || n == batch {
		so.queued = true
		w.again = append(w.again, ev)
	}
	if n > 0 {
		w.in = inbox{so: so, n: n}
		w.deliver()
	}
}

// deliver passes the rest of the batch on. A panic in an Acceptor loses the
// datagram it was asked about; the next turn goes on behind it.
func (w *worker) deliver() {
	in := &w.in
	if in.n == 0 {
		return
	}
	k := key{ep: in.so.ep.index, local: in.so.local}
	headers := in.so.ep.headers.Load()
	for in.i < in.n {
		i := in.i
		p, seg, cut := w.rx.data(i)
		k.client, k.port, k.scope = fromName(&w.rx.names[i])
		switch ctl := int(w.rx.hdrs[i].hdr.Controllen); {
		case in.so.transparent:
			var known bool
			k.local, k.at, known = origdst(&w.rx.ctls[i], ctl)
			cut = cut || !known
		case in.so.wildcard:
			k.local, _ = pktinfo(&w.rx.ctls[i], ctl)
		}
		if (headers != nil || in.so.vias > 0) && !cut {
			if via, may := w.tells(headers, in.so, &k); may {
				w.told(headers, in.so, via, &k, in.next(p, seg))
				continue
			}
		}
		var hash uint64
		slot := in.slot
		s := w.slab.get(slot, in.gen)
		if s == nil || s.key != k {
			hash = w.table.hash(&k)
			if slot = w.table.find(&w.slab, &k, hash); slot != 0 {
				s = w.slab.at(slot)
				in.slot, in.gen = slot, s.gen
			}
		}
		if slot != 0 && s.flags&rehome == 0 {
			in.i, in.off, p = in.i+1, 0, p[in.off:]
			if cut {
				w.drop(s.path, relay.UpstreamSend, 1)
				continue
			}
			w.toBackend(slot, s, p, seg)
			continue
		}
		first := in.next(p, seg)
		if cut {
			continue // a first datagram that nobody can answer for
		}
		mark := uint16(0)
		switch {
		case slot != 0:
			hash, mark = w.table.hash(&k), s.flags&looked
		case headers != nil && headers.Require:
			w.misled(headers, in.so, &k)
			continue
		}
		w.flushUp()
		w.open(in.so, &k, hash, slot, first, mark)
	}
	w.flushUp()
	w.rx.reset(0, in.n)
	in.n = 0
}

// next takes one datagram out of the buffer in hand, which holds p in datagrams of
// seg bytes.
func (in *inbox) next(p []byte, seg int) []byte {
	p = p[in.off:]
	if seg > 0 && len(p) > seg {
		in.off += seg
		return p[:seg]
	}
	in.i, in.off = in.i+1, 0
	return p
}

// open asks the acceptor about a client without a session, or with one, old,
// that has lost its backend. mark are flags that the session gets.
func (w *worker) open(so *socket, k *key, hash uint64, old uint32, data []byte, mark uint16) {
	wire := w.wire(k)
	w.opening = Opening{
		Worker: w.id,
		Client: addrPort(k.client, k.port),
		Local:  so.hit(k),
		Peer:   addrPort(wire.client, wire.port),
		Hit:    so.hit(wire),
		Data:   data,
		FD:     -1,
		w:      w, sock: so, key: *k, hash: hash, old: old, via: k.via(), mark: mark,
	}
	w.holdVia(w.opening.via)
	w.ask(data)
	w.opened()
}

// opened lets go of what the opening has kept.
func (w *worker) opened() {
	via := w.opening.via
	w.opening.via = 0
	w.releaseVia(via)
}

// ask has the acceptor decide about the opening, and does what it says.
func (w *worker) ask(data []byte) {
	o := &w.opening
	if old := o.old; old != 0 {
		o.From = w.paths[w.slab.at(old).path].path
	}
	w.asking = nil
	decision := o.sock.ep.acceptor.Open(o)
	conn := o.conn
	o.conn, o.Data, o.From = nil, nil, nil
	fd := o.FD
	if decision != Forward {
		o.FD = -1 // not ours; see contain
	}
	if conn != nil && decision != Hold {
		w.end(conn.slot, relay.Error) // not established, so no owner is told
	}
	switch decision {
	case Forward:
		if o.Path == nil || o.FD < 0 {
			panic("udprelay: Forward without a path or a socket")
		}
		if o.old != 0 {
			w.end(o.old, relay.BackendDown)
		}
		slot := w.create(&o.key, o.hash, o.Path, o.mark)
		w.noteFor(slot, w.slab.at(slot), o.Host, o.Trace)
		o.FD, o.Host, o.Trace = -1, nil, nil // the descriptor is the session's now
		if !w.connect(slot, fd) {
			return // counted there
		}
		w.in.slot, w.in.gen = slot, w.slab.at(slot).gen
		w.toBackend(slot, w.slab.at(slot), data, 0)
	case Refuse:
		if o.Counters != nil {
			o.Counters.Dropped[o.Reason].Add(1)
		}
	case Divert:
		if v := o.via; v != 0 && w.vias[v].kind == proxyproto.V2UDP {
			w.keep(v)
		}
	}
}

// toBackend adds datagrams to what goes to the session's backend. seg is
// their size, or 0 for a single one.
func (w *worker) toBackend(slot uint32, s *session, p []byte, seg int) {
	s.last = w.now
	if s.flags&held != 0 {
		w.enqueue(slot, s, p, seg)
		return
	}
	if w.up.n > 0 && w.up.meta[0].slot != slot {
		w.flushUp()
	}
	if seg == 0 {
		seg = len(p)
	}
	if s.flags&heading != 0 {
		var done bool
		if p, done = w.headed(slot, s, p, seg); done {
			return
		}
	}
	limit := w.paths[s.path].gso
	gso := w.offload.gso && (limit == 0 || seg < int(limit))
	if gso && w.up.join(slot, nil, p, seg, limit) {
		return
	}
	for len(p) > seg && !gso {
		w.addUp(slot, nil, p[:seg], seg, false)
		p = p[seg:]
	}
	w.addUp(slot, nil, p, seg, gso)
}

func (w *worker) addUp(slot uint32, head, p []byte, seg int, gso bool) {
	if !w.up.add(slot, head, p, seg, gso) {
		w.flushUp()
		w.up.add(slot, head, p, seg, gso)
	}
}

// flushUp sends what has been collected, all of one session. What the kernel
// refuses is dropped and counted.
func (w *worker) flushUp() {
	u := w.up
	if u.n == 0 {
		return
	}
	u.seal()
	slot := u.meta[0].slot
	s := w.slab.at(slot)
	fd := int(s.fd)
	var failed unix.Errno
	for i, refused := 0, false; i < u.n; i++ {
		sent, errno := u.send(fd, i)
		for ; sent > 0; sent-- {
			w.sentUp(s, u.meta[i].segs, u.meta[i].payload())
			i++
		}
		if i == u.n || errno == 0 {
			i--
			continue
		}
		m := &u.meta[i]
		switch {
		case errno == unix.ECONNREFUSED && !refused:
			// An ICMP message about an earlier datagram has taken the
			// place of this one, which the kernel has not looked at.
			failed, refused = errno, true
			i--
		case m.segs > 1 && unfit(errno):
			w.paths[s.path].gso = uint16(m.seg)
			segs, bytes, errno := u.singly(fd, i)
			w.sentUp(s, segs, bytes)
			if segs < m.segs {
				w.drop(s.path, relay.UpstreamSend, m.segs-segs)
				failed = errno
			}
		default:
			w.drop(s.path, relay.UpstreamSend, m.segs)
			failed = errno
		}
	}
	u.clear()
	if failed != 0 {
		w.fault(slot, s, failed)
	}
}

func (w *worker) sentUp(s *session, packets, bytes int) {
	s.packetsC2S += uint64(packets)
	s.bytesC2S += uint64(bytes)
	if w.upSum.path != s.path {
		w.settle()
		w.upSum.path = s.path
	}
	w.upSum.packets += uint64(packets)
	w.upSum.bytes += uint64(bytes)
}

func (w *worker) drop(path uint32, why relay.Drop, n int) {
	w.paths[path].path.Counters[w.id].Dropped[why].Add(uint64(n))
}

// fault tells the owner what a socket's error says about the backend, at most
// once a second for a session. The session lives on.
func (w *worker) fault(slot uint32, s *session, errno unix.Errno) {
	if shortage(errno) || (s.failed != 0 && w.now-s.failed < uint32(1e9/tick)) {
		return
	}
	s.failed = w.now
	path := w.paths[s.path].path
	owner := w.owner(path)
	if owner == nil {
		return
	}
	kind := relay.SendFailed
	if errno == unix.ECONNREFUSED {
		kind = relay.EarlyReset
		if s.flags&answered != 0 {
			kind = relay.PortClosed
		}
	}
	owner.Failed(path, kind, errno)
}

// enqueue gives datagrams to the goroutine that holds the session.
func (w *worker) enqueue(slot uint32, s *session, p []byte, seg int) {
	c := w.conns[slot]
	for {
		first := p
		if seg > 0 && len(p) > seg {
			first = p[:seg]
		}
		if why, ok := c.push(first); !ok {
			w.drop(s.path, why, 1)
		}
		if p = p[len(first):]; len(p) == 0 {
			return
		}
	}
}
