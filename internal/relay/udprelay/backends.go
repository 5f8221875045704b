package udprelay

import (
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The way from backends to clients. The datagrams of a turn, of whatever
// sessions, are collected as long as they leave by the same socket and there
// are buffers. The buffers are in use until flushDown.

// answer takes datagrams from a session's socket. What is left waits until
// the other sessions have had a turn.
func (w *worker) answer(slot uint32, s *session, ev unix.EpollEvent) {
	so, ok := w.outlet(s)
	if so != w.downSo || w.got > replyBufs-8 {
		w.flushDown()
		w.downSo = so
	}
	from := w.got
	room := min(batch, replyBufs-from)
	n, errno := w.rxDown.recv(int(s.fd), from, room)
	if errno == unix.EAGAIN {
		return
	}
	if errno != 0 {
		s.flags |= queued // there may be datagrams behind the error
		w.again = append(w.again, ev)
		w.fault(slot, s, errno)
		return
	}
	w.got += n
	if n == room {
		s.flags |= queued
		w.again = append(w.again, ev)
	}
	s.last = w.now
	for i := from; i < from+n; i++ {
		p, seg, cut := w.rxDown.data(i)
		if cut || !ok {
			w.drop(s.path, relay.ReplySend, datagrams(p, seg))
			continue
		}
		if s.flags&heading != 0 {
			w.unhead(slot, s, p, seg)
			continue
		}
		w.toClient(slot, s, p, seg)
	}
	if s.flags&answered == 0 {
		s.flags |= answered
		w.stopHeading(s)
		path := w.paths[s.path].path
		if owner := w.owner(path); owner != nil {
			owner.Answered(path)
		}
	}
}

// toClient adds datagrams to what goes to clients. seg is their size, or 0 for
// a single one.
func (w *worker) toClient(slot uint32, s *session, p []byte, seg int) {
	if seg == 0 {
		seg = len(p)
	}
	if w.heads(&s.key) {
		w.toClientHeaded(slot, s, p, seg)
		return
	}
	gso := w.offload.gso && (s.gso == 0 || seg < int(s.gso))
	if gso && w.down.join(slot, nil, p, seg, s.gso) {
		return
	}
	for len(p) > seg && !gso {
		w.addDown(slot, s, nil, p[:seg], seg, false)
		p = p[seg:]
	}
	w.addDown(slot, s, nil, p, seg, gso)
}

// addDown starts a message, before which the caller has seen to it that there is
// room, if its datagrams have a head.
func (w *worker) addDown(slot uint32, s *session, head, p []byte, seg int, gso bool) {
	d := w.down
	if !d.add(slot, head, p, seg, gso) {
		w.sendDown()
		d.add(slot, head, p, seg, gso)
	}
	i := d.n - 1
	h := &d.hdrs[i].hdr
	h.Name = (*byte)(unsafe.Pointer(&d.names[i]))
	wire := w.wire(&s.key)
	h.Namelen = w.downSo.address(&d.names[i], wire)
	d.meta[i].info = w.downSo.source(&d.ctls[i], wire)
}

// sendDown sends what has been collected. What the kernel refuses is dropped
// and counted.
func (w *worker) sendDown() {
	d := w.down
	d.seal()
	for i := 0; i < d.n; i++ {
		sent, errno := d.send(w.downSo.fd, i)
		for ; sent > 0; sent-- {
			m := &d.meta[i]
			w.sentDown(w.slab.at(m.slot), m.segs, m.payload())
			i++
		}
		if i == d.n || errno == 0 {
			i--
			continue
		}
		m := &d.meta[i]
		s := w.slab.at(m.slot)
		segs := 0
		if m.segs > 1 && unfit(errno) {
			s.gso = uint16(m.seg)
			var bytes int
			segs, bytes, _ = d.singly(w.downSo.fd, i)
			w.sentDown(s, segs, bytes)
		}
		if segs < m.segs {
			w.drop(s.path, relay.ReplySend, m.segs-segs)
		}
	}
	d.clear()
}

// flushDown sends what has been collected and frees the buffers. Whatever ends
// a session or a socket calls it first.
func (w *worker) flushDown() {
	if w.got == 0 {
		return
	}
	w.sendDown()
	w.rxDown.reset(0, w.got)
	w.got = 0
}

func (w *worker) sentDown(s *session, packets, bytes int) {
	s.packetsS2C += uint64(packets)
	s.bytesS2C += uint64(bytes)
	if w.downSum.path != s.path {
		w.settle()
		w.downSum.path = s.path
	}
	w.downSum.packets += uint64(packets)
	w.downSum.bytes += uint64(bytes)
}
