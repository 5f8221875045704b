package udprelay

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// Endpoint is one bound address. Its sockets stay the same as long as it
// lives, or the kernel would move clients between the workers.
type Endpoint struct {
	engine   *Engine
	addr     netip.AddrPort
	acceptor Acceptor
	index    uint32 // in the workers' tables
	sockets  []*socket
	headers  atomic.Pointer[HeaderIn] // nil: datagrams have none
	sessions atomic.Int64
	close    sync.Once

	lettersMu sync.Mutex
	letters   replies // of those who are not workers, on a transparent endpoint
}

// socket is an endpoint's socket on one worker.
type socket struct {
	ep       *Endpoint
	fd       int
	gen      uint32
	v6       bool
	wildcard bool
	local    [16]byte // IPv4 mapped; of a wildcard nothing
	sessions int      // of the worker, which alone touches it
	queued   bool     // it is in worker.again; likewise
	vias     int      // of the worker that are this socket's; likewise

	transparent bool    // what arrives was sent to whatever address and port
	port        uint16  // in network order
	replies     replies // the worker's, on a transparent endpoint

	mu     sync.RWMutex // held by those who are not the worker while they use fd
	closed bool
}

// Addr is the bound address.
func (ep *Endpoint) Addr() netip.AddrPort { return ep.addr }

// Sessions counts the live sessions of the endpoint, held ones included.
func (ep *Endpoint) Sessions() int { return int(ep.sessions.Load()) }

// Close ends the endpoint's sessions for the given reason, closes its sockets
// and waits for that. Callbacks must not call it.
func (ep *Endpoint) Close(why relay.Reason) {
	ep.close.Do(func() {
		ep.shut(len(ep.sockets), why)
		ep.lettersMu.Lock()
		ep.letters.close()
		ep.lettersMu.Unlock()
		ep.engine.forget(ep)
	})
}

// shut closes the sockets of the first n workers, once their sessions are ended,
// and waits for that.
func (ep *Endpoint) shut(n int, why relay.Reason) {
	closed := make(chan struct{}, n)
	for i, w := range ep.engine.workers[:n] {
		so := ep.sockets[i]
		if !w.post(func(w *worker) { w.shut(so, why, func() { closed <- struct{}{} }) }) {
			so.shut() // the engine is closed; it has ended the sessions
			closed <- struct{}{}
		}
	}
	for _, w := range ep.engine.workers[:n] {
		select {
		case <-closed:
		case <-w.done:
		}
	}
}

// shut closes an endpoint's socket on this worker once its sessions are ended.
// The socket takes nothing in meanwhile.
func (w *worker) shut(so *socket, why relay.Reason, done func()) {
	w.flushDown()
	unix.EpollCtl(w.epfd, unix.EPOLL_CTL_DEL, so.fd, nil)
	so.gen = 1 << 31 // no event has that
	finish := func(w *worker) {
		w.flushDown()
		w.downSo = nil
		w.forgetAll(so.ep.index)
		w.sockets[so.ep.index] = nil
		so.shut()
		done()
	}
	if so.sessions == 0 {
		finish(w)
		return
	}
	w.walks = append(w.walks, &walk{
		visit: func(w *worker, slot uint32) bool {
			if w.slab.at(slot).ep != so.ep.index {
				return false
			}
			w.end(slot, why)
			return true
		},
		done: finish,
	})
}

func (so *socket) shut() {
	so.mu.Lock()
	defer so.mu.Unlock()
	if !so.closed {
		so.closed = true
		closeFD(so.fd)
	}
}

// add makes the worker listen to an endpoint's socket.
func (w *worker) add(so *socket) error {
	i := so.ep.index
	for len(w.sockets) <= int(i) {
		w.sockets = append(w.sockets, nil)
	}
	w.event = unix.EpollEvent{Events: edge, Fd: int32(i), Pad: int32(kindSocket<<24 | so.gen)}
	if errno := epollAdd(w.epfd, so.fd, &w.event); errno != 0 {
		return fmt.Errorf("epoll_ctl: %w", errno)
	}
	w.sockets[i] = so
	return nil
}

// socketBuffer is small enough that what waits in it is not yet stale: some
// 2,700 small datagrams, for the kernel doubles it.
const socketBuffer = 1 << 20

func newSocket(ep *Endpoint, fd int, gen uint32, off offload, o sock.Options) *socket {
	so := &socket{
		ep: ep, fd: fd, gen: gen, v6: !ep.addr.Addr().Is4(), wildcard: ep.addr.Addr().IsUnspecified(),
		transparent: o.Transparent, port: swap(ep.addr.Port()),
	}
	if !so.wildcard {
		so.local = ep.addr.Addr().As16()
	}
	if off.gro {
		setGRO(fd)
	}
	// The kernel's defaults are made for one flow, and this socket has all of
	// a worker's clients. Without CAP_NET_ADMIN the system's limit holds.
	setBuffer(fd, unix.SO_RCVBUFFORCE, unix.SO_RCVBUF)
	sendBuffer(fd)
	return so
}

