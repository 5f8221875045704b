package pool

import (
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// New is the handler for a pool, for handlers that find out by flow which pool
// is wanted. resolver is who says so, for operators; "" is no resolver.
func New(p *pool.Pool, resolver string) *Handler {
	h := &Handler{Pool: p.Name(), pool: p, header: headerOf(p), resolver: resolver}
	h.paths.Store(&map[pathKey]*relay.Path{})
	return h
}

// Direct is the way to one address that belongs to no pool: nothing checks it,
// limits it or tries another one.
type Direct struct {
	Resolver       string // that has named it
	Name           string // stands for the pool, for operators
	To             netip.AddrPort
	ConnectTimeout time.Duration
	IdleTimeout    time.Duration
	Proxy          proxyproto.Form
}

func (d *Direct) header() *header { return &header{pool: d.Name, form: d.Proxy} }

// directKeepalive is what pools have unless they say otherwise.
const directKeepalive = 30 * time.Second

func (d *Direct) path(at *listener.Place) *relay.Path {
	return &relay.Path{
		Listener: at.Listener, Route: at.Route, Resolver: d.Resolver, Pool: d.Name, Backend: d.To, Transparent: at.Transparent,
		Idle: d.IdleTimeout, Counters: at.Counters, Owner: directOwner{at.Stats}, Opened: at.Stats.Opened, Proxy: d.Proxy,
	}
}

// loops reports whether the flow would come back: whoever names the address must
// not make one flow into as many as there is room for.
func (d *Direct) loops(path *relay.Path, network string, client netip.AddrPort) bool {
	return listener.Takes(network, d.To) || path.Transparent && listener.Loops(client, d.To)
}

// ForwardUDP implements listener.Forwarder.
func (d *Direct) ForwardUDP(o *udprelay.Opening, at *listener.Place) udprelay.Decision {
	if !d.header().fits(true) {
		o.Reason = relay.ProxyHeader
		return udprelay.Refuse
	}
	path := d.path(at)
	if d.loops(path, "udp", o.Client) {
		o.Reason = relay.Loop
		return udprelay.Refuse
	}
	fd, errno := dialUDP(path, o.Client, d.To, netip.Addr{})
	if errno != 0 {
		o.Reason = relay.UpstreamBind
		return udprelay.Refuse
	}
	o.Path, o.FD = path, fd
	d.header().sent()
	return udprelay.Forward
}

// TCPDialer implements listener.Forwarder.
func (d *Direct) TCPDialer(at *listener.Place) tcprelay.Dialer {
	return directDialer{d, at, d.header()}
}

type directDialer struct {
	d      *Direct
	at     *listener.Place
	header *header
}

// WithHost implements listener.HostDialer.
func (d directDialer) WithHost(host []byte) tcprelay.Dialer {
	d.header, _ = d.header.with(host)
	return d
}

// InTrace implements listener.TraceDialer.
func (d directDialer) InTrace(trace []byte) tcprelay.Dialer {
	d.header, _ = d.header.in(trace)
	return d
}

// Next implements tcprelay.Dialer: there is one try.
func (d directDialer) Next(client, _ netip.AddrPort, attempt int, _ []*relay.Path) (tcprelay.Target, bool) {
	if attempt > 0 || !d.header.fits(false) {
		return tcprelay.Target{}, false
	}
	path := d.d.path(d.at)
	if d.d.loops(path, "tcp", client) {
		d.at.Stats.Loops.Inc()
		return tcprelay.Target{}, false
	}
	asClient(path, client, d.d.To) // tells when it cannot be
	return tcprelay.Target{
		Path: path, ConnectTimeout: d.d.ConnectTimeout, KeepAlive: directKeepalive, NoDelay: true, Header: d.header.of(),
	}, true
}

// GaveUp implements tcprelay.Dialer.
func (d directDialer) GaveUp(last *relay.Info, why relay.Reason) {
	if last.Path == nil {
		last.Path = d.d.path(d.at)
	}
	d.at.Stats.GaveUp(last, why)
}

// directOwner counts flows out. There is no backend to blame.
type directOwner struct{ stats *flow.Listener }

func (directOwner) ConnectFailed(*relay.Path, relay.Failure, syscall.Errno) {}
func (directOwner) Answered(*relay.Path)                                    {}
func (directOwner) Failed(*relay.Path, relay.Failure, syscall.Errno)        {}

func (o directOwner) Closed(_ *relay.Path, s *relay.Info, why relay.Reason) {
	o.stats.Closed(s, why)
}

// nobody takes evidence about a backend that is none.
type nobody struct{}

func (nobody) PassiveOK()            {}
func (nobody) Passive(relay.Failure) {}

// Handle copies a flow that other handlers have wrapped, or that comes from a
// server of another app.
func (d *Direct) Handle(cx *layer4.Connection, _ layer4.Handler) error {
	if c, ok := listener.Socket(cx).(*listener.TCPConn); ok {
		c.ForwardTCP(append([]byte(nil), cx.MatchingBytes()...), listener.Hosted(d.TCPDialer(c.Place()), sniff.Of(cx).Known()))
		return nil
	}
	at := foreign
	if c := listener.ConnOf(cx); c != nil {
		at = c.Place()
	}
	udp := cx.RemoteAddr().Network() == "udp"
	path, client, local := d.path(at), clientOf(cx), addrPort(cx.LocalAddr())
	head := d.header()
	if !head.fits(udp) {
		return errMisfit
	}
	if d.loops(path, cx.RemoteAddr().Network(), client) {
		return errLoop
	}
	var up net.Conn
	var err error
	began := time.Now()
	if udp {
		up, err = connectUDP(path, client, d.To, netip.Addr{})
	} else {
		up, err = connectTCP(path, client, d.To, netip.Addr{}, d.ConnectTimeout, directKeepalive)
	}
	setupOf(cx).Tried(path, began, time.Now(), failureOf(err))
	if err != nil {
		return err
	}
	show(cx, path)
	w := watch(d.IdleTimeout, 0, cutter(cx, up))
	if udp {
		return pumpDatagrams(cx, head.datagrams(cx, up, client, local), at, w, nobody{})
	}
	if err := head.beginStream(cx, up, client, local); err != nil {
		up.Close()
		return err
	}
	return pumpStream(cx, up, at, w, nobody{})
}

// Interface guard
var _ listener.Forwarder = (*Direct)(nil)
