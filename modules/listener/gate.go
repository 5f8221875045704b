package listener

import (
	"net/netip"

	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/overload"
)

// The first-packet gate: a flow gets in when its first bytes are recognised, by
// a sniffer of the listener's routes or by a matcher that is a Recogniser. UDP
// sessions are asked about on the worker; where that is a sniffer of others to
// say, and for connections under overload, in a goroutine.

// Recogniser is a matcher that knows clients by what they send first. It is
// asked from the engines' workers, many at a time, and must not block. more says
// that these are the first bytes of a stream and others may follow: it is asked
// again then.
type Recogniser interface {
	layer4.ConnMatcher
	Recognises(first []byte, client netip.Addr, more bool) bool
}

// recognisers are those of the routes.
func (l *Listener) recognisers() (list []Recogniser) {
	for _, r := range l.Routes {
		for _, set := range r.sets {
			for _, single := range set {
				if rec, ok := single.alone[0].(Recogniser); ok {
					list = append(list, rec)
				}
			}
		}
	}
	return list
}

// canRecognise reports whether anybody can.
func (v *view) canRecognise() bool { return len(v.recognisers)+len(v.plan) > 0 }

// recognised reports whether the first bytes of a flow are; known is false when
// sniffers of others have to be asked, which foreign allows.
func (v *view) recognised(first []byte, client netip.Addr, udp, final, foreign bool) (yes, known bool) {
	if !udp && len(first) == 0 {
		return false, true // who says nothing is nobody that anyone knows
	}
	for _, r := range v.recognisers {
		if r.Recognises(first, client, !udp && !final) {
			return true, true
		}
	}
	return v.plan.Recognises(first, udp, final, foreign)
}

// gate says which rule keeps a flow out for what it sends first. later is set
// for one that is to be looked at in a goroutine.
func (v *view) gate(client netip.AddrPort, udp bool, first []byte, rule string) (refused string, later bool) {
	switch {
	case !v.canRecognise():
		return rule, false
	case !udp: // nothing has come yet
		return "", true
	}
	if yes, known := v.recognised(first, client.Addr(), true, true, false); !known {
		return "", true
	} else if !yes {
		return rule, false
	}
	return "", false
}

// gateTCP waits until a connection is recognised and has it served, or closes
// it.
func (v *view) gateTCP(fd int, client, local netip.AddrPort) {
	c, err := takeTCP(fd, client, local, v, 0)
	if err != nil {
		v.stats.Abandoned(false, client.Addr())
		return
	}
	defer c.Close() // nothing, when it was detached
	defer v.contain(client, func() { c.because(relay.Error) })
	c.enter(relay.Peek)
	src := &tcpSource{c: c}
	for deadline, passed := c.opened.Add(v.peek.Timeout), false; !passed; {
		first, err := src.more(deadline, v.peek.MaxBytes)
		final := err != nil || len(first) >= v.peek.MaxBytes
		if passed, _ = v.recognised(first, client.Addr(), false, final, true); !passed && final {
			c.reject(v.stats.Rule(overload.Rule).Counter())
			v.tell(overload.Rule, client, local, false)
			return
		}
	}
	if fd, err = c.Detach(); err != nil {
		c.because(relay.Error)
		return
	}
	v.serveTCP(fd, client, local, nil, 0)
}

// gateUDP has a session served when the sniffers of others recognise it.
func (v *view) gateUDP(c *udprelay.Conn, client, local netip.AddrPort, worker int, rule string) {
	first := []byte{}
	if ds := c.Datagrams(nil); len(ds) > 0 {
		first = ds[0]
	}
	yes := false
	defer func() {
		if !yes {
			c.Reject(dropOf(rule))
			v.stats.Abandoned(true, client.Addr())
			v.refuse(rule, client, local, true)
		}
	}()
	defer v.contain(client, func() {})
	if yes, _ = v.recognised(first, client.Addr(), true, true, true); yes {
		v.serveUDP(c, client, local, worker)
	}
}
