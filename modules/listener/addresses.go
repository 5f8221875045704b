package listener

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// The options about which addresses a listener takes and gives: prefix, freebind
// and transparent. A prefix is no property of a socket but is looked at when a
// flow begins, so that its sessions need no look and a change no rebind.

// options are the socket options of the listener's addresses. Answers from an
// address of a prefix leave by a socket that has FreeBind: the host may know the
// prefix by a route alone.
func (l *Listener) options() sock.Options {
	return sock.Options{FreeBind: l.FreeBind || l.prefix.IsValid(), Transparent: l.Transparent}
}

// checkAddresses checks the three against each other and the addresses to listen
// on. The error begins with the key.
func (l *Listener) checkAddresses() error {
	if !l.prefix.IsValid() {
		return nil
	}
	switch {
	case l.Transparent:
		return errors.New("transparent: the listener has a prefix: both say which addresses are served; leave one out")
	case l.FreeBind:
		return errors.New("freebind: the listener has a prefix, which binds the wildcard address: leave freebind out")
	}
	wildcard, family := netip.IPv6Unspecified(), "IPv6"
	if l.prefix.Addr().Is4() {
		wildcard, family = netip.IPv4Unspecified(), "IPv4"
	}
	seen := make(map[string]bool)
	for _, b := range l.binds {
		if b.Addr.Addr() != wildcard {
			want := Bind{b.Network, netip.AddrPortFrom(wildcard, b.Addr.Port())}
			return fmt.Errorf("prefix: %s is not the wildcard address of %s, in which %s lies: write %s", b, family, l.prefix, want)
		}
		if seen[b.Network] {
			return fmt.Errorf("prefix: the listener has several %s ports: a prefix takes one", b.Network)
		}
		seen[b.Network] = true
	}
	return nil
}

// CheckPrefixes refuses addresses that a prefix of another listener covers on
// the same port.
func CheckPrefixes(all map[string]*Listener) error {
	names := slices.Sorted(maps.Keys(all))
	for _, name := range names {
		l := all[name]
		if !l.prefix.IsValid() {
			continue
		}
		for _, other := range names {
			for _, b := range all[other].binds {
				if other != name && l.prefix.Contains(b.Addr.Addr()) && l.hasPort(b) {
					return fmt.Errorf("%s.prefix: %s covers %s, which the listener %s binds", l.path, l.prefix, b, other)
				}
			}
		}
	}
	return nil
}

func (l *Listener) hasPort(b Bind) bool {
	return b.Addr.Port() != 0 && slices.ContainsFunc(l.binds, func(own Bind) bool {
		return own.Network == b.Network && own.Addr.Port() == b.Addr.Port()
	})
}

// listenerKey finds the listener in the context of the modules it loads.
const listenerKey caddy.CtxKey = "wayhouse_listener"

// PortsOf are the ports of the listener that a module is loaded by, in the order
// of its addresses, each once; 0 is one that the kernel chooses. They are nil for
// a module that no listener of ours has loaded.
func PortsOf(ctx caddy.Context) []uint16 {
	if l, ok := ctx.Value(listenerKey).(*Listener); ok {
		return l.ports()
	}
	return nil
}

// Met makes h known to the listener that it is loaded by, if that is one of ours:
// a listener does not see the handlers that those of its routes load.
func Met(ctx caddy.Context, h layer4.NextHandler) {
	if l, ok := ctx.Value(listenerKey).(*Listener); ok {
		l.met = append(l.met, h)
	}
}

func (l *Listener) ports() []uint16 {
	var ports []uint16
	for _, b := range l.binds {
		if p := b.Addr.Port(); !slices.Contains(ports, p) {
			ports = append(ports, p)
		}
	}
	return ports
}

// outside reports whether a flow was sent to an address that is not served.
func (v *view) outside(local netip.AddrPort) bool {
	return v.prefix.IsValid() && !v.prefix.Contains(local.Addr())
}

var errNoCapability = errors.New("redirected addresses need the capability CAP_NET_ADMIN, or CAP_NET_RAW, which this process lacks: " +
	"give it by AmbientCapabilities=CAP_NET_ADMIN in the systemd unit, or by setcap cap_net_admin+ep on the binary")
