package listener

import (
	"net"
	"slices"
	"sync"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

// A QUIC client may go on from another address: it moves from one network to
// another, or a NAT has forgotten it. What it sends then has a short header with a
// connection ID that only its server can read, and no route knows it. So servers
// get a copy of a first datagram that looks like one, while the routes do with it
// what they do. A server that answers it has known the client, which is a guest
// from there on; any other says nothing.
//
//	Open → ask → outlet → server → moved.reply → guest

// moved is a client that may have been somebody else's address before.
type moved struct {
	net.UDPAddr
	once sync.Once
	v    *view
	g    *guest
	at   int                // the worker
	end  func(relay.Reason) // of the session that routes have made of it
}

const (
	longHeader = 0x80
	fixedBit   = 0x40
	shortest   = 21 // bytes of a packet with a short header
)

// ask gives a copy of a stranger's datagram to the servers that routes lead to, as
// long as they have room for more than that.
func (v *view) ask(ep *endpoint, o *udprelay.Opening) {
	if p := o.Data; len(p) < shortest || p[0]&(longHeader|fixedBit) != fixedBit {
		return
	}
	for i, r := range v.routes {
		if r.front.name == "" || slices.ContainsFunc(v.routes[:i], func(other *Route) bool { return other.front == r.front }) {
			continue
		}
		out := outlets.pick(r.front.name, r.front.of(o.Local.Port()), true)
		if out == nil || out.busy() {
			continue
		}
		out.pass(&moved{
			UDPAddr: *net.UDPAddrFromAddrPort(o.Client), v: v, at: o.Worker, end: o.Ender(),
			g: v.newGuest(guestKey{ep, o.Client, o.Local, o.Peer}, o, r.front, v.fronts[i]),
		}, o.Data)
	}
}

// reply makes the client a guest, for its server knows it.
func (m *moved) reply(b []byte) error {
	m.once.Do(func() {
		m.v.stats.Open(true, m.g.key.client.Addr(), flow.Bounds{})
		if !m.v.guests.add(m.at, m.g) {
			m.v.stats.Abandoned(true, m.g.key.client.Addr())
			return
		}
		m.g.begins()
		m.end(relay.ClientClose)
	})
	return m.g.reply(b)
}

// String is what a server knows the client by.
func (m *moved) String() string { return m.g.text }
