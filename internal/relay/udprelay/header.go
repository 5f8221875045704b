package udprelay

import (
	"bytes"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The headers that backends get in front of datagrams, as the path's form has
// it. A header is made of the session's addresses each time it is wanted, in
// the worker's one buffer for it, and goes out beside the payload without a
// copy of that. So a session costs no more memory for it, and once no more
// headers are wanted, no more time.

// note is what few sessions have and a session has no room for.
type note struct {
	host  []byte // that the client has named
	trace []byte // that its set-up is in
}

func (w *worker) noteOf(slot uint32, s *session) *note {
	if s.flags&noted == 0 {
		s.flags |= noted
		w.notes[slot] = new(note)
	}
	return w.notes[slot]
}

// noteFor keeps the host and the trace of a session whose backend is to be told.
func (w *worker) noteFor(slot uint32, s *session, host, trace []byte) {
	f := &w.paths[s.path].path.Proxy
	if len(host) > 0 && f.Authority {
		w.noteOf(slot, s).host = bytes.Clone(host)
	}
	if len(trace) > 0 && f.Trace {
		w.noteOf(slot, s).trace = bytes.Clone(trace)
	}
}

// startHeading is for a session that has got its path.
func (w *worker) startHeading(s *session) {
	if w.paths[s.path].path.Proxy.Version.UDP() {
		s.flags |= heading
	}
}

// stopHeading is for one whose backend has answered.
func (w *worker) stopHeading(s *session) {
	if w.paths[s.path].path.Proxy.UntilReply() {
		s.flags &^= heading
	}
}

// head makes the header of a session. It is good until the next one is made.
func (w *worker) head(slot uint32, s *session) []byte {
	f := &w.paths[s.path].path.Proxy
	a := &w.about
	a.Client, a.Local, a.Host = addrPort(s.client, s.port), w.sockets[s.ep].hit(&s.key), nil
	a.Trace = nil
	if s.flags&noted != 0 {
		a.Host, a.Trace = w.notes[slot].host, w.notes[slot].trace
	}
	if f.UniqueID {
		a.ID = relay.MakeID(true, w.id, slot, s.gen).AppendTo(w.idText[:0])
	}
	return f.Append(w.headUp[:0], a)
}

// most is the largest datagram there is.
const most = 65507

// headed adds datagrams, each behind a header, to what goes to the session's
// backend. What is left, unless that was all, needs none.
func (w *worker) headed(slot uint32, s *session, p []byte, seg int) (rest []byte, done bool) {
	path := &w.paths[s.path]
	head := w.head(slot, s)
	if len(head)+min(seg, len(p)) > most {
		w.drop(s.path, relay.UpstreamSend, datagrams(p, seg))
		return nil, true
	}
	if path.path.Proxy.First() {
		s.flags &^= heading
		n := min(seg, len(p))
		w.addUp(slot, head, p[:n], n, false)
		return p[n:], n == len(p)
	}
	wire := len(head) + seg
	gso := w.offload.gso && (path.gso == 0 || wire < int(path.gso))
	for run := w.perMessage(seg, wire, gso); ; {
		n := min(run, len(p))
		if q := p[:n]; !gso || !w.up.join(slot, head, q, seg, path.gso) {
			w.addUp(slot, head, q, seg, gso)
		}
		if p = p[n:]; len(p) == 0 {
			return nil, true
		}
	}
}

// perMessage is how many bytes one message takes of datagrams of seg bytes, which
// have size with their heads.
func (w *worker) perMessage(seg, size int, gso bool) int {
	if gso {
		seg *= max(min(maxSegs, maxBytes/size), 1)
	}
	return max(seg, 1)
}

// unhead takes the headers off what a backend has answered, where it may have
// some.
func (w *worker) unhead(slot uint32, s *session, p []byte, seg int) {
	form := &w.paths[s.path].path.Proxy
	if form.Version != proxyproto.SPP {
		w.toClient(slot, s, p, seg)
		return
	}
	head := w.head(slot, s)
	for {
		n := len(p)
		if seg > 0 {
			n = min(seg, n)
		}
		if d, ok := form.Answer(p[:n], head); ok {
			w.toClient(slot, s, d, 0)
		} else {
			w.drop(s.path, relay.ProxyHeader, 1)
		}
		if p = p[n:]; len(p) == 0 {
			return
		}
	}
}
