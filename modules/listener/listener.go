// Package listener has the named listeners of the data plane: their sockets,
// which outlive a config, the evaluation of their routes in strict order, and
// the network wayhouse/NAME by which other Caddy servers take connections from
// a listener that has no routes of its own.
package listener

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/overload"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// Listener is a named set of addresses and what is done with the connections
// and UDP sessions that arrive there.
type Listener struct {
	// The addresses to listen on, each tcp/ADDRESS:PORT, udp/ADDRESS:PORT or a
	// range of up to 1,024 ports as in udp/0.0.0.0:30000-30099, which opens a
	// socket for every port. Without an address (udp/:7777) or with [::] it is
	// every address of both families; where 0.0.0.0 is bound on the port as
	// well, [::] is IPv6 alone. Placeholders are replaced at load. Refused: an
	// address that another listener binds, a range that runs backwards.
	// At least one is needed.
	Bind []string `json:"bind,omitempty"`

	// Who gets in: filters, asked in this order before anything is kept of a new
	// connection or session. The first that refuses it is the last that is asked.
	// Default: none, everybody gets in.
	FiltersRaw []json.RawMessage `json:"filters,omitempty" caddy:"namespace=wayhouse.filters inline_key=filter"`

	// The network that is routed to this host and whose addresses are served, as
	// in 2001:db8:ace:1::/64. What arrives for others is dropped and counted. Every
	// address to listen on must be the wildcard of its family, one port each for
	// TCP and UDP. Placeholders are replaced at load. Default: none, whatever arrives.
	Prefix string `json:"prefix,omitempty"`

	// Bind addresses that this host does not have, or does not have yet. Refused
	// beside prefix. Default: false.
	FreeBind bool `json:"freebind,omitempty"`

	// Serve what TPROXY rules redirect here, for any address and port, and bind
	// the sockets to backends to the client's address and port. Needs
	// CAP_NET_ADMIN or CAP_NET_RAW. Refused beside prefix. Default: false.
	Transparent bool `json:"transparent,omitempty"`

	// Believe the PROXY headers of load balancers in front of this listener:
	// filters, limits, routes, logs and backends then see the client that a header
	// names. Default: none is believed, a header is payload.
	AcceptProxy *AcceptProxy `json:"accept_proxy,omitempty"`

	// How long and how far first bytes are looked at for routes that ask.
	Peek Peek `json:"peek,omitzero"`

	// What to do with a connection or session: the first route whose matchers
	// match gets it. Routes are tried in this order without exception: one that
	// still needs bytes holds back those after it. Matchers and handlers are
	// those of caddy-l4 and of Wayhouse. A listener without routes serves the
	// network wayhouse/NAME.
	Routes []*Route `json:"routes,omitempty"`

	// Ask for a route hint before the routes: a client for whom one was pushed
	// by POST /route-hint goes to the pool it names. Default: false.
	RouteHint bool `json:"route_hint,omitempty"`

	// The first-packet gate, for UDP: a session is opened only when its first
	// datagram is recognised, by a sniffer that the routes ask and that does not
	// reject it, by first_bytes or by a ticket. At least one of these is needed.
	// Default: false.
	FirstPacketGate bool `json:"first_packet_gate,omitempty"`

	name    string
	path    string // config path, for errors
	binds   []Bind
	prefix  netip.Prefix // of Prefix
	logger  *zap.Logger
	stats   *flow.Listener
	limits  *Limits
	filters *filter.Chain
	peek    budget
	hint    Decider              // of RouteHint
	met     []layer4.NextHandler // by handlers of the routes, in Provision
	view    *view

	begun    bool                   // by Begin
	declared bool                   // by Declare
	taken    []*endpoint            // by Open
	bound    atomic.Pointer[[]Bind] // where Open has bound them, for whoever asks
}

