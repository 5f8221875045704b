package docker

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/wayhouse-proxy/wayhouse/internal/portrange"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

// container is what the daemon's list says of one. Only what is used is read.
type container struct {
	ID         string            `json:"Id"`
	Names      []string          `json:"Names"`
	Labels     map[string]string `json:"Labels"`
	Ports      []exposed         `json:"Ports"`
	HostConfig struct {
		NetworkMode string `json:"NetworkMode"`
	} `json:"HostConfig"`
	NetworkSettings struct {
		Networks map[string]*attachment `json:"Networks"`
	} `json:"NetworkSettings"`
}

// exposed is a port that an image exposes or that is published on the host: one
// entry for each address that it is published on.
type exposed struct {
	IP          string `json:"IP"` // of the host
	PrivatePort uint16 `json:"PrivatePort"`
	PublicPort  uint16 `json:"PublicPort"` // 0: not published
	Type        string `json:"Type"`       // tcp, udp, sctp
}

// attachment is a container's place in a network.
type attachment struct {
	IPAddress         string `json:"IPAddress"`
	GlobalIPv6Address string `json:"GlobalIPv6Address"`
}

// composeProject is the label by which Compose says whose container it is. A
// network has the project's name in front of the one in the Compose file.
const composeProject = "com.docker.compose.project"

// hostNetwork and joined are values of NetworkMode; behind joined stands the ID
// of the container whose network it is.
const (
	hostNetwork = "host"
	joined      = "container:"
)

// name is what people call the container.
func (c *container) name() string {
	if len(c.Names) > 0 {
		return strings.TrimPrefix(c.Names[0], "/")
	}
	return c.ID[:min(len(c.ID), 12)]
}

// joins returns the ID of the container whose network it is in, or "".
func (c *container) joins() string {
	id, ok := strings.CutPrefix(c.HostConfig.NetworkMode, joined)
	if !ok {
		return ""
	}
	return id
}

// port is which port of a container it is about.
type port struct {
	portrange.Range
	proto string // tcp, udp; "": either
}

// parsePort reads a port or a range of ports, with or without a protocol.
func parsePort(s string) (port, error) {
	number, proto, named := strings.Cut(s, "/")
	if named && proto != "tcp" && proto != "udp" {
		return port{}, fmt.Errorf("%.40q is no port: behind the slash stands tcp or udp", s)
	}
	if len(number) > len("65535-65535") {
		return port{}, fmt.Errorf("%.40q is no port, such as 7777, 7777/udp or 7000-7099", s)
	}
	r, err := portrange.Parse(number)
	if err != nil {
		return port{}, err
	}
	return port{r, proto}, nil
}

// takes reports whether p means a port that the daemon tells of. A port of
// another protocol than TCP and UDP is nobody's.
func (p port) takes(e exposed) bool {
	return (e.Type == "tcp" || e.Type == "udp") && (p.proto == "" || p.proto == e.Type) &&
		p.First <= e.PrivatePort && e.PrivatePort <= p.Last
}

// anyPort is the port of a container that has only one.
var anyPort = port{Range: portrange.Range{First: 1, Last: 65535}}

// wants says how containers become endpoints. A label of the container goes
// before what the source says.
type wants struct {
	prefix    string
	network   string
	port      port
	published bool
	family    string // ipv4, ipv6; "": IPv4 where there is one
	host      netip.Addr
}

// The labels, behind the prefix and a dot.
const (
	labelPort     = "port"
	labelNetwork  = "network"
	labelWeight   = "weight"
	labelPriority = "priority"
	labelSessions = "max_sessions"
)

// endpoint makes an endpoint of a container. net is the container whose network
// it is in, c itself for most. The error says why it is left out.
func (w *wants) endpoint(c, net *container) (discovery.Endpoint, error) {
	var e discovery.Endpoint
	p, network, err := w.read(c, &e)
	if err != nil {
		return e, err
	}
	if net == nil {
		return e, errors.New("the container whose network it shares is not there")
	}
	switch {
	case net.HostConfig.NetworkMode == hostNetwork:
		e.Addr, err = w.onHost(net, p)
	case w.published:
		e.Addr, err = w.publishedPort(net, p)
	default:
		e.Addr, err = w.inNetwork(net, p, network)
	}
	return e, err
}

// read reads the labels.
func (w *wants) read(c *container, e *discovery.Endpoint) (p port, network string, err error) {
	p, network = w.port, w.network
	label := func(name string) (string, bool) {
		v, ok := c.Labels[w.prefix+"."+name]
		return v, ok
	}
	bad := func(name string, err error) error { return fmt.Errorf("the label %s.%s: %w", w.prefix, name, err) }
	if v, ok := label(labelPort); ok {
		if p, err = parsePort(v); err != nil {
			return p, "", bad(labelPort, err)
		}
	}
	if v, ok := label(labelNetwork); ok {
		if network = v; v == "" {
			return p, "", bad(labelNetwork, errors.New("it names none"))
		}
	}
	for _, n := range []struct {
		name        string
		least, most int64
		set         func(int64)
	}{
		{labelWeight, 1, 1<<32 - 1, func(n int64) { e.Weight = uint32(n) }},
		{labelPriority, 0, 1<<16 - 1, func(n int64) { e.Priority = uint16(n) }},
		{labelSessions, 1, 1<<63 - 1, func(n int64) { e.MaxSessions = n }},
	} {
		v, ok := label(n.name)
		if !ok {
			continue
		}
		i, err := strconv.ParseInt(v, 10, 64)
		if err != nil || i < n.least || i > n.most {
			return p, "", bad(n.name, fmt.Errorf("%.40q is not a whole number from %d to %d", v, n.least, n.most))
		}
		n.set(i)
	}
	return p, network, nil
}

