package listener

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/tcprelay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
)

// PROXY headers of load balancers that are trusted. On TCP:
//
//	Accept → awaitHeader → Look → header → admit, by the addresses it tells
//	                                     → Look → as a connection that has just come
//
// Until its header is there a connection is held: it counts among those of the
// process, and among those of no client. On UDP the engine reads headers: what it
// opens has the addresses that they tell.

// AcceptProxy says whose PROXY headers are believed.
type AcceptProxy struct {
	// Networks and single addresses of the load balancers that are trusted: what
	// comes from them begins with a PROXY header, on TCP of version 1 or 2, on UDP
	// of version 2 or Cloudflare's Simple Proxy Protocol. An IPv6 address that
	// carries an IPv4 address is that address. Placeholders are replaced at load;
	// one that is not known is refused. At least one is needed.
	From []string `json:"from,omitempty"`

	// Refuse whoever comes without a header that is believed. Otherwise such a
	// client is one of its own address, and a header from elsewhere is payload.
	// Default: false.
	Require bool `json:"require,omitempty"`

	// How long after it arrived a TCP connection may take to send its header. Zero
	// is refused. Default: 3s.
	Timeout *caddy.Duration `json:"timeout,omitempty"`

	trusted cidr.Set
	timeout time.Duration
	told    [numTold]prometheus.Counter
}

const defaultHeaderTimeout = 3 * time.Second

// told is what a trusted peer has said of whose a flow is.
type told uint8

const (
	toldClient told = iota // a client's
	toldOwn                // its own: LOCAL, UNKNOWN or UNSPEC
	toldNone               // nothing: there was no header
	numTold
)

var tolds = [numTold]string{"client", "own", "none"}

var headersRead = metrics.Counter("proxy_protocol_accepted_total",
	"Connections and UDP sessions of trusted peers that were let in, by what their PROXY header has told: a client, that they are the peer's own, or none as there was no header.", "listener", "result")

// provision reads the networks. Errors begin with a key.
func (a *AcceptProxy) provision(listener string) error {
	if len(a.From) == 0 {
		return errors.New("from: none; give the networks or addresses of the load balancers that are trusted, such as 10.0.0.0/24")
	}
	repl := caddy.NewReplacer()
	for i, s := range a.From {
		network, err := repl.ReplaceOrErr(s, true, true)
		if err == nil {
			err = a.trusted.Add(network)
		}
		if err != nil {
			return fmt.Errorf("from[%d]: %w", i, err)
		}
	}
	a.timeout = defaultHeaderTimeout
	if a.Timeout != nil {
		a.timeout = time.Duration(*a.Timeout)
	}
	for i, name := range tolds {
		a.told[i] = headersRead.WithLabelValues(listener, name)
	}
	return nil
}

// validate checks what provision has left.
func (a *AcceptProxy) validate() error {
	if a.timeout <= 0 {
		return fmt.Errorf("timeout: %v is not above zero; leave it out for %v", a.timeout, defaultHeaderTimeout)
	}
	return nil
}

// unmarshal reads the option. Syntax:
//
//	accept_proxy <networks...> {
//		require
//		timeout <duration>
//	}
func (a *AcceptProxy) unmarshal(d *caddyfile.Dispenser) error {
	if err := caddyopt.Strings(&a.From).Read(d); err != nil {
		return err
	}
	return caddyopt.BlockOf(d, "accept_proxy", caddyopt.Options{
		"require": caddyopt.Word(&a.Require),
		"timeout": caddyopt.Ptr(&a.Timeout, caddyopt.Duration),
	})
}

// stranger is the rule by which a peer that is not trusted is kept out, "" for
// none.
func (a *AcceptProxy) stranger() string {
	if a.Require {
		return ruleHeader
	}
	return ""
}

// read finds whose a connection is by what has been seen of it; n is the length
// of its header. more is set while that may still become one, which it cannot
// after final. The addresses are those of the connection where the header tells no
// others.
func (a *AcceptProxy) read(seen []byte, final bool, peer, own netip.AddrPort) (f headed, more bool, rule string) {
	h, n, err := proxyproto.ReadStream(seen)
	f = headed{peer, own, n, toldOwn}
	switch {
	case err == proxyproto.ErrShort && !final:
		return f, true, ""
	case err == proxyproto.ErrShort && len(seen) == 0:
		err = proxyproto.ErrNone
	}
	return f, false, a.judge(&f, h, err)
}

