package listener

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

// The network wayhouse/NAME. A listener without routes offers what arrives to
// the servers that listen on its name; a config's listeners make their names
// known in Provision, servers of other apps listen in Start, and which of the
// two apps starts first does not matter.
//
//	endpoint → view.offer (TCP), view.divert (UDP) → outlet → newest tap → Accept, ReadFrom
//
// Outlets belong to the process. During a reload the server of the new config
// and that of the old have a tap each on the same one, and what arrives is the
// newest tap's: a server that has begun to shut down still accepts for a while,
// and net/http's closes such a connection unanswered. A tap that closes leaves
// what waits in it to the others, so that nothing is lost between them, nor when
// the new config is given up.

// For HTTP/3 Caddy listens on another network, so that a name may have both
// connections and datagrams. A name comes from a listener without routes, or from
// a handler http_front, see front.go.

func init() {
	caddy.RegisterNetwork(networkName, listen)
	caddy.RegisterNetwork(networkUDP, listen)
	caddyhttp.RegisterNetworkHTTP3(networkName, networkUDP)
}

const (
	networkName = "wayhouse"
	networkUDP  = "wayhouse_udp"
)

// outletKey is a name and the port that a server gave with it. The port is no
// port of a socket: it keeps the site on 443 and automatic HTTPS's redirect on
// 80 apart.
type outletKey struct {
	name string
	port uint
	udp  bool
}

var outlets = outletSet{names: map[string]*served{}, open: map[outletKey]*outlet{}}

type outletSet struct {
	now atomic.Pointer[map[outletKey]*outlet] // a copy of open, for datagrams

	mu    sync.Mutex // guards what follows
	names map[string]*served
	open  map[outletKey]*outlet
}

func (s *outletSet) publishLocked() {
	open := maps.Clone(s.open)
	s.now.Store(&open)
}

// Config is what all parts of a config have in common that send flows to names.
type Config interface {
	// ServerListens is called when a server of the config is about to listen on
	// one of its names, in its app's Start: every app has been provisioned.
	ServerListens() error
}

// configOf is the newest config that has a name, nil when none does.
func (s *outletSet) configOf(name string) Config {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.names[name]; d != nil {
		return d.config
	}
	return nil
}

// served is a name that listeners and handlers of live configs send flows to.
type served struct {
	refs int

	// What the newest config says.
	config   Config
	tcp, udp bool
	ports    []uint16 // of UDP
}

// declareLocked adds what a part of a config sends to a name.
func (s *outletSet) declareLocked(name string, config Config, tcp, udp bool, ports []uint16) {
	d := s.names[name]
	if d == nil {
		d = &served{}
		s.names[name] = d
	}
	if d.config != config {
		*d = served{refs: d.refs, config: config}
	}
	d.refs++
	d.tcp, d.udp = d.tcp || tcp, d.udp || udp
	d.ports = append(d.ports, ports...)
}

func (s *outletSet) withdraw(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.names[name]
	if d.refs--; d.refs == 0 {
		delete(s.names, name)
	}
}

// announced is the port that browsers are told to speak HTTP/3 to: the server's
// own where a listener has it, else one that a listener has. It is 0 when there
// is none, for then nobody is told.
func (s *outletSet) announced(key outletKey) uint {
	s.mu.Lock()
	defer s.mu.Unlock()
	d := s.names[key.name]
	switch {
	case d == nil || len(d.ports) == 0:
		return 0
	case slices.Contains(d.ports, uint16(key.port)):
		return key.port
	}
	return uint(slices.Min(d.ports))
}

// outlet is where the connections or datagrams for one key go to a server.
type outlet struct {
	key  outletKey
	taps []*tap              // oldest first, guarded by outlets.mu; never empty
	top  atomic.Pointer[tap] // the last of them
}

// Backlogs of a tap. A datagram that finds its queue full is dropped.
const (
	connBacklog = 128
	gramBacklog = 512
)

// Declare makes the listener's name known to servers, until Withdraw.
func (l *Listener) Declare(config Config) {
	if len(l.Routes) > 0 {
		return
	}
	tcp, udp := l.Networks()
	outlets.mu.Lock()
	defer outlets.mu.Unlock()
	outlets.declareLocked(l.name, config, tcp, udp, l.udpPorts())
	l.declared = true
}

// Withdraw undoes Declare.
func (l *Listener) Withdraw() {
	if l.declared {
		l.declared = false
		outlets.withdraw(l.name)
	}
}

func (l *Listener) udpPorts() (ports []uint16) {
	for _, b := range l.binds {
		if b.Network == "udp" {
			ports = append(ports, b.Addr.Port())
		}
	}
	return ports
}

// listen implements caddy.ListenerFunc.
func listen(_ context.Context, network, host, port string, offset uint, _ net.ListenConfig) (any, error) {
	first, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("%s/%s: %q is not one port", networkName, host, port)
	}
	if c := outlets.configOf(host); c != nil {
		if err := c.ServerListens(); err != nil {
			return nil, fmt.Errorf("%s/%s: %w", networkName, host, err)
		}
	}
	outlets.mu.Lock()
	defer outlets.mu.Unlock()
	s := outlets.names[host]
	if s == nil {
		return nil, fmt.Errorf("%s/%s: the wayhouse app has no listener %q without routes to listen on, and no route with http_front %s", networkName, host, host, host)
	}
	key := outletKey{host, uint(first) + offset, network == networkUDP || s.udp && !s.tcp}
	t := &tap{closed: make(chan struct{})}
	var server any = &acceptor{t}
	if key.udp {
		server = &packetConn{tap: t}
		t.grams = make(chan datagram, gramBacklog)
	} else {
		t.conns = make(chan net.Conn, connBacklog)
	}
	if t.o = outlets.open[key]; t.o == nil {
		t.o = &outlet{key: key}
		outlets.open[key] = t.o
	}
	t.o.setLocked(append(slices.Clip(t.o.taps), t))
	outlets.publishLocked()
	return server, nil
}

