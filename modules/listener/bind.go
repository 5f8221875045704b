package listener

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// maxPorts is how many ports one bind may name: a typo such as 0-65535 must
// not try to open tens of thousands of sockets.
const maxPorts = 1024

// Bind is one address to listen on.
type Bind struct {
	Network string // tcp or udp
	Addr    netip.AddrPort
}

func (b Bind) String() string { return b.Network + "/" + b.Addr.String() }

// ParseBind reads the form users write: tcp/ADDRESS:PORT or
// udp/ADDRESS:FIRST-LAST. The address is an IP or nothing, which is every
// address of both families.
func ParseBind(s string) ([]Bind, error) {
	network, rest, ok := strings.Cut(s, "/")
	if !ok || (network != "tcp" && network != "udp") {
		return nil, fmt.Errorf("%q does not begin with tcp/ or udp/: write it as udp/0.0.0.0:7777", s)
	}
	colon := strings.LastIndexByte(rest, ':')
	if colon < 0 {
		return nil, fmt.Errorf("%q has no port: write it as %s/%s:7777", s, network, rest)
	}
	host, ports := rest[:colon], rest[colon+1:]
	addr := netip.IPv6Unspecified()
	if host != "" {
		bare, bracketed := host, strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]")
		if bracketed {
			bare = host[1 : len(host)-1]
		}
		var err error
		if addr, err = netip.ParseAddr(bare); err != nil {
			return nil, fmt.Errorf("%q: %q is not an IP address; leave it out to listen on all", s, host)
		}
		if addr.Is6() && !bracketed {
			return nil, fmt.Errorf("%q: an IPv6 address stands in brackets, as in [%s]:7777", s, bare)
		}
		if addr.Is4() && bracketed {
			return nil, fmt.Errorf("%q: only an IPv6 address stands in brackets", s)
		}
		addr = addr.Unmap()
	}
	first, last, ranged := strings.Cut(ports, "-")
	lo, err := parsePort(first)
	if err != nil {
		return nil, fmt.Errorf("%q: %w", s, err)
	}
	hi := lo
	if ranged {
		if hi, err = parsePort(last); err != nil {
			return nil, fmt.Errorf("%q: %w", s, err)
		}
		switch {
		case hi < lo:
			return nil, fmt.Errorf("%q: the range runs backwards: write %d-%d", s, hi, lo)
		case lo == 0:
			return nil, fmt.Errorf("%q: a range begins at port 1 or higher", s)
		case int(hi-lo)+1 > maxPorts:
			return nil, fmt.Errorf("%q: %d ports are more than %d, the most one bind may name", s, int(hi-lo)+1, maxPorts)
		}
	}
	binds := make([]Bind, 0, int(hi-lo)+1)
	for port := int(lo); port <= int(hi); port++ {
		binds = append(binds, Bind{network, netip.AddrPortFrom(addr, uint16(port))})
	}
	return binds, nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, fmt.Errorf("port %q is not a number from 0 to 65535", s)
	}
	return uint16(n), nil
}

// Binds is every address the listeners of a config bind, with the config path
// that names it.
type Binds map[Bind]string

// Add records the binds of one listener. Two that name one address are an
// error that tells both places.
func (all Binds) Add(binds []Bind, path string) error {
	for _, b := range binds {
		if other, taken := all[b]; taken && b.Addr.Port() != 0 {
			return fmt.Errorf("%s: %s is bound by %s already", path, b, other)
		}
		all[b] = path
	}
	return nil
}