// Peek bounds how first bytes are looked at.
type Peek struct {
	// How long after it arrived a connection may take to send what its routes
	// need, in all. Zero is refused. Default: 250ms.
	Timeout *caddy.Duration `json:"timeout,omitempty"`

	// How many of its first bytes are looked at, from 1 to 16384.
	// Default: 4096.
	MaxBytes *int `json:"max_bytes,omitempty"`

	// What becomes of a client when the time or the bytes are spent and what it
	// sent may still fit a route: refuse cuts it off, next goes on with the
	// routes after that one. A client that has sent nothing always goes on to
	// the routes that need no bytes. Default: refuse.
	OnUndecided string `json:"on_undecided,omitempty"`
}

// Limits bound the whole process. Zero is no bound.
type Limits struct {
	// The most TCP connections at a time. A connection above it is closed at
	// once and counted. At least 1. Default: no limit.
	MaxConnections *int64 `json:"max_connections,omitempty"`

	// The most UDP sessions at a time. Datagrams of a client that would be one
	// more are dropped and counted. At least 1. Default: no limit.
	MaxUDPSessions *int64 `json:"max_udp_sessions,omitempty"`

	// The most new connections and UDP sessions a second, together; as many
	// may come at once. At least 1. Default: no limit.
	MaxNewSessionsPerSec *int64 `json:"max_new_sessions_per_sec,omitempty"`

	// When the overload level rises and falls by itself. Default: it is only set
	// by operators.
	Overload *overload.Config `json:"overload,omitempty"`
}

// Validate refuses limits that would let nothing through.
func (l *Limits) Validate() error {
	if l.Overload != nil {
		if err := l.Overload.Validate(); err != nil {
			return fmt.Errorf("overload.%w", err)
		}
	}
	for _, f := range []struct {
		key string
		n   *int64
	}{
		{"max_connections", l.MaxConnections},
		{"max_udp_sessions", l.MaxUDPSessions},
		{"max_new_sessions_per_sec", l.MaxNewSessionsPerSec},
	} {
		if f.n != nil && *f.n < 1 {
			return fmt.Errorf("%s: %d would let nothing through: at least 1, or leave it out for no limit", f.key, *f.n)
		}
	}
	return nil
}

// Flows are the most connections and sessions there may be; 0 is no limit.
func (l *Limits) Flows() (connections, sessions int64) { return l.max(false), l.max(true) }

func (l *Limits) max(udp bool) int64 {
	n := l.MaxConnections
	if udp {
		n = l.MaxUDPSessions
	}
	if n == nil {
		return 0
	}
	return *n
}

// The defaults of Peek.
const (
	DefaultPeekTimeout  = 250 * time.Millisecond
	DefaultPeekMaxBytes = 4096
)

// maxPeekBytes is the most that caddy-l4's matchers look at.
const maxPeekBytes = layer4.MaxMatchingBytes

// budget is a Peek with the defaults filled in.
type budget struct {
	Timeout     time.Duration
	MaxBytes    int
	OnUndecided string
}

func (p *Peek) budget() budget {
	b := budget{DefaultPeekTimeout, DefaultPeekMaxBytes, onUndecidedRefuse}
	if p.Timeout != nil {
		b.Timeout = time.Duration(*p.Timeout)
	}
	if p.MaxBytes != nil {
		b.MaxBytes = *p.MaxBytes
	}
	if p.OnUndecided != "" {
		b.OnUndecided = p.OnUndecided
	}
	return b
}

