package tcprelay

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// A worker is one goroutine with one epoll descriptor, which waits in Go's
// netpoller and so holds no thread while nothing happens:
//
//	poll → turn → events (accept, connect, pump) → run queue → timers → …
//
// It owns every connection it has accepted or been handed, and everything
// below except ops and conns. Others reach it through ops only. Nothing on
// the loop blocks; moving a chunk allocates nothing and takes no lock.
type worker struct {
	index int
	log   *zap.Logger

	epoll  *os.File
	epfd   int
	wakefd int32
	exited chan struct{}
	conns  atomic.Int64

	mu     sync.Mutex
	ops    []op // guarded by mu
	closed bool // guarded by mu: no more ops

	epoch    time.Time
	now      int64 // nanoseconds since epoch, read once a turn
	armed    int64 // when the netpoller wakes us; never: not at all
	stopping bool

	slab         slab
	paths        paths
	pends        pends
	done         map[uint32]func() // by slot, for connections that have one
	fine, coarse wheel
	listeners    []*listener
	pipes        pipePool
	spills       spillPool
	noSplice     bool

	events       [256]unix.EpollEvent
	gotN, gotAt  int // events of this turn, and how many have been handled
	running      []handle
	runningAt    int
	swapped      bool     // running is this turn's
	queue        []handle // to run after the events
	backlog      []handle // to run as turns have room: they have spent their budget
	backlogAt    int
	batch        []op // ops being run
	batchAt      int
	current      handle          // the connection at work, for when guest code panics
	asking       *relay.Counters // of whom guest code was called last; nil: those of opening
	accepting    int32           // the descriptor an acceptor is deciding on; -1: none
	opening      Opening
	info         relay.Info
	rsa          unix.RawSockaddrAny
	buf          []byte
	nextPanicLog int64
	listenerGen  uint32
}

// handle names a connection for as long as it lives. The zero handle names
// none.
type handle struct{ slot, gen uint32 }

// Kinds of event sources, in the low two bits of the event data. Above them is
// the try of the connect, for backend sockets, and above that the generation.
const (
	fromClient = iota
	fromBackend
	fromListener
	fromOps
)

const (
	bufSize        = 64 << 10
	backlogPerTurn = 4
)

func newWorker(index int, o Options) (*worker, error) {
	epfd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	wakefd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		unix.Close(epfd)
		return nil, os.NewSyscallError("eventfd", err)
	}
	w := &worker{
		index:     index,
		log:       o.Logger,
		epfd:      epfd,
		wakefd:    int32(wakefd),
		exited:    make(chan struct{}),
		epoch:     time.Now(),
		armed:     never,
		paths:     paths{index: make(map[*relay.Path]uint32)},
		done:      make(map[uint32]func()),
		fine:      wheel{tick: int64(10 * time.Millisecond)},
		coarse:    wheel{id: buckets, tick: int64(500 * time.Millisecond), early: true},
		noSplice:  o.noSplice,
		accepting: -1,
		buf:       make([]byte, bufSize),
	}
	// Non-blocking is what makes os.NewFile give it to the netpoller.
	if err := unix.SetNonblock(epfd, true); err != nil {
		unix.Close(wakefd)
		unix.Close(epfd)
		return nil, os.NewSyscallError("fcntl", err)
	}
	w.epoll = os.NewFile(uintptr(epfd), "epoll")
	err = w.epoll.SetReadDeadline(time.Time{}) // fails unless the netpoller has it
	if err == nil {
		ev := unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET&(1<<32-1), Pad: fromOps}
		if errno := epollCtl(epfd, unix.EPOLL_CTL_ADD, w.wakefd, &ev); errno != 0 {
			err = os.NewSyscallError("epoll_ctl", errno)
		}
	}
	if err != nil {
		unix.Close(wakefd)
		w.epoll.Close()
		return nil, fmt.Errorf("worker %d: %w", index, err)
	}
	return w, nil
}

