package tcprelay

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// How bytes move. An event says that a socket may be read or written; the pump
// then moves, one direction after the other, as much as both sockets and the
// turn's budget allow:
//
//	socket → the worker's buffer → socket      small amounts
//	socket → pipe → socket                     bulk
//
// What was taken and not delivered is held, in the pipe or in a spill buffer,
// and nothing more is read in that direction before it has gone: the sender is
// slowed down by TCP. So a direction holds at most one pipe or buffer.

const (
	turnBudget = 1 << 20 // a direction, so that bulk delays no other connection by more

	// A direction whose turns move at least fullTurn is bulk after bulkAfter of
	// them, and stops being so after as many of less than smallTurn.
	fullTurn  = 32 << 10
	smallTurn = 8 << 10
	bulkAfter = 2

	stallCheck  = int64(250 * time.Millisecond)
	lingerTick  = int64(20 * time.Millisecond)
	lingerStall = int64(2 * time.Second)
)

// outcome is why carry stopped.
type outcome uint8

const (
	waiting outcome = iota // for an event
	again                  // the budget is spent
	over                   // everything has been delivered, the FIN is next
	starved                // the kernel has no memory for it just now
	broken                 // the side the bytes come from has been reset
)

// socketEvent handles an event of a connection's socket.
func (w *worker) socketEvent(slot uint32, c *conn, side int, ev uint32) {
	if c.fd[side] < 0 {
		return
	}
	if ev&(unix.EPOLLIN|unix.EPOLLRDHUP) != 0 {
		c.flags |= on(readable, side)
	}
	if ev&unix.EPOLLRDHUP != 0 {
		c.flags |= on(ending, side)
	}
	if ev&unix.EPOLLOUT != 0 {
		c.flags |= on(writable, side)
	}
	gone := ev&(unix.EPOLLERR|unix.EPOLLHUP) != 0
	switch c.state {
	case looking:
		if gone || ev&(unix.EPOLLIN|unix.EPOLLRDHUP) != 0 {
			w.look(slot, c, gone)
		}
	case connecting:
		switch {
		case side == client && gone:
			w.abandon(slot, c, relay.ClientClose)
		case side == backend && gone:
			switch errno := pendingError(c.fd[backend]); errno {
			case unix.ECONNRESET, unix.EPIPE: // a refusal is ECONNREFUSED: it had accepted
				w.connected(slot, c)
				w.died(c, backend, errno)
			default:
				w.connectFailed(slot, c, relay.ConnectFailure(errno), errno)
				w.dial(slot, c)
			}
		case side == backend && ev&unix.EPOLLOUT != 0:
			w.connected(slot, c)
		}
	case established:
		if gone {
			w.hangup(c, side, ev&unix.EPOLLERR != 0)
		}
		w.enqueue(slot, c)
	case lingering:
		if gone {
			w.finish(slot, c, c.why)
			return
		}
		w.linger(slot, c)
	}
}

// hangup notes what the kernel knows of a side that is gone. The kernel says
// EPIPE where the peer's FIN had come before its reset: then what it sent is
// complete and is still delivered, and only what is meant for it is dropped.
// After any other error what we have not read yet is delivered as far as that
// needs no waiting.
func (w *worker) hangup(c *conn, side int, failed bool) {
	c.flags |= on(readable, side) | on(writable, side) | on(ending, side)
	if failed {
		if errno := pendingError(c.fd[side]); errno != 0 {
			w.died(c, side, errno)
		}
	}
}

// pump moves what can be moved, both ways, and ends the connection when both
// directions have ended or a side has been reset.
func (w *worker) pump(slot uint32, c *conn) {
	if c.state != established {
		return
	}
	w.current = handle{slot, c.gen}
	more, later, still, before := false, false, [2]bool{}, c.flags
	for from := range 2 {
		if c.shut[from] {
			continue
		}
		out, errno := w.carry(c, from)
		switch out {
		case waiting:
			still[from] = true
		case again:
			more = true
		case starved:
			later = true
		case over:
			c.shut[from] = true
			if !c.shut[1-from] && !c.has(on(dead, 1-from)) {
				shutdownWrite(c.fd[1-from])
			}
		case broken:
			w.broke(slot, c, from, errno)
			return
		}
	}
	if c.shut[client] && c.shut[backend] {
		w.finish(slot, c, c.why)
		return
	}
	if c.flags&^before&(on(dead, client)|on(dead, backend)) != 0 {
		more = true // what it has left is to be read first
	} else {
		for side := range 2 {
			switch {
			case c.has(on(reset, side)) && (still[side] || c.shut[side]):
				w.broke(slot, c, side, c.errno())
				return
			case c.has(on(dead, side)) && c.shut[side]:
				w.part(slot, c, side)
				return
			}
		}
	}
	if more {
		w.requeue(slot, c)
	}
	if (later || c.held != [2]uint32{}) && !c.has(stalled) {
		c.flags |= stalled
		c.due = w.now + stallCheck
		w.schedule(slot, c)
	}
}

