package udprelay

import (
	"net"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// What becomes of a session that a goroutine holds, and who is told.

// Attach turns the pending session into one that a handler serves for long:
// it no longer counts among the pending ones, more of its datagrams are
// queued, and the path's limits apply. When one of them ends it, Read returns
// io.EOF. It reports whether the session is attached: one that has ended before
// is not, and no owner hears of its end.
func (c *Conn) Attach() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != open || c.attached {
		return c.attached
	}
	c.settleLocked()
	c.attached = true
	c.lastWrite.Store(c.w.clock())
	c.ask(func(w *worker) { w.start(c.slot) })
	return true
}

// SetPath gives an attached session another path, whose limits and owner are the
// session's from now on.
func (c *Conn) SetPath(path *relay.Path) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != open || !c.attached {
		return
	}
	c.path = path
	c.ask(func(w *worker) {
		s := w.slab.at(c.slot)
		old := s.path
		s.path = w.holdPath(path)
		w.releasePath(old)
		w.disarm(c.slot)
		w.start(c.slot)
		if s.setup == 0 { // else it has had one
			s.setup = c.setup()
			w.tellOpened(c.slot, c)
		}
	})
}

// Forward hands the session to its worker, which owns fd, a connected and
// non-blocking socket, from here on. The datagrams nobody has taken are sent to
// it before later ones. With an error, which says that the session has ended,
// fd stays with the caller.
func (c *Conn) Forward(path *relay.Path, fd int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != open {
		return net.ErrClosed
	}
	c.state, c.path, c.fd, c.rest = handing, path, fd, nil
	c.poke()
	c.ask(func(w *worker) { w.adopt(c) })
	return nil
}

// Divert takes the pending session out of the engine: take is called on the
// worker, with an opening that knows who the client is, and with the datagrams
// nobody has taken. When it reports true the session is over and its owner hears
// nothing; the client's next datagram is a new one's. It reports whether that has
// happened.
func (c *Conn) Divert(take func(o *Opening, datagrams [][]byte) bool) (ok bool) {
	ran := c.w.call(func(w *worker) {
		if w.conns[c.slot] != c {
			return
		}
		c.mu.Lock()
		queue, pending := c.queue, c.state == open && !c.attached
		c.mu.Unlock()
		if !pending {
			return
		}
		s := w.slab.at(c.slot)
		wire := w.wire(&s.key)
		o := Opening{
			Worker: w.id, Client: c.client, Local: c.local, Peer: addrPort(wire.client, wire.port), Hit: c.so.hit(wire),
			FD: -1, w: w, sock: c.so, key: s.key,
		}
		if ok = take(&o, queue); !ok {
			return
		}
		if v := s.key.via(); v != 0 && w.vias[v].kind == proxyproto.V2UDP {
			w.keep(v)
		}
		c.mu.Lock()
		c.endLocked(net.ErrClosed)
		c.mu.Unlock()
		w.end(c.slot, relay.Error) // not established, so no owner is told
	})
	return ran && ok
}

// SetHost tells Forward the host that the client has named; see Opening.Host.
// It must not change any more.
func (c *Conn) SetHost(host []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.host = host
}

// Ender returns a function that ends the session which the client has by then, if
// it has one. Any goroutine may call it.
func (o *Opening) Ender() func(relay.Reason) {
	w, k, hash := o.w, o.key, o.hash
	return func(why relay.Reason) {
		w.post(func(w *worker) {
			if slot := w.table.find(&w.slab, &k, hash); slot != 0 {
				w.end(slot, why)
			}
		})
	}
}

// Acceptor is who was asked about the session.
func (c *Conn) Acceptor() Acceptor { return c.so.ep.acceptor }

// SetTrace is SetHost for the trace of the session's set-up.
func (c *Conn) SetTrace(trace []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.trace = trace
}

// ID is what operators know the session by.
func (c *Conn) ID() relay.ID { return relay.MakeID(true, c.w.id, c.slot, c.gen) }

// setup is how long it has taken by now to set the session up, in microseconds.
func (c *Conn) setup() uint32 {
	return uint32(min(max(time.Since(c.born)/time.Microsecond, 1), 1<<32-1))
}

// adopt makes a held session one that the worker forwards.
func (w *worker) adopt(c *Conn) {
	c.mu.Lock()
	path, fd, queue, host, trace := c.path, c.fd, c.queue, c.host, c.trace
	c.fd = -1
	c.endLocked(net.ErrClosed)
	c.mu.Unlock()

	slot := c.slot
	delete(w.conns, slot)
	s := w.slab.at(slot)
	s.flags &^= held
	w.disarm(slot)
	old := s.path
	s.path = w.holdPath(path)
	w.releasePath(old)
	w.startHeading(s)
	w.noteFor(slot, s, host, trace)
	s.setup = c.setup()
	s.bytesC2S += c.bytesC2S.Load()
	s.bytesS2C += c.bytesS2C.Load()
	s.packetsC2S += c.packetsC2S.Load()
	s.packetsS2C += c.packetsS2C.Load()
	if !w.connect(slot, fd) {
		return
	}
	for _, p := range queue {
		w.toBackend(slot, s, p, 0)
	}
	w.flushUp()
}

// Reject ends the pending session, its datagrams counted as dropped under why.
// An attached one it closes.
func (c *Conn) Reject(why relay.Drop) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state != open {
		return
	}
	c.why = why
	if !c.attached {
		c.path.Counters[c.w.id].Dropped[why].Add(uint64(len(c.queue)))
	}
	c.closeLocked(relay.Error)
}

// Close ends the session. Datagrams nobody has read are gone, as from any
// socket.
func (c *Conn) Close() error {
	c.End(relay.BackendClose)
	return nil
}

// End is Close for a reason of the caller's.
func (c *Conn) End(why relay.Reason) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.state == open {
		c.closeLocked(why)
	}
}

func (c *Conn) closeLocked(why relay.Reason) {
	c.endLocked(net.ErrClosed)
	c.ask(func(w *worker) { w.end(c.slot, why) })
}
