package udprelay

import (
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The limits of held sessions.
const (
	pendingDatagrams = 4       // queued for one that awaits a decision
	pendingSessions  = 1024    // of a worker
	pendingMemory    = 1 << 20 // bytes queued for all of them

	attachedDatagrams = 64
	attachedMemory    = 256 << 10 // bytes queued for one that a handler serves
)

// Conn is a session whose datagrams go to a goroutine: for a moment, until the
// goroutine has decided about it (Forward, Reject), or for as long as a
// handler serves it (Attach). Reads are for that one goroutine; everything else
// may be called from any. After Forward, Reject or Close all methods fail or do
// nothing.
//
// The owner of the session's path hears Closed when it was forwarded or
// attached, with the path it had then, and nothing when it was not.
type Conn struct {
	w             *worker
	so            *socket
	way           Way // to the client
	slot, gen     uint32
	client, local netip.AddrPort

	lastWrite                                  atomic.Uint32 // tick
	bytesC2S, bytesS2C, packetsC2S, packetsS2C atomic.Uint64
	born                                       time.Time
	wake                                       chan struct{} // something has changed for the reader; holds one

	mu       sync.Mutex
	state    connState
	attached bool
	path     *relay.Path
	fd       int        // Forward's, until the worker takes it
	host     []byte     // SetHost's
	trace    []byte     // SetTrace's
	why      relay.Drop // Reject's
	err      error      // what Read answers in the end
	queue    [][]byte
	size     int    // bytes in queue
	rest     []byte // of a datagram that was larger than Read's buffer
	deadline time.Time
}

type connState uint8

const (
	open    connState = iota
	handing           // forwarded, and the worker does not know yet
	ended
)

// Hold makes the session pending and gives its datagrams, the first one
// included, to the Conn. Open then answers Hold. path says where the datagrams
// and what is dropped are counted; unless it is forwarded, its limits apply
// from Attach on. With ErrPendingFull Open answers Refuse; Reason and
// Counters are set for that.
func (o *Opening) Hold(path *relay.Path) (*Conn, error) {
	w := o.w
	o.Counters, o.Reason = &path.Counters[w.id], relay.PendingFull
	if o.conn != nil || w.pending.Load() >= pendingSessions || w.pendingBytes.Load()+int64(len(o.Data)) > pendingMemory {
		return nil, ErrPendingFull
	}
	if o.old != 0 {
		w.end(o.old, relay.BackendDown)
		o.old = 0
	}
	slot := w.create(&o.key, o.hash, path, held|o.mark)
	c := &Conn{
		w: w, so: o.sock, way: o.Way(), slot: slot, gen: w.slab.at(slot).gen, client: o.Client, local: o.Local,
		path: path, fd: -1, born: time.Now(), wake: make(chan struct{}, 1),
	}
	w.conns[slot] = c
	o.conn = c
	w.pending.Add(1)
	c.push(o.Data)
	return c, nil
}

// push queues a copy of a datagram. The worker calls it; why is what it counts
// when there is no room.
func (c *Conn) push(p []byte) (why relay.Drop, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.state == ended:
		return c.why, false // Reject's reason
	case c.attached:
		if len(c.queue) >= attachedDatagrams || c.size+len(p) > attachedMemory {
			return relay.PendingFull, false
		}
	default:
		if len(c.queue) >= pendingDatagrams {
			return relay.PendingFull, false
		}
		if c.w.pendingBytes.Add(int64(len(p))) > pendingMemory {
			c.w.pendingBytes.Add(-int64(len(p)))
			return relay.PendingFull, false
		}
	}
	c.queue = append(c.queue, append(make([]byte, 0, len(p)), p...))
	c.size += len(p)
	c.poke()
	return 0, true
}

// poke makes the reader look again.
func (c *Conn) poke() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// settleLocked takes the session out of the pending ones, if it is one.
func (c *Conn) settleLocked() {
	if !c.attached {
		c.w.pending.Add(-1)
		c.w.pendingBytes.Add(-int64(c.size))
	}
}

// endLocked lets go of the queue and wakes the reader.
func (c *Conn) endLocked(err error) {
	c.settleLocked()
	c.state, c.err = ended, err
	c.queue, c.size, c.rest = nil, 0, nil
	c.poke()
}

// finish is the worker's part of the end: it says whether an owner must be
// told, by which path, and what descriptor goes with the session.
func (c *Conn) finish() (path *relay.Path, fd int, established bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.state {
	case open:
		if !c.attached {
			c.path.Counters[c.w.id].Dropped[relay.Draining].Add(uint64(len(c.queue)))
		}
		c.endLocked(io.EOF)
	case handing:
		fd := c.fd
		c.path.Counters[c.w.id].Dropped[relay.Draining].Add(uint64(len(c.queue)))
		c.endLocked(net.ErrClosed)
		return c.path, fd, true
	}
	return c.path, -1, c.attached
}

