package listener

import (
	"net/netip"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// A view is what one config wants done with new flows. It does not change
// after attach; endpoints reach it through one atomic pointer.
//
//	worker:  Accept, Open → admit → route by addresses → native handler → engine
//	                                    ↓ bytes wanted      ↑      ↓ foreign
//	                            TCP: look at bytes → routes ┘      ↓
//	                                    ↓ may block                ↓
//	goroutine:             look at bytes → routes →            handlers
//
// A connection is served by the worker alone unless a handler is foreign, or
// what decides its route may block; so is a UDP session whose route needs no
// bytes.
type view struct {
	name      string
	logger    *zap.Logger
	stats     *flow.Listener
	limits    *Limits
	filters   *filter.Chain
	peek      budget
	routes    []*Route
	plan      sniff.Plan // the sniffers that routes ask, in order
	mayReject bool       // one of them may want a flow dropped
	hint      Decider    // asked before the routes; nil: nobody
	grace     time.Duration
	shield    Shield  // told of new flows; nil: nobody
	guests    *guests // of servers on the network; nil: nothing leads there

	firstPacketGate bool
	recognisers     []Recogniser

	proxied *AcceptProxy       // nil: no PROXY header is believed
	headers *udprelay.HeaderIn // the same for the UDP engine

	prefix      netip.Prefix // of the addresses that are served; not valid: all
	transparent bool

	engines *Engines
	cs      []relay.Counters  // by worker
	places  []*Place          // by route
	hinted  *Place            // of flows that a hint has sent on
	dialers []tcprelay.Dialer // by route, nil where the handler is not native
	fronts  []*relay.Path     // by route, of guests; nil where none leads to a name
	held    *relay.Path       // of UDP sessions that no engine forwards
	looking *relay.Path       // of TCP connections whose route is being decided on a worker
	heading *relay.Path       // …and of those whose PROXY header is waited for

	refusing atomic.Bool // the process is ending
}

func newView(l *Listener, grace time.Duration) *view {
	return &view{
		name: l.name, logger: l.logger, stats: l.stats, limits: l.limits, filters: l.filters, peek: l.peek, routes: l.Routes, hint: l.hint, grace: grace,
		proxied: l.AcceptProxy, prefix: l.prefix, transparent: l.Transparent, firstPacketGate: l.FirstPacketGate, recognisers: l.recognisers(),
	}
}

// attach makes what depends on the engines.
func (v *view) attach(e *Engines) {
	v.engines = e
	v.cs = v.stats.Workers(max(e.TCP.Workers(), e.UDP.Workers()))
	v.held = &relay.Path{Listener: v.name, Route: -1, Idle: heldIdle, Counters: v.cs, Owner: heldOwner{v.stats}}
	v.looking = &relay.Path{Listener: v.name, Route: -1, Counters: v.cs, Owner: lookOwner{v.stats}}
	if len(v.routes) == 0 {
		v.guests = guestsOf(v.stats)
	}
	v.heading = &relay.Path{Listener: v.name, Route: -1, Counters: v.cs, Owner: headOwner{lookOwner{v.stats}}}
	v.headers = v.headersIn()
	v.hinted = v.place(-1)
	v.places = make([]*Place, len(v.routes))
	v.dialers = make([]tcprelay.Dialer, len(v.routes))
	for i, r := range v.routes {
		v.places[i] = v.place(i)
		if r.front.name != "" {
			if v.guests == nil {
				v.guests, v.fronts = guestsOf(v.stats), make([]*relay.Path, len(v.routes))
			}
			v.fronts[i] = &relay.Path{Listener: v.name, Route: i, Idle: heldIdle, Counters: v.cs, Owner: v.held.Owner}
		}
		if r.native != nil {
			v.dialers[i] = r.native.TCPDialer(v.places[i])
		}
	}
}

func (v *view) place(route int) *Place {
	return &Place{Listener: v.name, Route: route, Stats: v.stats, Counters: v.cs, Transparent: v.transparent}
}

// straight is the route that a flow takes without a look at its bytes. known is
// false when the first route that may match wants some, or has a handler that
// needs a goroutine.
func (v *view) straight(client, local netip.AddrPort) (route int, known bool) {
	if v.hint != nil || v.mayReject {
		return 0, false
	}
	for i, r := range v.routes {
		if !r.byAddr {
			return i, false
		}
		if r.matchAddr(client, local) {
			return i, r.native != nil
		}
	}
	return noRoute, len(v.routes) > 0
}

const noRoute = -1

// heldIdle ends a UDP session of a foreign handler that has gone quiet.
const heldIdle = 90 * time.Second

// heldOwner counts out the sessions of foreign handlers.
type heldOwner struct{ stats *flow.Listener }

func (heldOwner) ConnectFailed(*relay.Path, relay.Failure, syscall.Errno) {}
func (heldOwner) Answered(*relay.Path)                                    {}
func (heldOwner) Failed(*relay.Path, relay.Failure, syscall.Errno)        {}

func (o heldOwner) Closed(p *relay.Path, s *relay.Info, why relay.Reason) {
	if p.Pool == "" {
		s.Phase = relay.Handled
	}
	o.stats.Closed(s, why)
}

// Accept implements tcprelay.Acceptor.
func (ep *endpoint) Accept(o *tcprelay.Opening) tcprelay.Decision {
	v := ep.view.Load()
	if v == nil {
		go ep.early(o.FD, o.Client, o.Local)
		return tcprelay.Take
	}
	o.Counters = v.counters(o.Worker)
	if v.outside(o.Local) {
		v.stats.OutsidePrefix.Inc()
		return tcprelay.Refuse
	}
	if v.proxied != nil {
		if d, ordinary := v.awaitHeader(o); !ordinary {
			return d
		}
	}
	rule, later := v.admit(o.Client, o.Local, false, nil, false)
	if rule != "" {
		return tcprelay.Refuse
	}
	d := tcprelay.Refuse
	defer func() { // after a panic of a matcher too
		if d == tcprelay.Refuse {
			v.stats.Abandoned(false, o.Client.Addr())
		}
	}()
	if later != "" {
		go v.gateTCP(o.FD, o.Client, o.Local)
		d = tcprelay.Take
	} else {
		var known bool
		if d, known = v.direct(o); !known {
			d = v.look(o)
		}
	}
	return d
}

// direct decides about a connection whose route is known by its addresses alone.
func (v *view) direct(o *tcprelay.Opening) (d tcprelay.Decision, known bool) {
	i, known := v.straight(o.Client, o.Local)
	switch {
	case !known:
	case i == noRoute:
		v.stats.NoRoute.Inc()
		v.tell(relay.NoRoute.String(), o.Client, o.Local, false)
	case v.routes[i].rejects:
		v.stats.Turned.Inc()
		v.tell(relay.Reject.String(), o.Client, o.Local, false)
	default:
		v.stats.Accepted.Inc()
		o.Dialer = v.dialers[i]
		v.traceDirect(o)
		return tcprelay.Forward, true
	}
	return tcprelay.Refuse, known
}

// early has a connection asked about again that came before the config that has
// bound the address has started to serve.
func (ep *endpoint) early(fd int, client, local netip.AddrPort) {
	<-ep.ready
	if ep.view.Load() == nil {
		unix.Close(fd)
		return
	}
	ep.tcp.Again(fd, client, local)
}

// AcceptFailed implements tcprelay.Acceptor.
func (ep *endpoint) AcceptFailed(err error, pause time.Duration) {
	v := ep.view.Load()
	if v == nil {
		return
	}
	v.stats.AcceptErrors.Inc()
	if held, ok := acceptLog.allow(); ok {
		v.logger.Warn("accept failed", zap.Stringer("local", ep.key.Bind), zap.Error(err), zap.Duration("retry_in", pause), zap.Int64("suppressed", held))
	}
}

// acceptLog and panicLog let one line a second through for the whole process:
// all listeners fail together, and a client can have a flow panic as often as it
// likes.
var acceptLog, panicLog everySecond

type everySecond struct {
	next atomic.Int64 // nanoseconds after started
	held atomic.Int64
}

var started = time.Now()

func (e *everySecond) allow() (held int64, ok bool) {
	now := int64(time.Since(started))
	next := e.next.Load()
	if now < next || !e.next.CompareAndSwap(next, now+int64(time.Second)) {
		e.held.Add(1)
		return 0, false
	}
	return e.held.Swap(0), true
}

// Open implements udprelay.Acceptor.
func (ep *endpoint) Open(o *udprelay.Opening) udprelay.Decision {
	v := ep.view.Load()
	if v == nil {
		v = bound.heir(ep)
	}
	if v == nil {
		ep.mu.Lock()
		last := ep.last
		ep.mu.Unlock()
		if last != nil {
			o.Counters = last.counters(o.Worker)
		}
		o.Reason = relay.Draining
		return udprelay.Refuse
	}
	o.Counters = v.counters(o.Worker)
	if v.outside(o.Hit) {
		o.Reason = relay.OutsidePrefix
		return udprelay.Refuse
	}
	if len(v.routes) == 0 {
		return v.divert(ep, o)
	}
	if o.From != nil {
		return v.rehome(o)
	}
	if v.guests != nil {
		if d, known := v.visit(ep, o); known {
			return d
		}
	}
	rule, later := v.admit(o.Client, o.Local, true, o.Data, false)
	if rule != "" {
		o.Reason = dropOf(rule)
		return udprelay.Refuse
	}
	if v.fronts != nil {
		v.ask(ep, o)
	}
	d := udprelay.Refuse
	defer func() { // after a panic of a matcher or a balancer too
		if d == udprelay.Refuse {
			v.stats.Abandoned(true, o.Client.Addr())
		} else {
			v.begins(o.Client)
			v.heard(o)
		}
	}()
	i, known := v.straight(o.Client, o.Local)
	known = known && later == ""
	switch {
	case known && i == noRoute:
		d = v.drop(o, relay.NoRoute)
	case known && v.routes[i].rejects:
		d = v.drop(o, relay.Reject)
	case known:
		if d = v.forwardUDP(o, i); d == udprelay.Refuse {
			v.tell(o.Reason.String(), o.Client, o.Local, true)
		}
	default:
		c, err := o.Hold(v.held)
		if err != nil {
			d = v.drop(o, relay.PendingFull)
			break
		}
		if later != "" {
			go v.gateUDP(c, o.Client, o.Local, o.Worker, later)
		} else {
			go v.serveUDP(c, o.Client, o.Local, o.Worker)
		}
		d = udprelay.Hold
	}
	return d
}

// Rehomer is the owner of paths whose sessions may move to another backend
// when theirs is gone.
type Rehomer interface {
	// Rehome sets the opening's new path and socket, as Forwarder.ForwardUDP
	// does; From is the path that the session leaves. It has counted the session
	// in when it answers Forward, for the old one is about to be counted out.
	Rehome(o *udprelay.Opening) udprelay.Decision
}

// rehome moves a session within its pool. Routes are for first datagrams, and
// limits for new sessions: neither is asked.
func (v *view) rehome(o *udprelay.Opening) udprelay.Decision {
	r, ok := o.From.Owner.(Rehomer)
	if !ok {
		o.Reason = relay.NoBackend
		return udprelay.Refuse
	}
	return r.Rehome(o)
}

func (v *view) counters(worker int) *relay.Counters { return &v.cs[worker] }
