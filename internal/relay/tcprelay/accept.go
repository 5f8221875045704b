package tcprelay

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

const (
	acceptsPerTurn = 32
	// acceptsAtClose bounds what a closing endpoint still takes from the
	// queue of one worker.
	acceptsAtClose = 4096

	minPause = int64(50 * time.Millisecond)
	maxPause = int64(time.Second)
)

// listener is a worker's socket of an endpoint. It is level-triggered, so that
// what a turn leaves in the queue comes with the next.
type listener struct {
	fd       int32
	slot     uint32 // in worker.listeners
	gen      uint32 // tells it from the next listener in this slot
	addr     netip.AddrPort
	asks     bool // each connection for the address it was made to: there may be several
	acceptor Acceptor
	batch    int   // connections to take in the next turn; see accept
	pause    int64 // how long the last failure made it wait
	resume   int64 // end of the pause; 0: not paused
}

// Endpoint is one bound address, with a socket on every worker.
type Endpoint struct {
	engine    *Engine
	addr      netip.AddrPort
	listeners []*listener // by worker
}

// Listen binds addr, one SO_REUSEPORT socket a worker. The caller has probed it.
// It must not be called from a worker.
func (e *Engine) Listen(addr netip.AddrPort, o sock.Options, a Acceptor) (*Endpoint, error) {
	ep := &Endpoint{engine: e, addr: addr}
	for range e.workers {
		fd, err := sock.ListenTCP(ep.addr, o)
		if err == nil && len(ep.listeners) == 0 {
			ep.addr, err = sock.LocalAddr(fd) // the others share the port it has got
			if addr.Addr().Is6() {            // also when it prints as IPv4
				ep.addr = netip.AddrPortFrom(addr.Addr(), ep.addr.Port())
			}
		}
		if err != nil {
			if fd >= 0 {
				closeFD(int32(fd))
			}
			ep.abort()
			return nil, err
		}
		// Accepted sockets inherit it, which saves a call on each.
		setInt(int32(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		ep.listeners = append(ep.listeners, &listener{
			fd:       int32(fd),
			addr:     netip.AddrPortFrom(ep.addr.Addr().Unmap(), ep.addr.Port()),
			asks:     addr.Addr().IsUnspecified() || o.Transparent,
			acceptor: a,
			batch:    1,
		})
	}
	for i, w := range e.workers {
		l, errno := ep.listeners[i], unix.Errno(0)
		if !w.call(func() { errno = w.listen(l) }) || errno != 0 {
			for j := range i {
				w := e.workers[j]
				w.call(func() { w.unlisten(ep.listeners[j]) })
			}
			for _, l := range ep.listeners[i:] {
				closeFD(l.fd)
			}
			if errno != 0 {
				return nil, errno
			}
			return nil, ErrClosed
		}
	}
	return ep, nil
}

// abort closes sockets that no worker has seen.
func (ep *Endpoint) abort() {
	for _, l := range ep.listeners {
		closeFD(l.fd)
	}
}

// Addr is the bound address.
func (ep *Endpoint) Addr() netip.AddrPort { return ep.addr }

// Close accepts what is queued, then closes the listening sockets. Connections
// live on. It must not be called from a worker.
func (ep *Endpoint) Close() {
	for i, w := range ep.engine.workers {
		l := ep.listeners[i]
		w.call(func() {
			if w.listeners[l.slot] == l {
				defer w.unlisten(l)
				w.accept(l, acceptsAtClose)
			}
		})
	}
}

func (w *worker) listen(l *listener) unix.Errno {
	l.slot = uint32(len(w.listeners))
	for i, other := range w.listeners {
		if other == nil {
			l.slot = uint32(i)
			break
		}
	}
	w.listenerGen = (w.listenerGen + 1) & 0xffffff
	l.gen = w.listenerGen
	if errno := w.watchListener(l); errno != 0 {
		return errno
	}
	if int(l.slot) == len(w.listeners) {
		w.listeners = append(w.listeners, nil)
	}
	w.listeners[l.slot] = l
	return 0
}

func (w *worker) watchListener(l *listener) unix.Errno {
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(l.slot), Pad: int32(l.gen<<8 | fromListener)}
	return epollCtl(w.epfd, unix.EPOLL_CTL_ADD, l.fd, &ev)
}

func (w *worker) unlisten(l *listener) {
	if w.listeners[l.slot] == l {
		w.listeners[l.slot] = nil
		closeFD(l.fd)
	}
}

// acceptSome takes a turn's worth of connections. How many that is follows
// what is there: asking for one more than there is costs a call.
func (w *worker) acceptSome(l *listener) {
	if w.accept(l, l.batch) {
		l.batch = min(2*l.batch, acceptsPerTurn)
	} else {
		l.batch = 1
	}
}

// accept takes up to limit connections from the queue and reports whether
// there were as many.
func (w *worker) accept(l *listener, limit int) bool {
	for range limit {
		fd, errno := accept4(l.fd, &w.rsa)
		switch errno {
		case 0:
			l.pause = 0
			spare := sock.Spare(int(fd))
			w.decide(l, fd)
			if !spare { // what is left is not for flows
				w.suspend(l, unix.EMFILE)
				return false
			}
		case unix.EAGAIN:
			return false
		case unix.EINTR, unix.ECONNABORTED, unix.EPROTO, unix.EPERM, unix.ENOPROTOOPT, unix.ENETDOWN, unix.EHOSTDOWN,
			unix.ENONET, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT, unix.ECONNRESET:
			// The fate of one connection, not of the socket.
		default:
			w.suspend(l, errno)
			return false
		}
	}
	return true
}

// suspend stops accepting for a while. A shortage (EMFILE and the like) does
// not end the listener, and without the pause it would take the whole
// processor: the socket stays ready.
func (w *worker) suspend(l *listener, errno unix.Errno) {
	if l.resume != 0 {
		return
	}
	w.pipes.trim()
	epollCtl(w.epfd, unix.EPOLL_CTL_DEL, l.fd, &unix.EpollEvent{})
	l.pause = min(max(2*l.pause, minPause), maxPause)
	l.resume = w.now + l.pause
	l.acceptor.AcceptFailed(errno, time.Duration(l.pause))
}

func (w *worker) resume(l *listener) {
	errno := unix.EMFILE
	if sock.Room(int(w.wakefd)) {
		errno = w.watchListener(l)
	}
	if errno != 0 { // the same again
		l.pause = min(2*l.pause, maxPause)
		l.resume = w.now + l.pause
		l.acceptor.AcceptFailed(errno, time.Duration(l.pause))
		return
	}
	l.resume = 0
}

// Again has the acceptor asked once more about a connection that it has taken.
func (ep *Endpoint) Again(fd int, client, local netip.AddrPort) {
	i := fd % len(ep.listeners)
	w, a := ep.engine.workers[i], ep.listeners[i].acceptor
	ask := func() {
		if w.stopping {
			closeFD(int32(fd))
			return
		}
		w.ask(a, int32(fd), client, local)
	}
	if !w.post(op{do: ask}) {
		closeFD(int32(fd))
	}
}

// decide has the acceptor asked about a connection that has come.
func (w *worker) decide(l *listener, fd int32) {
	client, local := fromRaw(&w.rsa), l.addr
	if l.asks {
		local = localAddr(fd, &w.rsa)
	}
	w.ask(l.acceptor, fd, client, local)
}

// ask asks an acceptor what to do with a connection, and does it.
func (w *worker) ask(a Acceptor, fd int32, client, local netip.AddrPort) {
	w.accepting, w.current, w.asking = fd, handle{}, nil
	o := &w.opening
	*o = Opening{Worker: w.index, FD: int(fd), Client: client, Local: local}
	d := a.Accept(o)
	w.accepting = -1
	switch {
	case d == Take:
	case d == Peek && o.Looker != nil && o.Path != nil:
		w.openLooking(o)
	case d == Forward && o.Dialer != nil:
		w.open(Flow{FD: int(fd), Client: o.Client, Local: o.Local, Dialer: o.Dialer, Counters: o.Counters}, noDelay)
	default:
		closeFD(fd)
	}
}

// adopt takes a connection that was handed over.
func (w *worker) adopt(f Flow) {
	if !w.stopping {
		w.open(f, 0)
		return
	}
	closeFD(int32(f.FD))
	w.asking = f.Counters
	f.Dialer.GaveUp(&relay.Info{Client: f.Client, Local: f.Local, Age: f.Age, Phase: relay.Connect}, relay.Drain)
	if f.Done != nil {
		f.Done()
	}
}