// unstall tries again after a while, event or not, where bytes are held or
// memory was short: a refusal for want of memory is followed by none.
func (w *worker) unstall(slot uint32, c *conn) {
	c.flags &^= stalled
	c.flags |= on(readable|writable, client) | on(readable|writable, backend)
	w.schedule(slot, c)
	w.pump(slot, c)
}

// carry moves one direction and accounts for it.
func (w *worker) carry(c *conn, from int) (out outcome, errno unix.Errno) {
	before := c.bytes[from]
	taken, out, errno := w.move(c, from)
	delivered := c.bytes[from] - before
	if taken > 0 || delivered > 0 {
		c.last = w.now
	}
	switch {
	case taken >= fullTurn:
		c.streak[from] = min(c.streak[from]+1, 2*bulkAfter)
	case taken > 0 && taken < smallTurn && c.streak[from] > 0:
		c.streak[from]--
	}
	p := w.paths.at(c.path)
	if delivered > 0 && w.index < len(p.Counters) {
		if n := &p.Counters[w.index]; from == client {
			n.BytesC2S.Add(delivered)
		} else {
			n.BytesS2C.Add(delivered)
		}
	}
	if from == backend && taken > 0 && !c.has(answered) {
		c.flags |= answered
		w.owner(p).Answered(p)
	}
	return out, errno
}

// move is the loop of carry: taken is what was read from the side from.
func (w *worker) move(c *conn, from int) (taken int, out outcome, errno unix.Errno) {
	to := 1 - from
	for {
		if c.held[from] > 0 {
			if c.has(on(dead, to)) {
				w.discard(c, from)
			} else if !c.has(on(writable, to)) {
				break
			} else {
				w.deliver(c, from)
			}
			continue
		}
		if c.eof[from] {
			return taken, over, 0
		}
		if !c.has(on(readable, from)) || !c.has(on(writable|dead, to)) {
			break
		}
		if taken >= turnBudget {
			return taken, again, 0
		}
		var n int
		if c.streak[from] >= bulkAfter && !w.noSplice && !c.has(on(dead, to)) {
			n, errno = w.fill(c, from)
		} else {
			n, errno = w.copy(c, from)
		}
		if n > 0 {
			taken += n
			if taken >= bufSize { // bulk from the first full buffer on
				c.streak[from] = max(c.streak[from], bulkAfter)
			}
			continue
		}
		switch errno {
		case 0:
			if c.has(on(reset, from)) { // the error has been taken, and this is no FIN
				return taken, broken, c.errno()
			}
			c.eof[from] = true
			if c.why == 0 {
				c.why = relay.ClientClose
				if from == backend {
					c.why = relay.BackendClose
				}
			}
		case unix.EAGAIN:
			c.flags &^= on(readable, from)
		case unix.EINTR:
		case unix.ENOMEM, unix.ENOBUFS:
			c.flags &^= on(readable, from)
			return taken, starved, 0
		default:
			return taken, broken, errno
		}
	}
	return taken, waiting, 0
}

// copy reads once into the worker's buffer and passes it on. The error is of
// the read.
func (w *worker) copy(c *conn, from int) (n int, errno unix.Errno) {
	to := 1 - from
	n, errno = read(c.fd[from], w.buf)
	if errno != 0 {
		return 0, errno
	}
	if n == 0 {
		return 0, 0
	}
	if n < len(w.buf) && !c.has(on(ending, from)) {
		// It was empty after that; whatever comes later is an event.
		c.flags &^= on(readable, from)
	}
	if c.has(on(dead, to)) {
		return n, 0
	}
	if c.has(on(nagle, to)) && c.bytes[from] > 0 {
		c.delayed(to)
	}
	m, errno := write(c.fd[to], w.buf[:n])
	if errno != 0 {
		if m = 0; !passing(errno) {
			w.died(c, to, errno)
			return n, 0
		}
	}
	c.bytes[from] += uint64(m)
	if m < n {
		if errno != unix.EINTR {
			c.flags &^= on(writable, to)
		}
		c.spill[from] = w.spills.put(w.buf[m:n])
		c.held[from] = uint32(n - m)
	}
	return n, 0
}

// fill splices once into a pipe, which is empty before: so EAGAIN means an
// empty socket.
func (w *worker) fill(c *conn, from int) (n int, errno unix.Errno) {
	r := w.pipes.take()
	if r == 0 {
		return w.copy(c, from)
	}
	n, errno = splice(c.fd[from], w.pipes.at(r).w, pipeSize)
	if errno != 0 || n == 0 {
		w.pipes.give(r, true)
		return 0, errno
	}
	c.pipe[from] = r
	c.held[from] = uint32(n)
	return n, 0
}