func sendBuffer(fd int) { setBuffer(fd, unix.SO_SNDBUFFORCE, unix.SO_SNDBUF) }

func setBuffer(fd, force, fallback int) {
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, force, socketBuffer) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, fallback, socketBuffer)
	}
}

// address writes the client's address as this socket wants it and returns its
// length.
func (so *socket) address(n *unix.RawSockaddrInet6, k *key) uint32 {
	if !so.v6 {
		n4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(n))
		n4.Family, n4.Port, n4.Addr = unix.AF_INET, k.port, [4]byte(k.client[12:])
		return unix.SizeofSockaddrInet4
	}
	n.Family, n.Port, n.Flowinfo, n.Addr, n.Scope_id = unix.AF_INET6, k.port, 0, k.client, k.scope
	return unix.SizeofSockaddrInet6
}

// source writes the control message that makes a reply leave from the address
// the client has hit, and returns its length. Where the socket is bound to
// that address there is nothing to say.
func (so *socket) source(c *control, k *key) int {
	if !so.wildcard && (!so.transparent || k.local == so.local) {
		return 0
	}
	if !so.v6 {
		// The interface is left to the kernel; ipi_spec_dst is the source.
		var p [unix.SizeofInet4Pktinfo]byte
		copy(p[4:8], k.local[12:])
		return c.put(0, unix.IPPROTO_IP, unix.IP_PKTINFO, p[:])
	}
	// A mapped address tells a dual-stack socket to send by IPv4.
	var p unix.Inet6Pktinfo
	p.Addr = k.local
	if linkLocal(&k.local) {
		p.Ifindex = k.scope
	}
	return c.put(0, unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, (*[unix.SizeofInet6Pktinfo]byte)(unsafe.Pointer(&p))[:])
}

// letter is a datagram sent by somebody who is not the worker.
type letter struct {
	hdr  unix.Msghdr
	buf  [2]unix.Iovec // a header and the datagram
	name unix.RawSockaddrInet6
	ctl  control
}

var letters = sync.Pool{New: func() any { return new(letter) }}

// post sends one datagram to a client. Any goroutine may call it.
func (so *socket) post(to *Way, p []byte) unix.Errno {
	k := &to.wire
	so, errno := so.ep.letterbox(so, k)
	if errno != 0 {
		return errno
	}
	l := letters.Get().(*letter)
	defer letters.Put(l)
	l.hdr = unix.Msghdr{Name: (*byte)(unsafe.Pointer(&l.name)), Iov: &l.buf[0]}
	l.hdr.Namelen = so.address(&l.name, k)
	l.hdr.SetIovlen(len(l.buf))
	l.buf[0].Base = &to.head[0]
	l.buf[0].SetLen(to.n)
	l.buf[1].Base = unsafe.SliceData(p)
	l.buf[1].SetLen(len(p))
	if n := so.source(&l.ctl, k); n > 0 {
		l.hdr.Control = (*byte)(unsafe.Pointer(&l.ctl))
		l.hdr.SetControllen(n)
	}
	so.mu.RLock()
	defer so.mu.RUnlock()
	if so.closed {
		return unix.EBADF
	}
	errno = sendmsg(so.fd, &l.hdr)
	l.buf = [2]unix.Iovec{}
	return errno
}

// Listen binds addr, one SO_REUSEPORT socket a worker. The caller has probed
// it (sock.Probe). With port 0 the first socket picks the port.
func (e *Engine) Listen(addr netip.AddrPort, o sock.Options, a Acceptor) (*Endpoint, error) {
	e.setup.Lock()
	defer e.setup.Unlock()
	var fds []int
	fail := func(err error) (*Endpoint, error) {
		for _, fd := range fds {
			closeFD(fd)
		}
		return nil, err
	}
	for range e.workers {
		fd, err := sock.ListenUDP(addr, o)
		if err != nil {
			return fail(fmt.Errorf("udp/%s: %w", addr, err))
		}
		fds = append(fds, fd)
		if addr.Port() == 0 {
			bound, err := sock.LocalAddr(fd)
			if err != nil {
				return fail(err)
			}
			addr = netip.AddrPortFrom(addr.Addr(), bound.Port())
		}
	}
	ep := &Endpoint{engine: e, addr: addr, acceptor: a}
	gen, ok := e.register(ep)
	if !ok {
		return fail(net.ErrClosed)
	}
	for _, fd := range fds {
		ep.sockets = append(ep.sockets, newSocket(ep, fd, gen, e.offload, o))
	}
	for i, w := range e.workers {
		var err error
		if !w.call(func(w *worker) { err = w.add(ep.sockets[i]) }) {
			err = net.ErrClosed
		}
		if err != nil {
			fds = fds[i:]
			ep.shut(i, relay.Error) // clients may have sessions there by now
			e.forget(ep)
			return fail(fmt.Errorf("udp/%s: %w", addr, err))
		}
	}
	return ep, nil
}
