package udprelay

import (
	"encoding/binary"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The loop of one worker:
//
//	epoll → endpoint socket → deliver → up   → flushUp → the session's socket    (clients.go)
//	      → session socket  → answer  → down → flushDown → the endpoint's socket (backends.go)
//	      → eventfd → ops from other goroutines
//	      → timerfd → expire (wheel.go)
//
// All of it runs in the one goroutine that owns the worker. It waits for
// events in Go's own poller, where its epoll set is nested, and so keeps no
// thread. Nothing in it waits for a client, a backend or another goroutine,
// and forwarding allocates nothing. Each step is taken off its list before it
// is done, so that a panic in a callback costs that step alone.

// The kinds of event, in the top byte of its generation.
const (
	kindSession = iota
	kindSocket
	kindOps
	kindTimer
)

type worker struct {
	id      int
	log     *zap.Logger
	offload offload
	claims  *claims   // of all workers
	epoch   time.Time // of the ticks

	// owned by the loop
	epfd     int
	eventfd  int
	timerfd  int
	set      *os.File // epfd
	ticking  bool
	stop     bool
	now      uint32 // tick; renewed once a turn
	events   [128]unix.EpollEvent
	at, n    int               // events in hand
	again    []unix.EpollEvent // sockets that were not emptied, each once
	retry    []unix.EpollEvent // the ones being looked at again
	retryAt  int
	running  []func(*worker) // ops in hand
	runAt    int
	walks    []*walk
	panicked time.Time       // last logged
	asking   *relay.Counters // of whom a callback was called last; nil: those of opening

	sockets   []*socket // by endpoint; nil: none
	slab      slab
	table     table
	wheel     wheel
	paths     []pathRef
	pathIndex map[*relay.Path]uint32
	freePaths []uint32
	conns     map[uint32]*Conn // of held sessions
	notes     map[uint32]*note // of sessions with the flag noted

	vias     []via // 0: none
	viaIndex map[key]uint32
	freeVias []uint32
	kept     []uint32 // the ones that are kept without a session
	hand     int      // the one of them that was looked at last

	rx      *receiver // from clients
	in      inbox
	up      *sender   // to one backend
	rxDown  *receiver // from backends
	got     int
	down    *sender // to clients of one endpoint
	downSo  *socket
	upSum   tally
	downSum tally

	headsDown [maxMsgs][proxyproto.LenSPP]byte // by message of down, where its datagrams have one

	// kept here so that callbacks cost no allocation
	opening Opening
	closed  relay.Info
	name    unix.RawSockaddrInet6
	event   unix.EpollEvent
	headUp  [proxyproto.MostWritten]byte // of the session that up is for
	about   proxyproto.Flow
	idText  [32]byte

	// shared with other goroutines
	sessions     atomic.Int64
	panics       atomic.Uint64
	pending      atomic.Int64 // held sessions that await a decision
	pendingBytes atomic.Int64 // their datagrams
	woken        atomic.Bool  // the eventfd has been written
	done         chan struct{}

	mu   sync.Mutex
	ops  []func(*worker)
	dead bool
}

// tally is traffic that is not in the listener's counters yet.
type tally struct {
	path           uint32
	packets, bytes uint64
}

func newWorker(id int, log *zap.Logger, off offload, cl *claims) (_ *worker, err error) {
	w := &worker{
		opening: Opening{FD: -1},
		id:      id, log: log, offload: off, claims: cl, epoch: time.Now(), now: 1,
		epfd: -1, eventfd: -1, timerfd: -1,
		table:     newTable(),
		pathIndex: make(map[*relay.Path]uint32),
		conns:     make(map[uint32]*Conn),
		notes:     make(map[uint32]*note),
		vias:      make([]via, 1),
		viaIndex:  make(map[key]uint32),
		rx:        newReceiver(batch, true),
		rxDown:    newReceiver(replyBufs, false),
		up:        new(sender),
		down:      new(sender),
		done:      make(chan struct{}),
	}
	defer func() {
		if err != nil {
			w.closeFDs()
		}
	}()
	if w.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	if w.eventfd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	if w.timerfd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	// Edge-triggered, each write to the eventfd is an event and nobody needs
	// to read it. A timerfd does not go on until it is read.
	for fd, kind := range map[int]uint32{w.eventfd: kindOps, w.timerfd: kindTimer} {
		if errno := epollAdd(w.epfd, fd, &unix.EpollEvent{Events: edge, Pad: int32(kind << 24)}); errno != 0 {
			return nil, os.NewSyscallError("epoll_ctl", errno)
		}
	}
	if err := unix.SetNonblock(w.epfd, true); err != nil { // or Go would not poll it
		return nil, os.NewSyscallError("fcntl", err)
	}
	w.set = os.NewFile(uintptr(w.epfd), "epoll")
	return w, nil
}

const edge = unix.EPOLLIN | uint32(1<<31) // EPOLLET, which x/sys has as a negative number

func (w *worker) closeFDs() {
	if w.set != nil {
		w.set.Close()
	} else if w.epfd >= 0 {
		closeFD(w.epfd)
	}
	for _, fd := range []int{w.eventfd, w.timerfd} {
		if fd >= 0 {
			closeFD(fd)
		}
	}
}

// run is the worker's goroutine. Engine.Close ends it by an op.
func (w *worker) run() {
	defer close(w.done)
	raw, err := w.set.SyscallConn()
	if err == nil {
		err = raw.Read(func(uintptr) bool {
			for turns := 1; !w.stop; turns++ {
				if !w.turn() {
					return w.stop
				}
				// Where there is one thread for all, those who decide about
				// held sessions, and anybody else, would wait for the
				// scheduler's next look, in ten milliseconds.
				if len(w.conns) > 0 || turns%16 == 0 {
					runtime.Gosched()
				}
			}
			return true
		})
	}
	if err != nil {
		w.log.Error("udp worker ended", zap.Error(err))
	}
	w.mu.Lock()
	w.dead, w.ops = true, nil
	w.mu.Unlock()
	// w.eventfd is written under mu and only while the worker is not dead.
	w.closeFDs()
}

// clock is the present tick. Any goroutine may call it.
func (w *worker) clock() uint32 { return uint32(time.Since(w.epoch)/tick) + 1 }

// turn does what there is to do and reports whether there may be more. The
// last poll before it reports false has found nothing, or the wake-up for
// what came after would be lost.
func (w *worker) turn() (more bool) {
	defer w.contain(&more)
	w.deliver() // what a panic has left of a batch
	if w.at == w.n {
		w.at, w.n = 0, epollPoll(w.epfd, w.events[:])
		w.now = w.clock()
	}
	more = w.n > 0
	for w.at < w.n {
		ev := w.events[w.at]
		w.at++
		w.handle(ev, false)
	}
	if w.retryAt == len(w.retry) {
		w.retry, w.again, w.retryAt = w.again, w.retry[:0], 0
	}
	for w.retryAt < len(w.retry) {
		ev := w.retry[w.retryAt]
		w.retryAt++
		w.handle(ev, true)
	}
	w.runOps()
	for i := 0; i < len(w.walks); i++ {
		if w.walks[i].step(w) {
			w.walks = append(w.walks[:i], w.walks[i+1:]...)
			i--
		}
	}
	if w.now != w.wheel.at || w.wheel.heads[w.wheel.at%wheelBuckets] != 0 {
		more = w.expire() || more
	}
	w.flushDown()
	w.settle()
	return more || len(w.again) > 0 || len(w.walks) > 0
}

// contain keeps a panic of a callback from ending the process. What was being
// done is lost, all else goes on with the next turn.
func (w *worker) contain(more *bool) {
	v := recover()
	if v == nil {
		return
	}
	*more = true
	w.panics.Add(1)
	if w.asking == nil {
		w.asking = w.opening.Counters
	}
	if w.asking != nil {
		w.asking.Panics.Add(1)
	}
	if now := time.Now(); w.panicked.IsZero() || now.Sub(w.panicked) >= time.Second {
		w.panicked = now
		w.log.Error("panic on the packet path", zap.Int("worker", w.id), zap.Any("panic", v), zap.Uint64("panics", w.panics.Load()), zap.Stack("stack"))
	}
	w.up.clear()
	if fd := w.opening.FD; fd >= 0 {
		w.opening.FD = -1
		closeFD(fd)
	}
	if c := w.opening.conn; c != nil {
		w.opening.conn = nil
		if w.conns[c.slot] == c {
			w.end(c.slot, relay.Error) // never told to an owner, for it was not established
		}
	}
	w.opened()
}

// handle deals with an event, or again with a socket that was not emptied. A
// socket that waits for its next turn gets no other one through its events,
// or the busiest would get the most.
func (w *worker) handle(ev unix.EpollEvent, again bool) {
	gen := uint32(ev.Pad)
	switch gen >> 24 {
	case kindSession:
		s := w.slab.get(uint32(ev.Fd), gen&genMask)
		if s == nil || s.fd < 0 || (s.flags&queued != 0 && !again) {
			return
		}
		s.flags &^= queued
		w.answer(uint32(ev.Fd), s, ev)
	case kindSocket:
		so := w.sockets[ev.Fd]
		if so == nil || so.gen != gen&genMask || (so.queued && !again) {
			return
		}
		so.queued = false
		w.receive(so, ev)
	case kindOps:
		w.takeOps()
	case kindTimer:
		readTimer(w.timerfd)
	}
}

// wake is what is written to a worker's eventfd.
var wake = binary.NativeEndian.AppendUint64(nil, 1)

// owner is whom to tell about the sessions of a path, which counts a panic; nil:
// nobody.
func (w *worker) owner(p *relay.Path) relay.Owner {
	w.asking = p.Count(w.id)
	return p.Owner
}

// post gives the worker something to do. It reports false when the worker
// has ended. Any goroutine may call it; what clients can cause is bounded by
// the number of held sessions.
func (w *worker) post(op func(*worker)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead {
		return false
	}
	w.ops = append(w.ops, op)
	if w.woken.CompareAndSwap(false, true) {
		unix.Write(w.eventfd, wake)
	}
	return true
}

// call has the worker run f and waits for it. f has not run, or not to its
// end, when call reports false. The worker itself must not call it.
func (w *worker) call(f func(*worker)) bool {
	ran := false
	done := make(chan struct{})
	if !w.post(func(w *worker) {
		defer close(done)
		f(w)
		ran = true
	}) {
		return false
	}
	select {
	case <-done:
	case <-w.done:
		select {
		case <-done:
		default:
			return false
		}
	}
	return ran
}

func (w *worker) takeOps() {
	w.woken.Store(false) // before looking: who comes later wakes again
	w.mu.Lock()
	defer w.mu.Unlock()
	w.running = append(w.running, w.ops...)
	clear(w.ops)
	w.ops = w.ops[:0]
}

func (w *worker) runOps() {
	for w.runAt < len(w.running) {
		op := w.running[w.runAt]
		w.running[w.runAt] = nil
		w.runAt++
		op(w)
	}
	w.running, w.runAt = w.running[:0], 0
}

// tickTimer starts or stops the ticks.
func (w *worker) tickTimer(on bool) {
	if w.ticking == on {
		return
	}
	w.ticking = on
	var spec unix.ItimerSpec
	if on {
		spec.Interval = unix.NsecToTimespec(int64(tick))
		spec.Value = spec.Interval
	}
	if err := unix.TimerfdSettime(w.timerfd, 0, &spec, nil); err != nil {
		w.log.Error("timer not set", zap.Error(err))
	}
}

// settle brings the listeners' counters up to date.
func (w *worker) settle() {
	if t := &w.upSum; t.packets > 0 {
		c := &w.paths[t.path].path.Counters[w.id]
		c.PacketsC2S.Add(t.packets)
		c.BytesC2S.Add(t.bytes)
		*t = tally{}
	}
	if t := &w.downSum; t.packets > 0 {
		c := &w.paths[t.path].path.Counters[w.id]
		c.PacketsS2C.Add(t.packets)
		c.BytesS2C.Add(t.bytes)
		*t = tally{}
	}
}

// walk visits every slot in use, some in a turn.
type walk struct {
	slot  uint32
	visit func(w *worker, slot uint32) (ended bool)
	done  func(w *worker) // may be nil
}

func (k *walk) step(w *worker) (finished bool) {
	for budget := 4096; k.slot < w.slab.next; {
		if budget <= 0 {
			return false
		}
		slot := k.slot
		k.slot++
		budget--
		if slot != 0 && w.slab.at(slot).flags&live != 0 && k.visit(w, slot) {
			budget -= 15 // ending one costs system calls
		}
	}
	if f := k.done; f != nil {
		k.done = nil
		f(w)
	}
	return true
}
