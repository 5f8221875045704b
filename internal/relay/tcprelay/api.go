// Package tcprelay is the TCP engine: it accepts, connects to backends and
// pumps bytes between the two sockets, on one event loop a worker.
package tcprelay

import (
	"errors"
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

// Decision is what an Acceptor wants done with a new connection.
type Decision uint8

// The decisions.
const (
	Refuse  Decision = iota // close it
	Forward                 // connect it to what Opening.Dialer names
	Take                    // the acceptor owns Opening.FD from here on
)

// Acceptor decides about the connections of an endpoint. Accept is called by
// every worker, concurrently; it must not block and must not keep o.
type Acceptor interface {
	Accept(o *Opening) Decision
	// AcceptFailed hears that accept(2) failed and for how long the worker
	// pauses before it tries again.
	AcceptFailed(err error, pause time.Duration)
}

// Opening is a connection just accepted. The engine reuses it.
type Opening struct {
	Worker        int
	FD            int            // non-blocking, close on exec
	Client, Local netip.AddrPort // IPv4-mapped addresses are IPv4 here
	Dialer        Dialer         // set by Accept for Forward
}

// Dialer names the backends to try for a connection, one after the other, for
// as long as nothing has been sent. The engine calls it from its workers and
// from Engine.Forward; it must not block.
type Dialer interface {
	// Next reserves a place at a backend for the attempt-th try (from 0).
	// tried are the paths that have failed. With ok false there is no backend left.
	Next(client, local netip.AddrPort, attempt int, tried []*relay.Path) (t Target, ok bool)

	// GaveUp hears, instead of any Closed, that no backend could be reached and
	// the client's connection is closed.
	GaveUp(client netip.AddrPort, why relay.Reason)
}

// Target is a backend and how to connect to it.
type Target struct {
	Path           *relay.Path
	Source         netip.Addr    // address to connect from; unset: the kernel's choice
	ConnectTimeout time.Duration // above 0
	KeepAlive      time.Duration // interval of TCP keepalive probes on both sides; 0: off
	NoDelay        bool          // TCP_NODELAY on both sides
}

// Flow is a client connection to hand to the engine.
type Flow struct {
	FD            int // non-blocking; the engine owns it
	Client, Local netip.AddrPort
	Prefix        []byte // sent to the backend before anything read from FD; the engine copies nothing, the caller lets it go
	Dialer        Dialer
	Done          func() // called once, from a worker, after the connection has ended; may be nil
}

// Engine runs the workers.
type Engine struct{}

// New starts an engine.
func New(o Options) (*Engine, error) { return &Engine{}, nil }

// Workers is the number of workers.
func (e *Engine) Workers() int { return 1 }

// Close ends every connection with relay.Drain and the workers, and waits.
func (e *Engine) Close() {}

// Listen binds addr, one SO_REUSEPORT socket a worker. The caller has probed it.
func (e *Engine) Listen(addr netip.AddrPort, o sock.Options, a Acceptor) (*Endpoint, error) {
	return nil, errors.ErrUnsupported
}

// Forward hands a connection to a worker.
func (e *Engine) Forward(f Flow) error { return errors.ErrUnsupported }

// Conns counts the live connections, connecting ones included.
func (e *Engine) Conns() int { return 0 }

// Flows calls yield for each live connection until it returns false.
func (e *Engine) Flows(yield func(*relay.Info) bool) {}

// Flow is the connection of that ID.
func (e *Engine) Flow(id relay.ID) (relay.Info, bool) { return relay.Info{}, false }

// CloseFlow ends one connection.
func (e *Engine) CloseFlow(id relay.ID, why relay.Reason) bool { return false }

// ClosePaths ends the connections whose path match selects; it returns without waiting.
func (e *Engine) ClosePaths(match func(*relay.Path) bool, why relay.Reason) {}

// Endpoint is one bound address.
type Endpoint struct{}

// Addr is the bound address.
func (ep *Endpoint) Addr() netip.AddrPort { return netip.AddrPort{} }

// Close accepts what is queued, then closes the listening sockets. Connections live on.
func (ep *Endpoint) Close() {}
