// Package flowaddr turns the addresses of connections into values.
package flowaddr

import (
	"net"
	"net/netip"
)

// Of is an address with its port, IPv4 where it is IPv4-mapped, and the zero
// value where it is of another kind, such as a Unix socket.
func Of(a net.Addr) netip.AddrPort {
	var ap netip.AddrPort
	switch a := a.(type) {
	case interface{ AddrPort() netip.AddrPort }: // *net.TCPAddr, *net.UDPAddr
		ap = a.AddrPort()
	case nil:
		return ap
	default:
		ap, _ = netip.ParseAddrPort(a.String())
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
