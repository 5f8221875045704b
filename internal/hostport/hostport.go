// Package hostport reads where backends are: ip:port or host:port.
package hostport

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// Target is an address, or a host name and a port. It can be compared.
type Target struct {
	Addr netip.AddrPort // unset for a host name; IPv4 is never IPv4-mapped
	Host string         // lower case, without the final dot; "" for an address
	Port uint16
}

func (t Target) String() string {
	if t.Host == "" {
		return t.Addr.String()
	}
	return net.JoinHostPort(t.Host, strconv.Itoa(int(t.Port)))
}

// ParseList reads a list of at least one target, none of them twice.
func ParseList(list []string) ([]Target, error) {
	if len(list) == 0 {
		return nil, errors.New("none; give at least one, ip:port or host:port")
	}
	seen := make(map[Target]bool)
	targets := make([]Target, 0, len(list))
	for _, s := range list {
		t, err := Parse(s)
		if err != nil {
			return nil, err
		}
		if seen[t] {
			return nil, fmt.Errorf("%q is listed twice", s)
		}
		seen[t] = true
		targets = append(targets, t)
	}
	return targets, nil
}

// Parse reads ip:port or host:port. IPv4-mapped addresses become IPv4.
func Parse(s string) (Target, error) {
	host, p, err := net.SplitHostPort(s)
	if err != nil {
		return Target{}, fmt.Errorf("%q is neither ip:port nor host:port", s)
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil || port == 0 {
		return Target{}, fmt.Errorf("%q: the port is not a number from 1 to 65535", s)
	}
	if a, err := netip.ParseAddr(host); err == nil {
		switch a = a.Unmap(); {
		case !OneHost(a):
			return Target{}, fmt.Errorf("%q is not the address of one host", s)
		case a.Zone() != "" && !validZone(a.Zone()):
			return Target{}, fmt.Errorf("%q: %q is not the name of a network interface", s, a.Zone())
		}
		return Target{Addr: netip.AddrPortFrom(a, uint16(port)), Port: uint16(port)}, nil
	}
	name := strings.TrimSuffix(strings.ToLower(host), ".")
	if !ValidHost(name) {
		return Target{}, fmt.Errorf("%q: %q is neither an IP address nor a host name", s, host)
	}
	return Target{Host: name, Port: uint16(port)}, nil
}

// validZone reports whether a zone can be an interface: by its number, or by a
// name that the kernel allows and that changes no line it is printed in.
func validZone(zone string) bool {
	return len(zone) <= maxZone && !strings.ContainsFunc(zone, func(r rune) bool {
		return r <= ' ' || r > '~' || strings.ContainsRune("/:[]%\"", r)
	})
}

const maxZone = 15 // IFNAMSIZ without its zero byte

// OneHost reports whether a, which is not IPv4-mapped, can be a single host's.
func OneHost(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// Loopback reports whether a host, a name or an address, is always the one that
// this process runs on.
func Loopback(host string) bool {
	a, err := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || err == nil && a.Unmap().IsLoopback()
}

// ValidHost reports whether a name can be a host's. One whose last label is a
// number is a mistyped address.
func ValidHost(name string) bool {
	if name == "" || len(name) > 253 {
		return false
	}
	last := ""
	for last = range strings.SplitSeq(name, ".") {
		if last == "" || len(last) > 63 || last[0] == '-' || last[len(last)-1] == '-' {
			return false
		}
		for i := range len(last) {
			switch c := last[i]; {
			case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
			default:
				return false
			}
		}
	}
	_, err := strconv.Atoi(last)
	return err != nil
}
