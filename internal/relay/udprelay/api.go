// Package udprelay is the UDP engine: sessions of clients toward connected
// upstream sockets, on one event loop a worker.
//
// An Endpoint is one bound address with one SO_REUSEPORT socket for each
// worker. The kernel spreads clients over the sockets, so that a client stays
// with one worker and workers share nothing. A datagram of a client without a
// session goes to the endpoint's Acceptor, which names a backend at once or
// holds the session for a goroutine of its own (Conn) that decides later.
// From then on the worker forwards both directions alone.
package udprelay

import (
	"errors"
	"net/netip"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Options are the settings of an engine.
type Options struct {
	Workers int         // at least 1, at most 127
	Logger  *zap.Logger // nil: no log
}

// Decision is what an Acceptor wants done with a new session.
type Decision uint8

// The decisions.
const (
	Refuse  Decision = iota // drop the datagram, counted under Opening.Reason; nothing is kept
	Forward                 // a session on Opening.FD, which the engine owns from here on
	Hold                    // Opening.Hold was called: the Conn's holder decides later
	Divert                  // the acceptor has dealt with the datagram; no session, nothing counted as dropped
)

// Acceptor decides about the sessions of an endpoint. Open is called by every
// worker, concurrently, for a datagram of a client that has no session. It
// must not block and must not keep o or o.Data. It may call Opening.Way,
// Endpoint.WriteTo and Opening.Hold, and nothing else of the engine that waits
// for a worker. A panic in it costs the datagram; a descriptor that is in o.FD
// by then is closed.
type Acceptor interface {
	Open(o *Opening) Decision
}

// Opening is a session about to be. The engine reuses it.
type Opening struct {
	Worker        int
	Client, Local netip.AddrPort // IPv4-mapped addresses are IPv4 here; no zones
	Data          []byte         // the first datagram; valid until Open returns

	// Peer has sent the datagram, to Hit, an address of ours. They are Client and
	// Local unless a header has named others; see HeaderIn.
	Peer, Hit netip.AddrPort

	// From is the path of the client's session when its backend is gone
	// (Engine.Rehome), nil for a client without one. The old session ends, and its owner is told, only when
	// Open has answered Forward or calls Hold; with any other decision it stays
	// as it is and the client's next datagram asks again.
	From *relay.Path

	Counters *relay.Counters // set by Open: who counts what is dropped; nil: nobody
	Reason   relay.Drop      // set by Open for Refuse

	Path *relay.Path // set by Open for Forward
	FD   int         // set by Open for Forward: a connected, non-blocking socket

	// Host may be set by Open for Forward: the host that the client has named, for
	// the header that Path.Proxy wants. The engine copies it.
	Host []byte

	// Trace is the same for the trace that the session's set-up is in.
	Trace []byte

	w    *worker
	sock *socket
	key  key
	hash uint64
	old  uint32 // the slot of the session to rehome, or 0
	via  uint32 // of the key, kept until the acceptor has answered
	mark uint16 // flags of the session to be
	conn *Conn  // what Hold has made
}

// Errors of a Conn.
var (
	ErrPendingFull = errors.New("too many sessions await a decision")
)