// deliver passes on what is held, once, and lets go of the pipe or the buffer
// when it is empty.
func (w *worker) deliver(c *conn, from int) {
	to := 1 - from
	if c.has(on(nagle, to)) && c.bytes[from] > 0 {
		c.delayed(to)
	}
	var n int
	var errno unix.Errno
	if c.pipe[from] != 0 {
		n, errno = splice(w.pipes.at(c.pipe[from]).r, c.fd[to], int(c.held[from]))
	} else {
		s := w.spills.at(c.spill[from])
		if n, errno = write(c.fd[to], s.data); errno == 0 {
			s.data = s.data[n:]
		}
	}
	switch {
	case errno == unix.EINTR:
		return
	case errno != 0 && !passing(errno):
		w.died(c, to, errno)
		return
	case errno != 0, n == 0: // none taken, which without an error cannot be: wait rather than spin
		c.flags &^= on(writable, to)
		return
	}
	if c.header > 0 && from == client {
		k := min(uint32(n), uint32(c.header))
		c.header -= uint16(k)
		c.bytes[from] -= uint64(k)
	}
	c.bytes[from] += uint64(n)
	if c.held[from] -= uint32(n); c.held[from] > 0 {
		if c.pipe[from] == 0 {
			c.flags &^= on(writable, to) // it took less than it was offered
		}
		return
	}
	w.discard(c, from)
}

// passing tells a refusal that says nothing about the connection.
func passing(errno unix.Errno) bool {
	return errno == unix.EAGAIN || errno == unix.EINTR || errno == unix.ENOBUFS || errno == unix.ENOMEM
}

// discard lets go of what a direction holds.
func (w *worker) discard(c *conn, from int) {
	if r := c.pipe[from]; r != 0 {
		w.pipes.give(r, c.held[from] == 0)
	}
	if r := c.spill[from]; r != 0 {
		w.spills.give(r)
	}
	c.pipe[from], c.spill[from], c.held[from] = 0, 0, 0
}

// died notes that a side takes no more bytes: after its FIN (EPIPE; see
// hangup) or a reset. What it has sent before is there to be read.
func (w *worker) died(c *conn, side int, errno unix.Errno) {
	c.flags |= on(dead, side) | on(readable, side) | on(ending, side)
	if errno != unix.EPIPE {
		c.flags |= on(reset, side)
		c.fault = uint16(errno)
	}
}

// broke handles the reset of a side.
func (w *worker) broke(slot uint32, c *conn, side int, errno unix.Errno) {
	if c.why == 0 {
		c.why = relay.ClientClose
		if side == backend {
			c.why = relay.BackendClose
		}
	}
	// That a client which came and went without a word is answered by a reset
	// says nothing about the backend.
	if side == backend && errno == unix.ECONNRESET && !c.has(answered) && (c.bytes[client] > 0 || !c.eof[client]) {
		p := w.paths.at(c.path)
		w.owner(p).Failed(p, relay.EarlyReset, errno)
	}
	w.part(slot, c, side)
}

// part closes a side that is gone and passes its reset on to the other, once
// that one has what was sent to it: a reset would overtake it.
func (w *worker) part(slot uint32, c *conn, gone int) {
	w.discard(c, client)
	w.discard(c, backend)
	closeFD(c.fd[gone])
	c.fd[gone] = -1
	c.state = lingering
	c.last = w.now
	c.held = [2]uint32{}
	w.linger(slot, c)
}

// linger looks after the side that is left: reset it if it has got everything
// or nothing moves any more.
func (w *worker) linger(slot uint32, c *conn) {
	side := client
	if c.fd[client] < 0 {
		side = backend
	}
	left := unacked(c.fd[side])
	if uint32(left) != c.held[0] { // held is not in use any more
		c.held[0] = uint32(left)
		c.last = w.now
	}
	if left == 0 || w.now-c.last > lingerStall {
		closeReset(c.fd[side])
		c.fd[side] = -1
		w.finish(slot, c, c.why)
		return
	}
	// Its own bytes are for nobody, but it may have to get rid of them before
	// it reads.
	for range turnBudget / bufSize {
		if n, errno := read(c.fd[side], w.buf); n <= 0 || errno != 0 {
			break
		}
	}
	c.due = w.now + lingerTick
	w.schedule(slot, c)
}

// cut ends a connection in any state.
func (w *worker) cut(slot uint32, c *conn, why relay.Reason) {
	switch c.state {
	case connecting:
		w.abandon(slot, c, why)
	case lingering:
		w.finish(slot, c, c.why)
	case looking, established:
		w.finish(slot, c, why)
	}
}

// finish ends a connection that was established, or looked at, and tells the
// owner.
func (w *worker) finish(slot uint32, c *conn, why relay.Reason) {
	w.describe(slot, c, &w.info)
	w.release(slot, c)
	w.owner(w.info.Path).Closed(w.info.Path, &w.info, why)
}

// release closes and frees what a connection has. Its slot is vacant after.
func (w *worker) release(slot uint32, c *conn) {
	w.unschedule(slot, c)
	w.discard(c, client)
	w.discard(c, backend)
	for _, fd := range c.fd {
		if fd >= 0 {
			closeFD(fd)
		}
	}
	if c.pend != 0 {
		w.pends.give(c.pend)
	}
	w.paths.give(c.path)
	w.conns.Add(-1)
	var done func()
	if c.has(finished) {
		done = w.done[slot]
		delete(w.done, slot)
	}
	w.slab.give(slot)
	if done != nil {
		done()
	}
}