// number is the one port of a container that p means. What an image exposes is
// only a hint: a port that is told in full needs no such hint.
func (w *wants) number(c *container, p port) (uint16, error) {
	if p.First == p.Last {
		return p.First, nil
	}
	var found []uint16
	for _, e := range c.Ports {
		if p.takes(e) && !slices.Contains(found, e.PrivatePort) {
			found = append(found, e.PrivatePort)
		}
	}
	return one(found, w.prefix)
}

// one is the port where there is only one.
func one(found []uint16, prefix string) (uint16, error) {
	switch len(found) {
	case 0:
		return 0, fmt.Errorf("it has no such port; say which in the label %s.%s", prefix, labelPort)
	case 1:
		return found[0], nil
	}
	slices.Sort(found)
	return 0, fmt.Errorf("it has the ports %s; say which in the label %s.%s", some(found), prefix, labelPort)
}

// onHost is the address of a container on the host's network.
func (w *wants) onHost(c *container, p port) (netip.AddrPort, error) {
	n, err := w.number(c, p)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return w.atHost(n, "it is on the host's network")
}

func (w *wants) atHost(n uint16, why string) (netip.AddrPort, error) {
	if !w.host.IsValid() {
		return netip.AddrPort{}, fmt.Errorf("%s, and host_address does not say where the host is", why)
	}
	return netip.AddrPortFrom(w.host, n), nil
}

// publishedPort is the address of the host that a port is published at.
func (w *wants) publishedPort(c *container, p port) (netip.AddrPort, error) {
	byPort := make(map[uint16][]netip.Addr)
	for _, e := range c.Ports {
		if e.PublicPort == 0 || !p.takes(e) {
			continue
		}
		at := w.host // published on every address of the host
		if e.IP != "" {
			a, err := netip.ParseAddr(e.IP)
			if err != nil {
				return netip.AddrPort{}, fmt.Errorf("it is published at %.60q, which is no address", e.IP)
			}
			if a = a.Unmap(); !a.IsUnspecified() {
				at = a
			}
		}
		byPort[e.PublicPort] = append(byPort[e.PublicPort], at)
	}
	ports := slices.Collect(maps.Keys(byPort))
	if len(ports) == 0 {
		return netip.AddrPort{}, errors.New("no such port of it is published")
	}
	n, err := one(ports, w.prefix)
	if err != nil {
		return netip.AddrPort{}, err
	}
	at := byPort[n]
	slices.SortFunc(at, netip.Addr.Compare) // IPv4 is less
	for _, a := range at {
		if a.IsValid() && w.wantsFamily(a) {
			return netip.AddrPortFrom(a, n), nil
		}
	}
	if slices.Contains(at, netip.Addr{}) {
		return w.atHost(n, "it is published on every address")
	}
	return netip.AddrPort{}, fmt.Errorf("it is published at no %s address", w.family)
}

// inNetwork is the address of a container in a network that both are in.
func (w *wants) inNetwork(c *container, p port, network string) (netip.AddrPort, error) {
	var nets []string
	addrs := make(map[string]netip.Addr)
	for name, at := range c.NetworkSettings.Networks {
		if at == nil {
			continue
		}
		if a := w.choose(at); a.IsValid() {
			addrs[name] = a
			nets = append(nets, name)
		}
	}
	slices.Sort(nets)
	name, err := pickNetwork(nets, network, c.Labels[composeProject], w.prefix)
	if err != nil {
		return netip.AddrPort{}, err
	}
	n, err := w.number(c, p)
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.AddrPortFrom(addrs[name], n), nil
}

// pickNetwork chooses among the networks that a container has an address in.
func pickNetwork(nets []string, want, project, prefix string) (string, error) {
	if want != "" {
		for _, name := range []string{want, project + "_" + want} {
			if slices.Contains(nets, name) {
				return name, nil
			}
		}
		if len(nets) == 0 {
			return "", fmt.Errorf("it has no address in the network %.60q, or in another", want)
		}
		return "", fmt.Errorf("it has no address in the network %.60q, only in %s", want, some(nets))
	}
	switch len(nets) {
	case 0:
		return "", errors.New("it has no address in any network")
	case 1:
		return nets[0], nil
	}
	return "", fmt.Errorf("it is in the networks %s; say which in the option network or the label %s.%s", some(nets), prefix, labelNetwork)
}

// choose returns the address of the wanted family, an invalid one where there
// is none.
func (w *wants) choose(at *attachment) netip.Addr {
	for _, s := range []string{at.IPAddress, at.GlobalIPv6Address} {
		a, err := netip.ParseAddr(s)
		if err == nil && a.Zone() == "" && w.wantsFamily(a.Unmap()) && !a.IsUnspecified() {
			return a.Unmap()
		}
	}
	return netip.Addr{}
}

func (w *wants) wantsFamily(a netip.Addr) bool {
	return w.family == "" || (w.family == ipv6) == a.Is6()
}

// some lists at most a few things, for errors.
func some[T cmp.Ordered](list []T) string {
	const most = 5
	var b strings.Builder
	for i, v := range list {
		if i == most {
			fmt.Fprintf(&b, " and %d more", len(list)-most)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%.60s", fmt.Sprint(v))
	}
	return b.String()
}