// judge takes what was read, or says which rule keeps the flow out.
func (a *AcceptProxy) judge(f *headed, h proxyproto.Header, err error) (rule string) {
	switch {
	case err == nil && f.from(h):
		return ""
	case err == proxyproto.ErrNone && !a.Require:
		f.told = toldNone
		return ""
	}
	return ruleHeader
}

// headed is whose a flow is by its header.
type headed struct {
	client, local netip.AddrPort
	n             int // length of the header
	told          told
}

// from takes what a header tells, unless nobody can have the client's address.
// An address of ours that the peer does not know stays the one it has come to,
// but where answers have to tell the same.
func (f *headed) from(h proxyproto.Header) bool {
	switch {
	case !h.Client.IsValid():
		return true
	case !h.Names():
		return false
	}
	f.client, f.told = h.Client, toldClient
	if h.SPP || !h.Dest.Addr().IsUnspecified() {
		f.local = h.Dest
	}
	return true
}

// awaitHeader begins to wait for the header of a connection. ordinary is set for
// one whose peer may not send any, and need not.
func (v *view) awaitHeader(o *tcprelay.Opening) (d tcprelay.Decision, ordinary bool) {
	a, rule := v.proxied, ""
	switch {
	case !a.trusted.Contains(o.Client.Addr()):
		if rule = a.stranger(); rule == "" {
			return tcprelay.Refuse, true
		}
	case !v.stats.Hold(false, v.limits.max(false)):
		rule = ruleMaxConn
	}
	if rule != "" {
		v.refuse(rule, o.Client, o.Local, false)
		return tcprelay.Refuse, false
	}
	l := looks.Get().(*look)
	l.phase = heading
	l.walk.v = v
	o.Looker, o.Path, o.Limit, o.Wait = l, v.heading, proxyproto.MaxV2, a.timeout
	return tcprelay.Peek, false
}

// header takes the header of a connection, or finds that there is none.
func (l *look) header(o *tcprelay.Opening, seen []byte, final bool) tcprelay.Decision {
	v := l.walk.v
	f, more, rule := v.proxied.read(seen, final, o.Client, o.Local)
	switch {
	case more:
		return tcprelay.Peek
	case rule != "":
		v.stats.Release(false)
		v.refuse(rule, o.Client, o.Local, false)
	default:
		rule, l.gate = v.admit(f.client, f.local, false, nil, true)
	}
	if rule != "" {
		l.free()
		return tcprelay.Refuse
	}
	v.proxied.told[f.told].Inc()
	l.phase = entered
	o.Client, o.Local, o.Discard = f.client, f.local, f.n
	o.Path, o.Limit, o.Wait = v.looking, v.peek.MaxBytes, o.Age+v.peek.Timeout
	return tcprelay.Peek
}

// headersIn are the headers that the UDP engine is to take for the view, nil for
// none.
func (v *view) headersIn() *udprelay.HeaderIn {
	if v.proxied == nil {
		return nil
	}
	return &udprelay.HeaderIn{
		From: &v.proxied.trusted, Require: v.proxied.Require, Counters: v.cs,
		Refused: func(peer, hit netip.AddrPort) { v.tell(ruleHeader, peer, hit, true) },
	}
}

// heard counts what a header has told of a session that is let in.
func (v *view) heard(o *udprelay.Opening) {
	switch {
	case v.proxied == nil || !v.proxied.trusted.Contains(o.Peer.Addr()):
	case o.Client == o.Peer:
		v.proxied.told[toldOwn].Inc()
	default:
		v.proxied.told[toldClient].Inc()
	}
}

// headOwner counts out the connections that end before their header is there.
type headOwner struct{ lookOwner }

func (o headOwner) Closed(_ *relay.Path, s *relay.Info, why relay.Reason) {
	s.Phase = relay.Header
	o.stats.ClosedHeld(s, why)
}

// Interface guards
var _ relay.Owner = headOwner{}