// Provision loads the routes. binds collects the addresses of all listeners.
func (l *Listener) Provision(ctx caddy.Context, name string, binds Binds, limits *Limits, grace time.Duration) error {
	l.name, l.path, l.limits = name, "listeners."+name, limits
	l.logger = ctx.Logger().Named("listener").With(zap.String("listener", name))
	l.stats = flow.ListenerOf(name)
	if err := CheckName(name); err != nil {
		return fmt.Errorf("%s: %w", l.path, err)
	}
	if len(l.Bind) == 0 {
		return fmt.Errorf("%s.bind: no address: give at least one, as in udp/0.0.0.0:7777", l.path)
	}
	repl := caddy.NewReplacer()
	for i, s := range l.Bind {
		path := fmt.Sprintf("%s.bind[%d]", l.path, i)
		parsed, err := ParseBind(repl.ReplaceAll(s, ""))
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if err := binds.Add(parsed, path); err != nil {
			return err
		}
		l.binds = append(l.binds, parsed...)
	}
	var err error
	if l.filters, err = filter.Load(ctx, name, l.FiltersRaw); err != nil {
		return fmt.Errorf("%s.%w", l.path, err)
	}
	if l.Prefix != "" {
		var err error
		if l.prefix, err = cidr.Parse(repl.ReplaceAll(l.Prefix, "")); err != nil {
			return fmt.Errorf("%s.prefix: %w", l.path, err)
		}
	}
	if l.AcceptProxy != nil {
		if err := l.AcceptProxy.provision(name); err != nil {
			return fmt.Errorf("%s.accept_proxy.%w", l.path, err)
		}
	}
	l.peek = l.Peek.budget()
	ctx = ctx.WithValue(listenerKey, l)
	for i, r := range l.Routes {
		if r == nil {
			return fmt.Errorf("%s.routes[%d]: is null", l.path, i)
		}
		if err := r.provision(ctx); err != nil {
			return fmt.Errorf("%s.routes[%d]: %w", l.path, i, err)
		}
	}
	if l.RouteHint {
		mod, err := ctx.LoadModuleByID(hintHandler, nil)
		if err != nil {
			return fmt.Errorf("%s.route_hint: %w", l.path, err)
		}
		l.hint = mod.(Decider)
	}
	l.view = newView(l, grace)
	l.view.plan = l.plan()
	l.view.mayReject = l.view.plan.MayReject()
	if !l.view.plan.Prompt() {
		for _, r := range l.Routes {
			r.prompt = r.prompt && !r.asksSniffers()
		}
	}
	return nil
}

// hintHandler is the module that RouteHint asks.
const hintHandler = "layer4.handlers.route_hint"

// Validate checks what Provision has left.
func (l *Listener) Validate() error {
	if err := l.checkAddresses(); err != nil {
		return fmt.Errorf("%s.%w", l.path, err)
	}
	if l.AcceptProxy != nil {
		if err := l.AcceptProxy.validate(); err != nil {
			return fmt.Errorf("%s.accept_proxy.%w", l.path, err)
		}
	}
	switch {
	case l.peek.Timeout <= 0:
		return fmt.Errorf("%s.peek.timeout: %v is not above zero; leave it out for %v", l.path, l.peek.Timeout, DefaultPeekTimeout)
	case l.peek.MaxBytes < 1 || l.peek.MaxBytes > maxPeekBytes:
		return fmt.Errorf("%s.peek.max_bytes: %d is not from 1 to %d; leave it out for %d", l.path, l.peek.MaxBytes, maxPeekBytes, DefaultPeekMaxBytes)
	case l.peek.OnUndecided != onUndecidedRefuse && l.peek.OnUndecided != onUndecidedNext:
		return fmt.Errorf("%s.peek.on_undecided: %q is neither %s nor %s", l.path, l.peek.OnUndecided, onUndecidedRefuse, onUndecidedNext)
	}
	if l.FirstPacketGate {
		if tcp, _ := l.Networks(); tcp {
			return fmt.Errorf("%s.first_packet_gate: it is for UDP, and the listener binds a TCP address: give TCP a listener of its own", l.path)
		}
		if !l.view.canRecognise() {
			return fmt.Errorf("%s.first_packet_gate: nobody would get in: no route has first_bytes, a sniffer or a ticket to recognise clients by", l.path)
		}
	}
	if len(l.Routes) == 0 {
		if l.RouteHint {
			return fmt.Errorf("%s.route_hint: the listener has no routes for clients without a hint", l.path)
		}
	}
	return nil
}

