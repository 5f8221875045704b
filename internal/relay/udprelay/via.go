package udprelay

import (
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Sessions whose client a header has named. Their key is made of what it has told,
// and so everybody who asks a session for its client hears of that one. How their
// datagrams travel is in a via, to which the key has the index in place of a scope.

// via is a socket of a proxy and the address of ours that it speaks to.
type via struct {
	wire key                // as that of a client who is no proxy
	id   key                // of V2UDP: the one session that it may have
	kind proxyproto.Version // V2UDP or SPP, for as long as it lives; None: free
	refs uint32             // sessions, the opening in hand, and kept
	slot uint32             // of V2UDP: its session, 0: none; of SPP it says nothing
	last uint32             // tick of the last datagram, of one that is kept
	at   uint32             // position in worker.kept, of one that is there
	kept bool
}

// viaBit in key.scope says that the rest is the index of a via. No interface has
// it in its index.
const viaBit = 1 << 31

func (k *key) via() uint32 {
	if k.scope&viaBit == 0 {
		return 0
	}
	return k.scope &^ viaBit
}

// wire is the key by which datagrams of a session travel.
func (w *worker) wire(k *key) *key {
	if i := k.via(); i != 0 {
		return &w.vias[i].wire
	}
	return k
}

// newVia makes one that nobody holds yet.
func (w *worker) newVia(wire *key, kind proxyproto.Version) uint32 {
	var i uint32
	if n := len(w.freeVias); n > 0 {
		i = w.freeVias[n-1]
		w.freeVias = w.freeVias[:n-1]
	} else {
		i = uint32(len(w.vias))
		w.vias = append(w.vias, via{})
	}
	w.vias[i] = via{wire: *wire, kind: kind}
	w.viaIndex[*wire] = i
	w.sockets[wire.ep].vias++
	return i
}

// holdVia and releaseVia do nothing for 0, which is no via.
func (w *worker) holdVia(i uint32) {
	if i != 0 {
		w.vias[i].refs++
	}
}

func (w *worker) releaseVia(i uint32) {
	if i == 0 {
		return
	}
	v := &w.vias[i]
	if v.refs--; v.refs > 0 {
		return
	}
	delete(w.viaIndex, v.wire)
	w.sockets[v.wire.ep].vias--
	*v = via{}
	w.freeVias = append(w.freeVias, i)
}

// heads reports whether what goes to the client of k has a header in front.
func (w *worker) heads(k *key) bool {
	i := k.via()
	return i != 0 && w.vias[i].kind == proxyproto.SPP
}

// answerHead writes the header in front of what goes to the client of k: the one that
// its own datagrams have.
func (w *worker) answerHead(b *[proxyproto.LenSPP]byte, k *key) []byte {
	form := proxyproto.Form{Version: proxyproto.SPP}
	a := &w.about
	a.Client, a.Local = addrPort(k.client, k.port), addrPort(k.local, k.at)
	return form.Append(b[:0], a)
}

// toClientHeaded is toClient for datagrams that get a header each. Those of a run
// share one, and it stays in its place until the run is sent.
func (w *worker) toClientHeaded(slot uint32, s *session, p []byte, seg int) {
	size := proxyproto.LenSPP + seg
	if proxyproto.LenSPP+min(seg, len(p)) > most {
		w.drop(s.path, relay.ReplySend, datagrams(p, seg))
		return
	}
	gso := w.offload.gso && (s.gso == 0 || size < int(s.gso))
	d := w.down
	for run := w.perMessage(seg, size, gso); ; {
		q := p[:min(run, len(p))]
		if !gso || d.n == 0 || !d.join(slot, w.headsDown[d.n-1][:], q, seg, s.gso) {
			if d.n == maxMsgs || !d.room(datagrams(q, seg), w.headsDown[0][:]) {
				w.sendDown()
			}
			w.addDown(slot, s, w.answerHead(&w.headsDown[d.n], &s.key), q, seg, gso)
		}
		if p = p[len(q):]; len(p) == 0 {
			return
		}
	}
}

// Way is how a datagram gets to a client outside any session.
type Way struct {
	wire key
	head [proxyproto.LenSPP]byte
	n    int // of head that stands in front
}

// Way is the way back to the client.
func (o *Opening) Way() Way { return o.w.way(&o.key) }

func (w *worker) way(k *key) (to Way) {
	to.wire = *w.wire(k)
	if w.heads(k) {
		to.n = len(w.answerHead(&to.head, k))
	}
	return to
}

// WriteTo sends a datagram to a client, from the address that this has hit and outside
// any session. It never waits, and any goroutine and callback may call it.
func (ep *Endpoint) WriteTo(p []byte, to *Way) error {
	switch errno := ep.sockets[0].post(to, p); errno {
	case 0:
		return nil
	case unix.EBADF:
		return net.ErrClosed
	default:
		peer := addrPort(to.wire.client, to.wire.port)
		return &net.OpError{Op: "write", Net: "udp", Addr: net.UDPAddrFromAddrPort(peer), Err: errno}
	}
}

// What is kept of sockets without a session: a server that takes datagrams out of the
// acceptor's hands (Divert) has none, and where the first ones alone have a header, the
// client must be known behind them.
const (
	maxKept = 4096 // on one worker
	keptFor = 90 * time.Second
)

// keep remembers the client of a via, or that it is still there.
func (w *worker) keep(i uint32) {
	v := &w.vias[i]
	v.last = w.now
	if v.kept {
		return
	}
	w.makeRoom()
	v.kept, v.at = true, uint32(len(w.kept))
	v.refs++
	w.kept = append(w.kept, i)
}

// makeRoom looks at a few that are kept, each time at others. It forgets those whose
// time is over, and where there is no room the one that has been quiet for longest.
func (w *worker) makeRoom() {
	const look = 4
	oldest := uint32(0)
	for range min(look, len(w.kept)) {
		w.hand = (w.hand + 1) % len(w.kept)
		i := w.kept[w.hand]
		switch {
		case w.over(i):
			w.forget(i)
			if len(w.kept) == 0 {
				return
			}
		case oldest == 0 || w.vias[i].last < w.vias[oldest].last:
			oldest = i
		}
	}
	if len(w.kept) >= maxKept {
		w.forget(oldest)
	}
}

// over reports whether the time of one that is kept is over.
func (w *worker) over(i uint32) bool { return w.now-w.vias[i].last > ticks(keptFor) }

func (w *worker) forget(i uint32) {
	v := &w.vias[i]
	last := w.kept[len(w.kept)-1]
	w.kept[v.at], w.vias[last].at = last, v.at
	w.kept = w.kept[:len(w.kept)-1]
	v.kept = false
	w.releaseVia(i)
}

// forgetAll is for an endpoint that closes.
func (w *worker) forgetAll(ep uint32) {
	for _, i := range slices.Clone(w.kept) {
		if w.vias[i].wire.ep == ep {
			w.forget(i)
		}
	}
}

// hitBy is the address and port of ours that a header has told or, where that is
// unspecified, the one its datagram was sent to.
func (so *socket) hitBy(told netip.AddrPort, wire *key) netip.AddrPort {
	if told.Addr().IsUnspecified() {
		return so.hit(wire)
	}
	return told
}
