package cidr

import "net/netip"

// Plain is the one form of an address by which a client is known: without a
// zone, and IPv4 where it is IPv4-mapped (::ffff:192.0.2.1) or IPv4-compatible
// (::192.0.2.1). No IPv4 host is in 0.0.0.0/8, so that :: and ::1 stay what
// they are.
func Plain(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	b := a.As16()
	if b[12] != 0 && [12]byte(b[:12]) == [12]byte{} {
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return a.Unmap().WithZone("")
}

// Key stands for an address or a network in tables: it has no pointer for the
// collector to follow.
type Key [16]byte

// Keys are the keys of an address in its plain form and of the network that
// stands for one customer: the /24 of IPv4, the /64 of IPv6.
func Keys(a netip.Addr) (ip, net Key) {
	ip = Key(a.As16())
	net = ip
	if a.Is4() {
		net[15] = 0
	} else {
		clear(net[8:])
	}
	return ip, net
}