const (
	onUndecidedRefuse = "refuse"
	onUndecidedNext   = "next"
)

// plan is the sniffers that the routes ask, in order.
func (l *Listener) plan() (p sniff.Plan) {
	for _, r := range l.Routes {
		for _, set := range r.sets {
			for i := range set {
				p.Add(set[i].matcher())
			}
		}
	}
	return p
}

// Handlers are the handlers of the listener's routes and those that it has Met
// inside them, for those who look for one of their own kind.
func (l *Listener) Handlers(yield func(layer4.NextHandler) bool) {
	inside := slices.Clone(l.met)
	for _, r := range l.Routes {
		for _, h := range r.handlers {
			if !yield(h) {
				return
			}
			inside = slices.DeleteFunc(inside, func(m layer4.NextHandler) bool { return m == h })
		}
	}
	for _, h := range inside {
		if !yield(h) {
			return
		}
	}
}

// Networks reports which of tcp and udp the listener binds.
func (l *Listener) Networks() (tcp, udp bool) {
	for _, b := range l.binds {
		tcp = tcp || b.Network == "tcp"
		udp = udp || b.Network == "udp"
	}
	return tcp, udp
}

// Bound is where the listener listens, ports chosen by the kernel included.
// It is empty before Start.
func (l *Listener) Bound() []Bind {
	if p := l.bound.Load(); p != nil {
		return *p
	}
	return nil
}

// Name is the listener's name.
func (l *Listener) Name() string { return l.name }

// Begin starts the filters, which may wait some seconds for what they need.
func (l *Listener) Begin() error {
	if err := l.filters.Start(); err != nil {
		return fmt.Errorf("%s.%w", l.path, err)
	}
	l.begun = true
	return nil
}

// End undoes Begin.
func (l *Listener) End() {
	if l.begun {
		l.begun = false
		l.filters.Stop()
	}
}

// Open binds the addresses, or takes them over from the config before, without
// changing what their flows and clients see: that is Serve's. After an error
// nothing is held.
func (l *Listener) Open(e *Engines, all Binds) error {
	l.view.attach(e)
	for i, b := range l.binds {
		key := endpointKey{Bind: b, Options: l.options()}
		if b.Addr.Port() == 0 {
			key.any = fmt.Sprintf("%s %d", l.name, i)
		}
		ep, err := takeEndpoint(e, key)
		if err != nil {
			l.stats.BindFailures.Inc()
			l.giveBack()
			if l.Transparent && errors.Is(err, unix.EPERM) {
				return fmt.Errorf("%s.transparent: %s: %w", l.path, b, errNoCapability)
			}
			return fmt.Errorf("%s: listening on %s: %w", all[b], b, err)
		}
		l.taken = append(l.taken, ep)
	}
	bound := make([]Bind, 0, len(l.taken))
	for _, ep := range l.taken {
		bound = append(bound, ep.addr())
	}
	l.bound.Store(&bound)
	return nil
}

// Serve lets new flows follow this listener's routes.
func (l *Listener) Serve() {
	for _, ep := range l.taken {
		ep.push(l.view)
	}
}

// Close ends what Open and Serve began. Flows live on.
func (l *Listener) Close() error {
	for _, ep := range l.taken {
		ep.remove(l.view)
	}
	return l.giveBack()
}

func (l *Listener) giveBack() error {
	var errs []error
	for _, ep := range l.taken {
		errs = append(errs, giveEndpoint(ep))
	}
	l.taken = nil
	return errors.Join(errs...)
}

// Refuse makes the listener turn away every new flow; the process is ending.
func (l *Listener) Refuse() { l.view.refusing.Store(true) }

// CheckName keeps names usable in network addresses, paths and metrics.
func CheckName(name string) error {
	for _, r := range name {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '-', r == '_', r == '.':
		default:
			return fmt.Errorf("the name has %q in it: letters, digits, - _ and . are allowed", r)
		}
	}
	if name == "" {
		return errors.New("the name is empty")
	}
	return nil
}
