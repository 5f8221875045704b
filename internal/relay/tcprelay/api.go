// Package tcprelay is the TCP engine: it accepts, connects to backends and
// pumps bytes between the two sockets, on one event loop a worker.
package tcprelay

import (
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Options are the settings of an engine.
type Options struct {
	Workers int // at least 1, at most 127
	Logger  *zap.Logger

	noSplice bool // tests: copy whatever the size
}

// Decision is what an Acceptor wants done with a new connection.
type Decision uint8

// The decisions.
const (
	Refuse  Decision = iota // close it
	Forward                 // connect it to what Opening.Dialer names
	Take                    // the acceptor owns Opening.FD from here on
	Peek                    // ask Opening.Looker when the client has sent something
)

// Acceptor decides about the connections of an endpoint. Accept is called by
// every worker, concurrently; it must not block and must not keep o.
type Acceptor interface {
	Accept(o *Opening) Decision
	// AcceptFailed hears that accept(2) failed and for how long the worker
	// pauses before it tries again.
	AcceptFailed(err error, pause time.Duration)
}

// Looker decides about a connection by its first bytes, which stay in the
// socket. The worker that has accepted the connection calls it, for one
// connection after the other; it must not block and must keep neither o nor the
// bytes.
type Looker interface {
	// Look is called each time that more has come. seen is all there is, up to
	// o.Limit; final says that nothing more will come: the client has ended its
	// side, or o.Wait has passed. It answers as Accept does, and may change o's
	// addresses, Path, Limit and Wait. After Peek with another Path it is called
	// again at once. After final it may not answer Peek, unless with that, with
	// Discard or with a longer Wait.
	Look(o *Opening, seen []byte, final bool) Decision

	// Taken follows the answer Take: the engine has let go of o.FD.
	Taken(o *Opening)
}

// Opening is a connection just accepted, or looked at. The engine reuses it.
type Opening struct {
	Worker        int
	FD            int            // non-blocking, close on exec
	Client, Local netip.AddrPort // IPv4-mapped addresses are IPv4 here
	Dialer        Dialer         // set for Forward

	Counters *relay.Counters // set by Accept: who counts a panic of it and of Dialer; nil: nobody

	// Set by Accept for Peek, and as they are in the calls of Look.
	Looker Looker
	Path   *relay.Path   // what operators see of it meanwhile; its Owner hears Closed when it ends without the Looker
	Limit  int           // the most bytes to look at, from 1 to 65,536
	Wait   time.Duration // how old it may get before the Looker has to decide

	// Set by Look: that many of the bytes seen are taken out of the socket before
	// the answer counts. Discarded bytes are nobody's. After Peek with Discard,
	// Look is called again at once with what is left.
	Discard int

	Age time.Duration // since it was accepted
}

// Dialer names the backends to try for a connection, one after the other, for
// as long as nothing has been sent. The engine calls it from its workers and
// from Engine.Forward; it must not block.
type Dialer interface {
	// Next reserves a place at a backend for the attempt-th try (from 0).
	// tried are the paths that have failed. With ok false there is no backend left.
	Next(client, local netip.AddrPort, attempt int, tried []*relay.Path) (t Target, ok bool)

	// GaveUp hears, instead of any Closed, that no backend could be reached and
	// the client's connection is closed. last is only valid during the call; its
	// Path is that of the last backend that was tried, nil without one. When the
	// client, an operator or the engine's end cuts a connect short, the owner of its
	// path has heard ConnectFailed with relay.Shortage and ECANCELED before, so that
	// the place Next has reserved is always given back by the same call.
	GaveUp(last *relay.Info, why relay.Reason)
}

// Target is a backend and how to connect to it.
type Target struct {
	Path           *relay.Path
	To             netip.AddrPort // where to connect; unset: Path.Backend
	Source         netip.Addr     // address to connect from; unset: the kernel's choice. Not of a path that is Transparent, where it can be
	ConnectTimeout time.Duration  // above 0
	KeepAlive      time.Duration  // interval of TCP keepalive probes on both sides; 0: off
	NoDelay        bool           // TCP_NODELAY on both sides
	Connected      func()         // called by the worker when the backend is reached; nil: nobody
	Header         Header         // what is sent to the backend before anything else; nil: nothing
}

// Header writes what goes to a backend before the bytes of a client, such as a
// PROXY header. It is not counted.
type Header interface {
	// AppendHeader is called by the workers when a backend is connected, and must
	// not block. It appends at most 65,535 bytes.
	AppendHeader(b []byte, id relay.ID, client, local netip.AddrPort) []byte
}

// Flow is a client connection to hand to the engine.
type Flow struct {
	FD            int // non-blocking; the engine owns it
	Client, Local netip.AddrPort
	Prefix        []byte // sent to the backend before anything read from FD; counted as the client's; the engine copies nothing, the caller lets it go
	Dialer        Dialer
	Counters      *relay.Counters // as Opening.Counters
	Age           time.Duration   // since it was accepted
	Done          func()          // called once, from a worker, after the connection has ended; may be nil
}