func (o *outlet) setLocked(taps []*tap) {
	o.taps = taps
	o.top.Store(taps[len(taps)-1])
}

// pick is the outlet for what arrived on a port: the one a server opened with
// just that port, else the one without a port, else the only one, else that of
// HTTPS.
func (s *outletSet) pick(name string, port uint16, udp bool) *outlet {
	if open := s.now.Load(); open != nil {
		return pick(*open, name, port, udp)
	}
	return nil
}

func pick(open map[outletKey]*outlet, name string, port uint16, udp bool) *outlet {
	for _, p := range []uint{uint(port), 0} {
		if o := open[outletKey{name, p, udp}]; o != nil {
			return o
		}
	}
	var only *outlet
	n := 0
	for key, o := range open {
		if key.name == name && key.udp == udp {
			only = o
			n++
		}
	}
	if n == 1 {
		return only
	}
	return open[outletKey{name, 443, udp}]
}

// give puts a connection into the outlet for a port and reports whether it had
// room. The lock is held over both: between them the last server might leave,
// and nobody would ever come for the connection.
func (s *outletSet) give(name string, port uint16, c net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := pick(s.open, name, port, false)
	return o != nil && o.giveLocked(c)
}

func (o *outlet) giveLocked(c net.Conn) bool {
	select {
	case o.top.Load().conns <- c:
		return true
	default:
		return false
	}
}

// release takes a tap off its outlet. What waits in it goes to the newest of
// the others; without one nobody would ever come for it.
func (s *outletSet) release(t *tap) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := t.o
	if len(o.taps) == 1 {
		delete(s.open, o.key)
		s.publishLocked()
	} else {
		o.setLocked(slices.DeleteFunc(slices.Clone(o.taps), func(other *tap) bool { return other == t }))
	}
	t.drainLocked()
}

// drain empties a tap that was closed.
func (s *outletSet) drain(t *tap) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t.drainLocked()
}

func (t *tap) drainLocked() {
	for {
		select {
		case c := <-t.conns:
			t.passOnLocked(c)
		case d := <-t.grams:
			t.passOn(d)
		default:
			return
		}
	}
}

// passOnLocked gives what a closed tap has to its successor.
func (t *tap) passOnLocked(c net.Conn) {
	if t.o.top.Load() == t || !t.o.giveLocked(c) {
		c.Close()
	}
}

// offer gives a connection to the server that listens on the listener's name.
func (v *view) offer(c *TCPConn) {
	c.place.Store(v.offeredPlace())
	v.give(c, frontPort{name: v.name})
}

// give gives a connection to a server that listens there, or closes it when there
// is none or it does not keep up.
func (v *view) give(c *TCPConn, to frontPort) {
	c.enter(relay.Handled)
	c.setup.Store(int64(time.Since(c.opened)))
	i, setup := c.info(), c.setupSpan // while it is ours
	if !outlets.give(to.name, to.of(c.local.Port()), c) {
		c.turnAway(v.stats.NoRoute, relay.NoRoute)
		return
	}
	v.stats.Accepted.Inc()
	v.stats.Opened(&i)
	setup.End(time.Now(), i.Path, tracing.Handler)
}

// offered has the places of listeners without routes, by their counters: the
// handlers of the servers that take their connections find what they keep of a
// place by its address, over reloads too.
var offered sync.Map // *relay.Counters → *Place

func (v *view) offeredPlace() *Place {
	if p, ok := offered.Load(&v.cs[0]); ok {
		return p.(*Place)
	}
	p, _ := offered.LoadOrStore(&v.cs[0], &Place{Listener: v.name, Route: -1, Stats: v.stats, Counters: v.cs})
	return p.(*Place)
}

// tap is one server's hold on an outlet, and what waits for that server. It has
// the queue for what its network brings.
type tap struct {
	o      *outlet
	conns  chan net.Conn
	grams  chan datagram
	once   sync.Once
	closed chan struct{}
}

func (t *tap) isClosed() bool {
	select {
	case <-t.closed:
		return true
	default:
		return false
	}
}

func (t *tap) Close() error {
	t.once.Do(func() {
		close(t.closed)
		outlets.release(t)
	})
	return nil
}

func (t *tap) Addr() net.Addr { return outletAddr(t.o.key) }

// outletAddr is the address of an outlet.
type outletAddr outletKey

func (outletAddr) Network() string  { return networkName }
func (a outletAddr) String() string { return fmt.Sprintf("%s:%d", a.name, a.port) }

// acceptor is a net.Listener on an outlet.
type acceptor struct{ *tap }

// Accept implements net.Listener.
func (a *acceptor) Accept() (net.Conn, error) {
	select {
	case c := <-a.conns:
		if a.isClosed() { // by now: its server will not answer
			outlets.mu.Lock()
			defer outlets.mu.Unlock()
			a.passOnLocked(c)
			return nil, net.ErrClosed
		}
		return c, nil
	case <-a.closed:
		return nil, net.ErrClosed
	}
}
