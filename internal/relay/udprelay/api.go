// Package udprelay is the UDP engine: sessions of clients toward connected
// upstream sockets, on one event loop a worker.
package udprelay

import (
	"errors"
	"net"
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// Options are the settings of an engine.
type Options struct {
	Workers int // at least 1, at most 127
	Logger  *zap.Logger
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
// must not block and must not keep o or o.Data.
type Acceptor interface {
	Open(o *Opening) Decision
}

// Opening is a session about to be. The engine reuses it.
type Opening struct {
	Worker        int
	Client, Local netip.AddrPort // IPv4-mapped addresses are IPv4 here
	Data          []byte         // the first datagram; valid until Open returns

	Counters *relay.Counters // set by Open: who counts what is dropped
	Reason   relay.Drop      // set by Open for Refuse

	Path *relay.Path // set by Open for Forward
	FD   int         // set by Open for Forward: a connected, non-blocking socket

	// contains the engine's own fields
	w  *worker
	ep *Endpoint
}

// Errors of a Conn.
var (
	ErrPendingFull = errors.New("too many sessions await a decision")
	errClosed      = net.ErrClosed
)

// stubs below are replaced by the implementation

type worker struct{}

// Engine runs the workers.
type Engine struct{}

// New starts an engine.
func New(o Options) (*Engine, error) { return &Engine{}, nil }

// Workers is the number of workers.
func (e *Engine) Workers() int { return 1 }

// Close ends every session with relay.Drain and the workers, and waits.
func (e *Engine) Close() {}

// Listen binds addr, one SO_REUSEPORT socket a worker. The caller has probed it.
func (e *Engine) Listen(addr netip.AddrPort, o sock.Options, a Acceptor) (*Endpoint, error) {
	return nil, errors.ErrUnsupported
}

// Sessions counts the live sessions, held ones included.
func (e *Engine) Sessions() int { return 0 }

// Flows calls yield for each live session until it returns false.
func (e *Engine) Flows(yield func(*relay.Info) bool) {}

// Flow is the session of that ID.
func (e *Engine) Flow(id relay.ID) (relay.Info, bool) { return relay.Info{}, false }

// CloseFlow ends one session.
func (e *Engine) CloseFlow(id relay.ID, why relay.Reason) bool { return false }

// ClosePaths ends the sessions whose path match selects; it returns without waiting.
func (e *Engine) ClosePaths(match func(*relay.Path) bool, why relay.Reason) {}

// Rehome gives the sessions whose path match selects a new backend with their client's next datagram.
func (e *Engine) Rehome(match func(*relay.Path) bool) {}

// Endpoint is one bound address.
type Endpoint struct{}

// Addr is the bound address.
func (ep *Endpoint) Addr() netip.AddrPort { return netip.AddrPort{} }

// SetDraining says whether the endpoint refuses new sessions.
func (ep *Endpoint) SetDraining(bool) {}

// Sessions counts the live sessions of the endpoint.
func (ep *Endpoint) Sessions() int { return 0 }

// Close ends the endpoint's sessions for the given reason and closes its sockets.
func (ep *Endpoint) Close(why relay.Reason) {}

// WriteTo sends a datagram to a client from local, outside any session.
func (ep *Endpoint) WriteTo(p []byte, client, local netip.AddrPort) error { return nil }

// Hold makes the session pending and gives its datagrams to the Conn.
func (o *Opening) Hold(path *relay.Path) (*Conn, error) { return nil, ErrPendingFull }

// Conn is a session whose datagrams go to a goroutine.
type Conn struct{ net.Conn }

// Wait blocks until more than have datagrams are queued.
func (c *Conn) Wait(deadline time.Time, have int) (int, error) { return 0, errClosed }

// Datagrams appends the queued datagrams to buf without taking them.
func (c *Conn) Datagrams(buf [][]byte) [][]byte { return buf }

// Attach turns the pending session into one that a handler serves for long.
func (c *Conn) Attach() {}

// Forward hands the session to its worker.
func (c *Conn) Forward(path *relay.Path, fd int) error { return errClosed }

// Reject ends the pending session, its datagrams counted as dropped under why.
func (c *Conn) Reject(why relay.Drop) {}
