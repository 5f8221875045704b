package listener

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

// Routes that lead to the network wayhouse/NAME.
//
//	TCP: serveTCP → view.give → outlet       its bytes still in its socket
//	UDP: serveUDP → view.invite → guest      whose later datagrams go straight there
//	     Handle → Pass → passConn, session   behind other handlers, in a layer4 server
//
// To the server these are connections like any other, and the datagrams come from
// one net.PacketConn.

// Front is a handler that gives flows to the servers that listen on
// wayhouse/NAME. As the only handler of a route it is never asked to handle one:
// no goroutine waits for them.
type Front interface {
	layer4.NextHandler

	// Front is the name, and the port that the server has given with it; 0 is the
	// one that the client has hit, see outletSet.pick.
	Front() (name string, port uint16)
}

// DeclareFront makes a name known to servers until the returned function is
// called, for a handler that is being provisioned.
func DeclareFront(ctx caddy.Context, name string, config Config) (withdraw func()) {
	var ports []uint16 // a server of another app does not tell
	if l, ok := ctx.Value(listenerKey).(*Listener); ok {
		ports = l.udpPorts()
	}
	outlets.mu.Lock()
	defer outlets.mu.Unlock()
	outlets.declareLocked(name, config, true, true, ports) // a server may listen for either
	return sync.OnceFunc(func() { outlets.withdraw(name) })
}

// frontPort is where a front leads: a name, and the port that a server has given
// with it; 0 for the one that the client has hit.
type frontPort struct {
	name string
	port uint16
}

func (f frontPort) of(local uint16) uint16 {
	if f.port != 0 {
		return f.port
	}
	return local
}

// leadsTo reports whether the listener's UDP clients may be guests of a server
// there.
func (v *view) leadsTo(to frontPort) bool {
	if len(v.routes) == 0 {
		return to.name == v.name
	}
	return slices.ContainsFunc(v.routes, func(r *Route) bool { return r.front == to })
}

// Pass gives a flow to the server that listens on a name, and returns when that
// is done with it. It is for flows that other handlers have had, or that a server
// of another app has accepted.
func Pass(cx *layer4.Connection, name string, port uint16) error {
	if passes(cx.Conn) >= maxPasses {
		return fmt.Errorf("%s/%s leads to itself", networkName, name)
	}
	to := frontPort{name, port}
	port = to.of(flowaddr.Of(cx.LocalAddr()).Port())
	if cx.RemoteAddr().Network() == "udp" {
		return passSession(cx, name, port)
	}
	p := &passConn{Connection: cx, done: make(chan struct{})}
	if !outlets.give(name, port, p) {
		return fmt.Errorf("no server listens on %s/%s, or it does not keep up", networkName, name)
	}
	<-p.done
	return nil
}

// maxPasses bounds how often a connection may go from one server of the network
// to the next: there is no end to it where one leads to itself.
const maxPasses = 4

func passes(c net.Conn) (n int) {
	for {
		switch in := c.(type) {
		case *passConn:
			n++
			c = in.Connection.Conn
		case *layer4.Connection:
			c = in.Conn
		case unread:
			c = in.cx
		case interface{ NetConn() net.Conn }:
			c = in.NetConn()
		default:
			return n
		}
	}
}

// passConn is a connection that a server has from a handler.
type passConn struct {
	*layer4.Connection
	over sync.Once
	done chan struct{}
}

// Close implements net.Conn.
func (p *passConn) Close() error {
	err := net.ErrClosed
	p.over.Do(func() {
		err = p.Connection.Close()
		close(p.done)
	})
	return err
}

// CloseWrite tells the client that nothing more comes.
func (p *passConn) CloseWrite() error { return closeWrite(p.Connection.Conn) }

// session is a UDP session that a goroutine passes on, to a server its client's
// address.
type session struct {
	net.Addr
	cx *layer4.Connection
}

func (s *session) reply(b []byte) error {
	_, err := s.cx.Write(b)
	return err
}

// passSession reads the datagrams of a session until it ends.
func passSession(cx *layer4.Connection, name string, port uint16) error {
	if _, again := cx.RemoteAddr().(*session); again {
		return fmt.Errorf("%s/%s leads to another name", networkName, name)
	}
	s := &session{cx.RemoteAddr(), cx}
	buf := make([]byte, maxDatagram)
	for {
		n, err := cx.Read(buf)
		if err != nil {
			return nil // the session is over
		}
		o := outlets.pick(name, port, true)
		if o == nil {
			return fmt.Errorf("no server listens on %s/%s for datagrams", networkName, name)
		}
		o.pass(s, buf[:n])
	}
}

const maxDatagram = 65_535

// pass puts a copy of a datagram into the queue of the newest server and reports
// whether it had room.
func (o *outlet) pass(from caller, p []byte) bool {
	t := o.top.Load()
	b := gramBuffers.Get().(*[]byte)
	*b = append((*b)[:0], p...)
	select {
	case t.grams <- datagram{b, from}:
		if t.isClosed() { // since then: nobody reads it
			outlets.drain(t)
		}
		return true
	default:
		gramBuffers.Put(b)
		return false
	}
}

// invite makes a guest of a session whose route leads to a name. What is dropped
// and why is told by the reason when it cannot.
func (v *view) invite(c *UDPConn, route int) (why relay.Drop, ok bool) {
	to := v.routes[route].front
	why = relay.NoRoute
	c.Divert(func(o *udprelay.Opening, datagrams [][]byte) bool {
		out := outlets.pick(to.name, to.of(c.local.Port()), true)
		if out == nil {
			return false
		}
		key := guestKey{c.Acceptor().(*endpoint), c.client, c.local, o.Peer}
		g := v.newGuest(key, o, to, v.fronts[route])
		if !v.guests.add(c.worker, g) {
			why = relay.PendingFull
			return false
		}
		for _, p := range datagrams {
			g.hand(out, p)
		}
		g.begins()
		ok = true
		return true
	})
	if ok {
		c.setupSpan.End(time.Now(), v.fronts[route], tracing.Handler)
	}
	return why, ok
}
