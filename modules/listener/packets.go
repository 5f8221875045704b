package listener

import (
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
)

// UDP on the network wayhouse/NAME. The server has one net.PacketConn for all
// its clients and tells nobody when it is done with one, so the listener keeps
// them: see guest.go.
//
//	worker:  divert → (of a stranger) letIn → tap.grams
//	server:  ReadFrom → … → WriteTo → the endpoint's socket

// datagram waits in a tap. data goes back to gramBuffers when it has been read.
type datagram struct {
	data *[]byte
	from caller
}

// caller is a client to a server that has one net.PacketConn for all of them.
type caller interface {
	net.Addr
	reply(b []byte) error
}

var gramBuffers = sync.Pool{New: func() any {
	b := make([]byte, 0, 2048)
	return &b
}}

// divert gives a datagram to the server that listens on the listener's name.
func (v *view) divert(ep *endpoint, o *udprelay.Opening) udprelay.Decision {
	out := outlets.pick(v.name, o.Local.Port(), true)
	if out == nil {
		return v.drop(o, relay.NoRoute)
	}
	if out.full() { // nobody is let in for nothing
		return v.drop(o, relay.PendingFull)
	}
	key := guestKey{ep, o.Client, o.Local, o.Peer}
	g := v.guests.find(o.Worker, key)
	if g == nil {
		var rule string
		if g, rule = v.letIn(key, o, frontPort{name: v.name}, v.held); rule != "" {
			o.Reason = dropOf(rule)
			return udprelay.Refuse
		}
	}
	if !g.hand(out, o.Data) {
		return v.drop(o, relay.PendingFull)
	}
	return udprelay.Divert
}

// visit gives a datagram of a guest that a route has made to its server. known is
// false when the client is none.
func (v *view) visit(ep *endpoint, o *udprelay.Opening) (d udprelay.Decision, known bool) {
	g := v.guests.find(o.Worker, guestKey{ep, o.Client, o.Local, o.Peer})
	if g == nil {
		return udprelay.Refuse, false
	}
	out := outlets.pick(g.to.name, g.to.of(o.Local.Port()), true)
	switch {
	case out == nil:
		return v.drop(o, relay.NoRoute), true
	case !g.hand(out, o.Data):
		return v.drop(o, relay.PendingFull), true
	}
	return udprelay.Divert, true
}

// busy reports whether a server is behind with what it has.
func (o *outlet) busy() bool {
	t := o.top.Load()
	return len(t.grams) > cap(t.grams)/2
}

func (o *outlet) full() bool {
	t := o.top.Load()
	return len(t.grams) == cap(t.grams)
}

// hand gives a datagram of the guest to a server, unless its queue is full.
func (g *guest) hand(out *outlet, p []byte) bool {
	if !out.pass(g, p) {
		return false
	}
	g.moved(&g.in, len(p))
	g.counters.PacketsC2S.Add(1)
	g.counters.BytesC2S.Add(uint64(len(p)))
	return true
}

// passOn is passOnLocked for a datagram. One that finds the queue full is lost.
func (t *tap) passOn(d datagram) {
	if to := t.o.top.Load(); to != t {
		select {
		case to.grams <- d:
		default:
		}
	}
}

// packetConn is a net.PacketConn on an outlet.
type packetConn struct {
	*tap

	mu       sync.Mutex
	deadline time.Time
	changed  chan struct{}
}

// ReadFrom implements net.PacketConn.
func (p *packetConn) ReadFrom(b []byte) (int, net.Addr, error) {
	for {
		d, again, err := p.next()
		switch {
		case err != nil:
			return 0, nil, err
		case !again:
			n := copy(b, *d.data)
			gramBuffers.Put(d.data)
			return n, d.from, nil
		}
	}
}

// next waits for a datagram, by the deadline there is now. again is set when
// that is another one meanwhile.
func (p *packetConn) next() (d datagram, again bool, err error) {
	p.mu.Lock()
	deadline := p.deadline
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	changed := p.changed
	p.mu.Unlock()
	var expired <-chan time.Time
	if !deadline.IsZero() {
		t := time.NewTimer(time.Until(deadline))
		defer t.Stop()
		expired = t.C
	}
	select {
	case d = <-p.grams:
		if p.isClosed() {
			p.passOn(d)
			return datagram{}, false, net.ErrClosed
		}
		return d, false, nil
	case <-p.closed:
		return datagram{}, false, net.ErrClosed
	case <-expired:
		return datagram{}, false, os.ErrDeadlineExceeded
	case <-changed:
		return datagram{}, true, nil
	}
}

// WriteTo implements net.PacketConn for the addresses that ReadFrom gave.
func (p *packetConn) WriteTo(b []byte, addr net.Addr) (int, error) {
	c, ok := addr.(caller)
	if !ok {
		return 0, fmt.Errorf("%v is not a client of %s", addr, p.Addr())
	}
	if err := c.reply(b); err != nil {
		return 0, err
	}
	return len(b), nil
}

// reply sends a datagram to the client.
func (g *guest) reply(b []byte) error {
	if err := g.key.ep.udp.WriteTo(b, &g.way); err != nil {
		g.counters.Dropped[relay.ReplySend].Add(1)
		return err
	}
	g.moved(&g.out, len(b))
	g.counters.PacketsS2C.Add(1)
	g.counters.BytesS2C.Add(uint64(len(b)))
	return nil
}

// LocalAddr implements net.PacketConn.
//
// A server for HTTP/3 announces the port that it has.
func (p *packetConn) LocalAddr() net.Addr {
	key := p.o.key
	key.port = outlets.announced(key)
	return outletAddr(key)
}

// SetDeadline implements net.PacketConn.
func (p *packetConn) SetDeadline(t time.Time) error { return p.SetReadDeadline(t) }

// SetReadDeadline implements net.PacketConn.
func (p *packetConn) SetReadDeadline(t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deadline = t
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
	return nil
}

// SetWriteDeadline implements net.PacketConn. Writes never wait.
func (p *packetConn) SetWriteDeadline(time.Time) error { return nil }