func (w *worker) run() {
	defer close(w.exited)
	rc, err := w.epoll.SyscallConn()
	for err == nil && !w.stopping {
		err = rc.Read(w.poll)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			w.armed = never
			err = w.epoll.SetReadDeadline(time.Time{})
		}
	}
	if err != nil {
		w.log.Error("tcp worker ended", zap.Error(err))
	}
	w.end()
}

// poll runs turns until there is nothing to do. Returning false parks the
// goroutine until the epoll descriptor has something; everything it had was
// taken, for the netpoller hears only of what is new.
func (w *worker) poll(uintptr) bool {
	for !w.stopping {
		n := epollWait(w.epfd, w.events[:])
		w.now = int64(time.Since(w.epoch))
		if n == 0 && len(w.queue) == 0 && len(w.backlog) == 0 && !w.arm() {
			return false
		}
		w.turn(n)
	}
	return true
}

// arm sets the netpoller's deadline to the next timer and reports whether one
// is due already. A deadline that has become too early is left: it costs one
// turn.
func (w *worker) arm() (due bool) {
	next := min(w.fine.next(), w.coarse.next())
	for _, l := range w.listeners {
		if l != nil && l.resume != 0 {
			next = min(next, l.resume)
		}
	}
	if next <= w.now {
		return true
	}
	if next < w.armed {
		w.armed = next
		if err := w.epoll.SetReadDeadline(w.epoch.Add(time.Duration(next))); err != nil {
			w.log.Error("tcp worker cannot set its timer", zap.Error(err))
		}
	}
	return false
}

func (w *worker) turn(n int) {
	w.gotN, w.gotAt = n, 0
	w.running, w.runningAt = w.running[:0], 0
	w.swapped = false
	for !w.finishTurn() {
	}
}

// finishTurn does what is left of the turn. Guest code (acceptors, dialers,
// owners) that panics costs the connection it was called for: each step moves
// its position on first, and finishTurn is called again.
func (w *worker) finishTurn() (ok bool) {
	defer func() {
		if !ok {
			w.contain(recover())
		}
	}()
	for w.gotAt < w.gotN {
		ev := &w.events[w.gotAt]
		w.gotAt++
		w.dispatch(ev)
	}
	if !w.swapped {
		w.swapped = true
		w.running, w.queue = w.queue, w.running
	}
	for w.runningAt < len(w.running) {
		h := w.running[w.runningAt]
		w.runningAt++
		w.runHandle(h)
	}
	for range backlogPerTurn {
		if w.backlogAt == len(w.backlog) {
			w.backlog, w.backlogAt = w.backlog[:0], 0
			break
		}
		h := w.backlog[w.backlogAt]
		w.backlogAt++
		w.runHandle(h)
	}
	// After the events: those of a try that timed out belong to it.
	for {
		slot, ok := w.fine.pop(&w.slab, w.now)
		if !ok {
			if slot, ok = w.coarse.pop(&w.slab, w.now); !ok {
				break
			}
		}
		w.expire(slot, w.slab.at(slot))
	}
	for _, l := range w.listeners {
		if l != nil && l.resume != 0 && l.resume <= w.now {
			w.resume(l)
		}
	}
	w.current = handle{}
	return true
}

// contain ends the connection whose guest code has panicked.
func (w *worker) contain(reason any) {
	if w.asking == nil {
		w.asking = w.opening.Counters
	}
	if w.asking != nil {
		w.asking.Panics.Add(1)
	}
	if w.now >= w.nextPanicLog {
		w.nextPanicLog = w.now + int64(time.Second)
		w.log.Error("panic on a tcp worker", zap.Any("reason", reason), zap.Stack("stack"))
	}
	if w.accepting >= 0 {
		closeFD(w.accepting)
		w.accepting = -1
	}
	h := w.current
	w.current = handle{}
	c := w.find(h)
	if c == nil {
		return
	}
	defer func() {
		if recover() != nil { // the guest panics again: what is left is ours to free
			if c := w.find(h); c != nil {
				w.release(h.slot, c)
			}
		}
	}()
	switch c.state {
	case connecting:
		w.abandon(h.slot, c, relay.Error)
	default:
		w.finish(h.slot, c, relay.Error)
	}
}

