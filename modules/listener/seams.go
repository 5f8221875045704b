package listener

import (
	"net/netip"

	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// What handlers and matchers may be besides what caddy-l4 knows, so that their
// flows need not leave the engines.

// Forwarder is a handler that takes flows straight from the engines, without a
// layer4.Connection. ForwardUDP and the dialer are called from the engines'
// workers, many at a time, and must not block. The listener has counted the
// flow in. Of one that is forwarded the path's Owner calls Place.Stats.Closed
// at its end, and the dialer's GaveUp calls Place.Stats.Abandoned; of one that
// ForwardUDP refuses the listener gives the count back.
type Forwarder interface {
	layer4.NextHandler

	// ForwardUDP decides about a new session: it sets the opening's path and
	// socket, or the reason to drop the datagram.
	ForwardUDP(o *udprelay.Opening, at *Place) udprelay.Decision

	// TCPDialer is the dialer for all connections of a place. It is called once
	// for each.
	TCPDialer(at *Place) tcprelay.Dialer
}

// TraceDialer is a dialer that wants to know the trace that a flow's set-up is in,
// where that is traced.
type TraceDialer interface {
	tcprelay.Dialer

	// InTrace is the dialer for one connection; trace is W3C's traceparent.
	InTrace(trace []byte) tcprelay.Dialer
}

// Rejecter is a Forwarder that takes no flow. The listener closes a connection
// of its route, and counts both that and the datagrams as rejected by a route.
type Rejecter interface {
	Forwarder
	Rejects()
}

// AddrMatcher is a matcher that needs no bytes. Routes of such matchers alone
// are decided on the worker that accepted the flow.
type AddrMatcher interface {
	layer4.ConnMatcher

	// MatchAddr reports whether a flow between the two addresses matches. It is
	// called from the engines' workers, many at a time, and must not block.
	// IPv4-mapped addresses are IPv4.
	MatchAddr(client, local netip.AddrPort) bool
}

// FlowMatcher is a matcher of first bytes that needs no layer4.Connection to
// look at them, so that a worker can ask it at no cost.
type FlowMatcher interface {
	layer4.ConnMatcher

	// MatchFlow is Match for what a listener has of a flow: what there is to see
	// and the two addresses, of which IPv4-mapped ones are IPv4. Like Match it
	// returns layer4.ErrConsumedAllPrefetchedBytes while more bytes may decide. It
	// is called from the engines' workers, many at a time, and must not block.
	MatchFlow(f *sniff.Flow, client, local netip.AddrPort) (bool, error)
}

// AddrDecider is a Decider that knows at once, by the addresses.
type AddrDecider interface {
	Decider

	// DecideAddr is called instead of Decide, from the engines' workers too, and
	// must not block. Without a Forwarder the flow goes on to the next route.
	DecideAddr(client, local netip.AddrPort, listener string) Forwarder
}

// Decider is a handler that names a Forwarder for each flow, such as one that
// asks somebody. As the only handler of a route its flows stay where they are
// meanwhile: the bytes of a connection in its socket, the datagrams of a
// session within the limits of pending ones.
type Decider interface {
	layer4.NextHandler

	// Decide is called in the flow's goroutine, many at a time, and may block for
	// as long as the flow may wait. cx has the first bytes seen so far; they must
	// not be read. Without a Forwarder the flow goes on to the next route; with
	// an error it ends, counted as no_route. With
	// layer4.ErrConsumedAllPrefetchedBytes it is called again when there are more
	// bytes, but not after final: then none will be waited for.
	Decide(cx *layer4.Connection, c Conn, final bool) (Forwarder, error)
}

// Place is where in the config a flow is handled.
type Place struct {
	Listener string
	Route    int
	Stats    *flow.Listener
	Counters []relay.Counters // one for each worker

	Transparent bool // sockets to backends have the client's address and port
}
