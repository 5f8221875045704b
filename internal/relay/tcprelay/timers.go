package tcprelay

import (
	"syscall"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// schedule puts the connection in the wheel for the first of its deadlines.
func (w *worker) schedule(slot uint32, c *conn) {
	w.unschedule(slot, c)
	deadline := w.deadline(c)
	switch {
	case deadline == never:
	case deadline-w.now < int64(4*time.Second):
		w.fine.add(&w.slab, slot, deadline)
	default:
		w.coarse.add(&w.slab, slot, deadline)
	}
}

func (w *worker) unschedule(slot uint32, c *conn) {
	switch {
	case c.bucket == 0:
	case c.bucket > w.coarse.id:
		w.coarse.remove(&w.slab, slot)
	default:
		w.fine.remove(&w.slab, slot)
	}
}

func (w *worker) deadline(c *conn) int64 {
	if c.state != established {
		return c.due
	}
	p := w.paths.at(c.path)
	deadline := never
	if p.Idle > 0 {
		deadline = c.last + int64(p.Idle)
	}
	if p.Lifetime > 0 {
		deadline = min(deadline, c.start+int64(p.Lifetime))
	}
	if c.has(stalled) {
		deadline = min(deadline, c.due)
	}
	if c.keepAlive > 0 {
		deadline = min(deadline, c.start+keepAliveAfter)
	}
	return deadline
}

// expire handles a connection that a wheel has let go, which may be early.
func (w *worker) expire(slot uint32, c *conn) {
	w.current = handle{slot, c.gen}
	if w.deadline(c) > w.now {
		w.schedule(slot, c)
		return
	}
	switch c.state {
	case looking:
		w.look(slot, c, false)
	case connecting:
		w.connectFailed(slot, c, relay.Timeout, syscall.ETIMEDOUT)
		w.dial(slot, c)
	case lingering:
		w.linger(slot, c)
	case established:
		p := w.paths.at(c.path)
		switch {
		case p.Lifetime > 0 && c.start+int64(p.Lifetime) <= w.now:
			w.finish(slot, c, relay.Limit)
		case p.Idle > 0 && c.last+int64(p.Idle) <= w.now:
			w.finish(slot, c, relay.IdleTimeout)
		case c.keepAlive > 0 && c.start+keepAliveAfter <= w.now:
			c.probed()
			w.schedule(slot, c)
		default:
			w.unstall(slot, c)
		}
	}
}