// pending reports whether it is still to be decided about.
func (c *Conn) pending() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.attached
}

func (c *Conn) currentPath() *relay.Path {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.path
}

// ask has the worker do something to the session if it is still this one's.
func (c *Conn) ask(f func(w *worker)) {
	c.w.post(func(w *worker) {
		if w.conns[c.slot] == c {
			f(w)
		}
	})
}

// Wait blocks until more than have datagrams are queued and returns how many
// there are; at the deadline (zero: none) with os.ErrDeadlineExceeded, and when
// the session has ended with another error.
func (c *Conn) Wait(deadline time.Time, have int) (int, error) {
	for {
		c.mu.Lock()
		n, err := len(c.queue), c.err
		if c.state == handing {
			err = net.ErrClosed
		}
		c.mu.Unlock()
		if err != nil || n > have {
			return n, err
		}
		if !c.sleep(deadline) {
			return n, os.ErrDeadlineExceeded
		}
	}
}

// sleep waits for a poke. It reports false when the deadline is over.
func (c *Conn) sleep(deadline time.Time) bool {
	if deadline.IsZero() {
		<-c.wake
		return true
	}
	d := time.Until(deadline)
	if d <= 0 {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-c.wake:
		return true
	case <-t.C:
		return false
	}
}

// Datagrams appends the queued datagrams to buf without taking them. They must
// not be changed.
func (c *Conn) Datagrams(buf [][]byte) [][]byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append(buf, c.queue...)
}

// Read takes one datagram, or what an earlier Read's buffer had no room for.
func (c *Conn) Read(p []byte) (int, error) {
	for {
		c.mu.Lock()
		n, deadline, ok, err := c.readLocked(p)
		c.mu.Unlock()
		if ok || err != nil {
			return n, err
		}
		c.sleep(deadline)
	}
}

func (c *Conn) readLocked(p []byte) (n int, deadline time.Time, ok bool, err error) {
	switch {
	case c.state == handing:
		return 0, deadline, false, net.ErrClosed
	case c.state == ended:
		return 0, deadline, false, c.err
	case len(c.rest) > 0:
		n = copy(p, c.rest)
		c.rest = c.rest[n:]
		return n, deadline, true, nil
	case !c.deadline.IsZero() && !time.Now().Before(c.deadline):
		return 0, deadline, false, os.ErrDeadlineExceeded
	case len(c.queue) == 0:
		return 0, c.deadline, false, nil
	}
	d := c.queue[0]
	c.queue[0] = nil
	c.queue = c.queue[1:]
	c.size -= len(d)
	if !c.attached {
		c.w.pendingBytes.Add(-int64(len(d)))
	}
	n = copy(p, d)
	c.rest = d[n:]
	c.packetsC2S.Add(1)
	c.bytesC2S.Add(uint64(len(d)))
	count := &c.path.Counters[c.w.id]
	count.PacketsC2S.Add(1)
	count.BytesC2S.Add(uint64(len(d)))
	return n, deadline, true, nil
}

// Write sends one datagram to the client, from the address the client has
// hit. It never waits: where the kernel has no room the datagram is lost, and
// counted.
func (c *Conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	state, count := c.state, &c.path.Counters[c.w.id]
	c.mu.Unlock()
	if state != open {
		return 0, net.ErrClosed
	}
	c.lastWrite.Store(c.w.clock())
	errno := c.so.post(&c.way, p)
	if errno == unix.EBADF {
		return 0, net.ErrClosed
	}
	if errno != 0 {
		count.Dropped[relay.ReplySend].Add(1)
		if errno == unix.EMSGSIZE || !shortage(errno) {
			return 0, &net.OpError{Op: "write", Net: "udp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: errno}
		}
		return len(p), nil
	}
	c.packetsS2C.Add(1)
	c.bytesS2C.Add(uint64(len(p)))
	count.PacketsS2C.Add(1)
	count.BytesS2C.Add(uint64(len(p)))
	return len(p), nil
}

// LocalAddr is the address the client has hit, a *net.UDPAddr.
func (c *Conn) LocalAddr() net.Addr { return net.UDPAddrFromAddrPort(c.local) }

// RemoteAddr is the client, a *net.UDPAddr.
func (c *Conn) RemoteAddr() net.Addr { return net.UDPAddrFromAddrPort(c.client) }

// SetDeadline sets the deadline of Read. Write needs none.
func (c *Conn) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

// SetReadDeadline sets the deadline of Read; the zero time means none.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	c.poke()
	return nil
}

// SetWriteDeadline does nothing, for Write never waits.
func (c *Conn) SetWriteDeadline(time.Time) error { return nil }

// Interface guard
var _ net.Conn = (*Conn)(nil)