// owner is whom to tell about the flows of a path, which counts a panic.
func (w *worker) owner(p *relay.Path) relay.Owner {
	w.asking = p.Count(w.index)
	return p.Owner
}

// dispatch handles one event. An event of a socket that is no more, whose slot
// has another connection by now, is known by its generation.
func (w *worker) dispatch(ev *unix.EpollEvent) {
	slot, data := uint32(ev.Fd), uint32(ev.Pad)
	w.current = handle{}
	switch side := data & 3; side {
	case fromOps:
		w.runOps()
	case fromListener:
		if int(slot) < len(w.listeners) {
			if l := w.listeners[slot]; l != nil && l.gen == data>>8 {
				w.acceptSome(l)
			}
		}
	default:
		h := handle{slot, data >> 8}
		c := w.find(h)
		if c == nil || side == fromBackend && uint8(data>>2&0x3f) != c.try&0x3f {
			return
		}
		w.current = h
		w.socketEvent(slot, c, int(side), ev.Events)
	}
}

func (w *worker) find(h handle) *conn {
	if h.gen == 0 {
		return nil
	}
	if c := w.slab.at(h.slot); c.gen == h.gen && c.state != vacant {
		return c
	}
	return nil
}

// watch registers a socket of a connection, once, for everything.
func (w *worker) watch(fd int32, slot uint32, c *conn, side int) unix.Errno {
	data := c.gen<<8 | uint32(side)
	if side == backend {
		data |= uint32(c.try&0x3f) << 2
	}
	ev := unix.EpollEvent{
		Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET&(1<<32-1),
		Fd:     int32(slot),
		Pad:    int32(data),
	}
	return epollCtl(w.epfd, unix.EPOLL_CTL_ADD, fd, &ev)
}

func (w *worker) runHandle(h handle) {
	if c := w.find(h); c != nil {
		c.flags &^= queued
		w.pump(h.slot, c)
	}
}

// requeue has a connection that has spent its budget pumped in a later turn.
// Few are each turn, so that those with little to move do not wait for many
// with a lot.
func (w *worker) requeue(slot uint32, c *conn) {
	if c.has(queued) {
		return
	}
	c.flags |= queued
	if w.backlogAt > len(w.backlog)/2 {
		w.backlog, w.backlogAt = w.backlog[:copy(w.backlog, w.backlog[w.backlogAt:])], 0
	}
	w.backlog = append(w.backlog, handle{slot, c.gen})
}

// enqueue has the connection pumped after the events of this turn, or in the
// next one.
func (w *worker) enqueue(slot uint32, c *conn) {
	if !c.has(queued) {
		c.flags |= queued
		w.queue = append(w.queue, handle{slot, c.gen})
	}
}

// end closes everything, on the worker's goroutine, after the last turn.
func (w *worker) end() {
	w.now = int64(time.Since(w.epoch))
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.runOps() // flows among them are turned away: see adopt
	for _, l := range w.listeners {
		if l != nil {
			w.unlisten(l)
		}
	}
	for slot := uint32(0); slot < w.slab.top; {
		slot = w.endFrom(slot)
	}
	w.pipes.close()
	unix.Close(int(w.wakefd))
	w.epoll.Close()
}

// endFrom ends the connections from slot on with relay.Drain, and returns the
// slot to go on from after guest code has panicked.
func (w *worker) endFrom(slot uint32) (next uint32) {
	ok := false
	defer func() {
		if !ok {
			w.contain(recover())
		}
	}()
	for next = slot; next < w.slab.top; {
		s := next
		next++
		if c := w.slab.at(s); c.state != vacant {
			w.current = handle{s, c.gen}
			w.cut(s, c, relay.Drain)
		}
	}
	ok = true
	return next
}
