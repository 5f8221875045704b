package yamlconfig

import (
	"maps"
	"slices"

	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// handshakeOnly are the sniffers that know a flow by its first datagram alone:
// a session that is opened anew in the middle of a flow is not recognised.
var handshakeOnly = []string{"quic", "wireguard", "openvpn", "raknet", "teamspeak3"}

// check looks at what the parts of a document say together.
func (d *document) check() {
	taken := make(listener.Binds)
	for _, l := range d.listeners {
		if err := taken.Add(l.binds, l.name); err != nil {
			l.bind.fail("%s", err)
		}
		d.checkRoutes(l)
	}
	d.checkPrefixes()
	for _, name := range slices.Sorted(maps.Keys(d.pools)) {
		p := d.pools[name]
		fits(p.header, p.proxy, p.tcp, p.udp)
		if p.udp && !p.tcp && !p.healthNamed {
			p.at.fail("only UDP listeners use the pool, and tcp_connect, the default of health_check.type, would take its backends down: choose udp_probe, or none")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.resolvers)) {
		r := d.resolvers[name]
		fits(r.header, r.proxy, r.tcp, r.udp)
	}
}

// fits refuses a header that is not for the flows that would get it.
func fits(v value, header string, tcp, udp bool) {
	switch {
	case header == "v2-udp" && tcp:
		v.fail("v2-udp stands in front of datagrams, and a TCP listener leads here: choose v1, v2 or none")
	case (header == "v1" || header == "v2") && udp:
		v.fail("%s stands in front of a TCP connection, and a UDP listener leads here: choose v2-udp or none", header)
	}
}

// checkRoutes looks at the routes of one listener, and notes where they lead.
func (d *document) checkRoutes(l *listenerOf) {
	gated := l.gate.truth()
	recognises := false
	for i := range l.actions {
		a := &l.actions[i]
		recognises = recognises || a.match == "first_bytes" || a.match == "sniffer"
		if p := d.pools[a.pool]; p != nil {
			p.tcp, p.udp = p.tcp || !l.udp, p.udp || l.udp
		}
		if r := d.resolvers[a.resolver]; r != nil {
			r.tcp, r.udp = r.tcp || !l.udp, r.udp || l.udp
		}
		if a.match == "dst" && l.udp && !l.prefix.given() && !l.transparent.truth() {
			a.at.fail("match.type dst: a UDP listener knows the address that a client has sent to only with prefix or transparent")
		}
		if a.match != "always" || !l.udp || gated {
			continue
		}
		for j := range l.actions[:i] {
			if b := &l.actions[j]; slices.Contains(handshakeOnly, b.sniffer) && !b.same(a) {
				a.at.fail("the sniffer %s knows handshakes only, and what it no longer recognises of its flows would go here: lead both to the same place, or say first_packet_gate: true", b.sniffer)
				break
			}
		}
	}
	switch {
	case gated && !l.udp:
		l.gate.fail("is for protocol: udp")
	case gated && !recognises:
		l.gate.fail("nobody would get in: no route has first_bytes or a sniffer to recognise clients by")
	}
}

// checkPrefixes refuses addresses that a prefix of another listener covers.
func (d *document) checkPrefixes() {
	for _, l := range d.listeners {
		if !l.covers.IsValid() || len(l.binds) != 1 {
			continue
		}
		for _, other := range d.listeners {
			for _, b := range other.binds {
				if other != l && other.udp == l.udp && b.Addr.Port() != 0 && b.Addr.Port() == l.binds[0].Addr.Port() && l.covers.Contains(b.Addr.Addr()) {
					l.prefix.fail("%s covers %s, which the listener %s binds", l.covers, b, other.name)
				}
			}
		}
	}
}
