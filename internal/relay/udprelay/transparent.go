package udprelay

import (
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// Transparent endpoints. Clients have sent to whatever address and port, which
// is part of the session's key; a socket to a backend is bound to the client's
// address and port. Answers must leave from the address and port that the client
// spoke to:
//
//	port of the endpoint → the endpoint's socket, the address in a control message
//	another port         → a socket bound to both, shared by all clients of these
//
// The latter are a worker's own, made when a backend first answers and closed
// with the last session or when there are too many; see sock.Answers.

// maxReplies bounds the sockets for other ports, of one endpoint on one worker.
const maxReplies = 1024

// replies are sockets by what they are bound to. Not for two goroutines at once.
type replies struct {
	sockets map[replyKey]*replySocket
	uses    uint64
}

type replyKey struct {
	local [16]byte
	port  uint16
}

type replySocket struct {
	socket
	used uint64
}

// get is the socket for the address and port of k. spare is called before a
// socket is closed to make room.
func (r *replies) get(ep *Endpoint, k *key, spare func()) (*socket, unix.Errno) {
	r.uses++
	rk := replyKey{k.local, k.at}
	if so := r.sockets[rk]; so != nil {
		so.used = r.uses
		return &so.socket, 0
	}
	from := addrPort(k.local, k.at)
	fd, errno := sock.Answers(from)
	if errno != 0 {
		return nil, errno
	}
	sendBuffer(fd)
	if len(r.sockets) >= maxReplies {
		spare()
		r.closeOldest()
	}
	so := &replySocket{socket: socket{ep: ep, fd: fd, v6: !from.Addr().Is4(), local: k.local, port: k.at}, used: r.uses}
	if r.sockets == nil {
		r.sockets = make(map[replyKey]*replySocket)
	}
	r.sockets[rk] = so
	return &so.socket, 0
}

func (r *replies) closeOldest() {
	var oldest *replySocket
	for _, so := range r.sockets {
		if oldest == nil || so.used < oldest.used {
			oldest = so
		}
	}
	delete(r.sockets, replyKey{oldest.local, oldest.port})
	oldest.shut()
}

func (r *replies) close() {
	for _, so := range r.sockets {
		so.shut()
	}
	r.sockets = nil
}

// hit is the address and port that the client of k has sent to, as far as we are told.
func (so *socket) hit(k *key) netip.AddrPort {
	if so.transparent || k.via() != 0 {
		return addrPort(k.local, k.at)
	}
	return addrPort(k.local, so.port)
}

// elsewhere reports whether answers to the client of k cannot leave by the
// socket.
func (so *socket) elsewhere(k *key) bool { return so.transparent && k.at != so.port }

// outlet is the socket by which answers leave to the session's client. With ok
// false there is none to be had now.
func (w *worker) outlet(s *session) (so *socket, ok bool) {
	so = w.sockets[s.ep]
	wire := w.wire(&s.key)
	if !so.elsewhere(wire) {
		return so, true
	}
	r, errno := so.replies.get(so.ep, wire, w.flushDown)
	if errno != 0 {
		return so, false
	}
	return r, true
}

// letterbox is the socket by which one datagram leaves to the client of k, for
// those who are not the worker.
func (ep *Endpoint) letterbox(so *socket, k *key) (*socket, unix.Errno) {
	if !so.elsewhere(k) {
		return so, 0
	}
	so.mu.RLock()
	defer so.mu.RUnlock()
	if so.closed {
		return nil, unix.EBADF
	}
	ep.lettersMu.Lock()
	defer ep.lettersMu.Unlock()
	return ep.letters.get(ep, k, func() {})
}

// claims are the sessions whose socket is bound to the client's address and
// port, by these and by their backend. The kernel would let two share all of
// it, and nobody could tell whose the answers are.
type claims struct {
	mu  sync.Mutex
	set map[claim]struct{}
}

type claim struct{ client, backend netip.AddrPort }

// claimOf is the claim of an established session. bound is false for one whose
// socket has an address of this host.
func (w *worker) claimOf(s *session) (c claim, bound bool) {
	c.client = addrPort(s.client, s.port)
	if !getsockname(int(s.fd), &w.name) {
		return c, false
	}
	if a, port, _ := fromName(&w.name); addrPort(a, port) != c.client {
		return c, false
	}
	if !getpeername(int(s.fd), &w.name) {
		return c, false
	}
	a, port, _ := fromName(&w.name)
	c.backend = addrPort(a, port)
	return c, true
}

// claim reports whether the session may have its socket.
func (w *worker) claim(s *session) bool {
	c, bound := w.claimOf(s)
	if !bound {
		return true
	}
	w.claims.mu.Lock()
	defer w.claims.mu.Unlock()
	if _, taken := w.claims.set[c]; taken {
		return false
	}
	if w.claims.set == nil {
		w.claims.set = make(map[claim]struct{})
	}
	w.claims.set[c] = struct{}{}
	s.flags |= claimed
	return true
}

func (w *worker) unclaim(s *session) {
	c, _ := w.claimOf(s)
	w.claims.mu.Lock()
	defer w.claims.mu.Unlock()
	delete(w.claims.set, c)
}
