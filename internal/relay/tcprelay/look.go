package tcprelay

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// How the first bytes of a connection are looked at. Its socket is watched as it
// will be later on, for edges: so what was seen and left in it is not an event
// again, and more is. The bytes are in the worker's buffer only while the looker
// is being asked; what a connection costs meanwhile is its place and a pending.
//
//	Accept → looking → Look, as bytes come or time runs out → connecting
//	                                                        → taken or closed

// openLooking starts a connection whose first bytes are waited for.
func (w *worker) openLooking(o *Opening) {
	slot, c, p := w.begin(int32(o.FD), o.Client, o.Local)
	c.state = looking
	c.flags = noDelay
	c.path = w.paths.take(o.Path)
	p.looker = o.Looker
	w.waitOn(slot, c, p, o)
	if w.watch(c.fd[client], slot, c, client) != 0 {
		w.finish(slot, c, relay.Error)
	}
}

// waitOn takes over what the looker wants of the time and the bytes to come.
func (w *worker) waitOn(slot uint32, c *conn, p *pending, o *Opening) {
	p.limit = min(max(o.Limit, 1), len(w.buf))
	if due := c.start + int64(o.Wait); due != c.due {
		c.due = due
		w.schedule(slot, c)
	}
}

// look shows the looker what has come, if it has not seen all of that or
// nothing more will come, and does what it says. gone is a client that does not
// take bytes any more either.
func (w *worker) look(slot uint32, c *conn, gone bool) {
	p := w.pends.at(c.pend)
	ended, again := gone || c.has(on(ending, client)), false
	for {
		n, errno := peek(c.fd[client], w.buf[:p.limit])
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			n = 0
		case errno != 0:
			n, ended, gone = 0, true, true
		case n == 0:
			ended = true
		}
		final := ended || c.due <= w.now
		if n > p.seen {
			c.last = w.now
		} else if !final && !again {
			return
		}
		p.seen = n
		o := &w.opening
		w.asking = w.paths.at(c.path).Count(w.index)
		*o = Opening{
			Worker: w.index, FD: int(c.fd[client]), Client: p.client, Local: p.local,
			Looker: p.looker, Counters: w.asking, Path: w.paths.at(c.path), Limit: p.limit, Wait: time.Duration(c.due - c.start), Age: time.Duration(w.now - c.start),
		}
		d := p.looker.Look(o, w.buf[:n], final)
		if o.Discard > 0 {
			w.drop(c.fd[client], min(o.Discard, n))
		}
		if o.Client != p.client || o.Local != p.local {
			p.client, p.local = o.Client, o.Local
			c.setAddrs(p.client, p.local)
		}
		moved := o.Path != w.paths.at(c.path)
		if moved {
			was := c.path
			c.path = w.paths.take(o.Path)
			w.paths.give(was)
		}
		if d != Peek {
			w.looked(slot, c, d, gone)
			return
		}
		w.waitOn(slot, c, p, o)
		switch {
		case o.Discard > 0 || moved:
			p.seen, again = 0, true
		case ended || c.due <= w.now: // it had to decide
			w.finish(slot, c, relay.Error)
			return
		default:
			return
		}
	}
}

// drop takes n bytes that have been seen out of a socket.
func (w *worker) drop(fd int32, n int) {
	for n > 0 {
		m, errno := read(fd, w.buf[:n])
		if errno != unix.EINTR && m <= 0 {
			return
		}
		n -= max(m, 0)
	}
}

// looked does what the looker has decided. What it decided about is in
// w.opening.
func (w *worker) looked(slot uint32, c *conn, d Decision, gone bool) {
	o, p := &w.opening, w.pends.at(c.pend)
	switch {
	case d == Forward && o.Dialer != nil:
		w.unschedule(slot, c)
		c.due = never
		w.paths.give(c.path)
		c.path = 0
		c.state = connecting
		c.last = w.now
		p.dialer, p.looker, p.count = o.Dialer, nil, o.Counters
		if gone {
			w.abandon(slot, c, relay.ClientClose)
			return
		}
		w.dial(slot, c)
	case d == Take:
		looker := p.looker
		epollCtl(w.epfd, unix.EPOLL_CTL_DEL, c.fd[client], &unix.EpollEvent{})
		w.accepting = c.fd[client] // until it is theirs
		c.fd[client] = -1
		w.release(slot, c)
		looker.Taken(o)
		w.accepting = -1
	default:
		w.release(slot, c)
	}
}
