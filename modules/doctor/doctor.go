// Package doctor looks for what keeps a host from doing what a config asks of it:
// capabilities, limits, sysctls, redirection and routes. What is there is
// gathered in gather.go, what is wanted read from the config in needs.go; each
// check here is a function of the two.
package doctor

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Level says how bad a finding is.
type Level string

// The levels.
const (
	Wrong Level = "wrong" // the config does not work here
	Tight Level = "tight" // it works, and not well or not for as many as it may
)

// Finding is one thing to mend.
type Finding struct {
	Check string `json:"check"`
	Level Level  `json:"level"`
	Text  string `json:"text"`
	Fix   string `json:"fix"` // a command
}

func (f Finding) String() string {
	return fmt.Sprintf("%s: %s [%s]\n    %s", f.Level, f.Text, f.Check, f.Fix)
}

// State is what a host has.
type State struct {
	Caps    uint64            // effective, of this process
	Files   uint64            // descriptors it may have
	Sysctls map[string]string // those that are there, by name

	Rules    []Rule  // policy rules that look at marks
	Routes   []Route // local ones
	NoRoutes error   // why these are not known
	Filter   Filter
	NoFilter error // why not all of that is known

	NoOffload error // why nftables cannot be used by this process
	GSO, GRO  bool
	XDP       []XDP
}

// XDP is a BPF program that has the packets of an interface first.
type XDP struct {
	Link string
	Mode string // as ip has it: xdpdrv, xdpgeneric or xdpoffload
	ID   int
}

// Rule is a policy rule.
type Rule struct {
	V6         bool
	Mark, Mask uint64
	Table      string
}

// Route is a local route: what it covers is this host's.
type Route struct {
	Table string
	To    netip.Prefix
}

// Needs is what a config asks for.
type Needs struct {
	LowPorts    []uint16       // ports below 1024
	UDPPorts    []uint16       // in order
	Binds       []netip.Addr   // that listeners are bound to and the host has to have
	From        []netip.Addr   // source_addresses of pools
	Transparent []Redirect     // of transparent listeners
	Prefixes    []netip.Prefix // of listeners
	Conns       int64          // max_connections; 0: no limit
	Sessions    int64          // max_udp_sessions
	Sources     int            // fewest source addresses of a pool, at least 1
	Offload     bool
}

// Redirect is a port that redirected traffic goes to.
type Redirect struct {
	V6     bool
	Port   uint16
	Protos Protos
}

// Check applies every check.
func Check(s *State, n *Needs) []Finding {
	var found []Finding
	for _, check := range []func(*State, *Needs) []Finding{
		capabilities, files, ports, buffers, conntrack, kernelHelp, offloads, programs, addresses, redirection, returnPath, reversePath,
	} {
		found = append(found, check(s, n)...)
	}
	return found
}

func (s *State) has(cap int) bool { return s.Caps&(1<<cap) != 0 }

func (s *State) number(sysctl string) (n int64, ok bool) {
	n, err := strconv.ParseInt(s.Sysctls[sysctl], 10, 64)
	return n, err == nil
}

func capabilities(s *State, n *Needs) (found []Finding) {
	if len(n.Transparent) > 0 && !s.has(unix.CAP_NET_ADMIN) && !s.has(unix.CAP_NET_RAW) {
		found = append(found, Finding{"capabilities", Wrong, "transparent listeners need the capability CAP_NET_ADMIN", "setcap cap_net_admin+ep $(command -v wayhouse)"})
	}
	first, ok := s.number("net.ipv4.ip_unprivileged_port_start")
	if !ok {
		first = 1024
	}
	for _, p := range n.LowPorts {
		if int64(p) < first && !s.has(unix.CAP_NET_BIND_SERVICE) {
			found = append(found, Finding{"capabilities", Wrong, fmt.Sprintf("port %d needs the capability CAP_NET_BIND_SERVICE", p), "setcap cap_net_bind_service+ep $(command -v wayhouse)"})
			break
		}
	}
	return found
}

// spareFiles are for all but flows.
const spareFiles = 128

func files(s *State, n *Needs) []Finding {
	flows := 2*n.Conns + n.Sessions // a connection has the client's socket and the backend's
	want := uint64(flows) + spareFiles
	if flows == 0 || s.Files >= want {
		return nil
	}
	return []Finding{{"files", Wrong, fmt.Sprintf("the limits let in flows with %d descriptors, and the process may have %d", want, s.Files), fmt.Sprintf("ulimit -n %d   # LimitNOFILE=%d in the systemd unit", want, want)}}
}

func ports(s *State, n *Needs) []Finding {
	var first, last int64
	if _, err := fmt.Sscan(s.Sysctls["net.ipv4.ip_local_port_range"], &first, &last); err != nil || n.Sessions == 0 {
		return nil
	}
	have := (last - first + 1) * int64(max(n.Sources, 1))
	if have >= n.Sessions {
		return nil
	}
	return []Finding{{"ports", Tight, fmt.Sprintf("max_udp_sessions is %d, and there are %d local ports for sessions; give pools source_addresses or the host more ports", n.Sessions, have), `sysctl -w net.ipv4.ip_local_port_range="1025 65535"`}}
}

func buffers(s *State, _ *Needs) (found []Finding) {
	for _, b := range []struct {
		name string
		want int64
	}{{"net.core.rmem_max", 1 << 20}, {"net.core.wmem_max", 1 << 20}} {
		if have, ok := s.number(b.name); ok && have < b.want && !s.has(unix.CAP_NET_ADMIN) {
			found = append(found, Finding{"buffers", Tight, fmt.Sprintf("%s is %d: sockets of UDP listeners want %d", b.name, have, b.want), fmt.Sprintf("sysctl -w %s=%d", b.name, b.want)})
		}
	}
	if have, ok := s.number("net.core.somaxconn"); ok && have < 1024 {
		found = append(found, Finding{"buffers", Tight, fmt.Sprintf("net.core.somaxconn is %d: connections that come at once are lost", have), "sysctl -w net.core.somaxconn=4096"})
	}
	return found
}

// conntrack looks at the table in which the kernel keeps connections, where a
// rule has it do so.
func conntrack(s *State, n *Needs) (found []Finding) {
	most, ok := s.number("net.netfilter.nf_conntrack_max")
	have, _ := s.number("net.netfilter.nf_conntrack_count")
	if !ok || !s.Filter.Tracked && have == 0 {
		return nil
	}
	add := func(level Level, text, fix string) {
		found = append(found, Finding{"conntrack", level, text, fix})
	}
	more := func(want int64) string { return fmt.Sprintf("sysctl -w net.netfilter.nf_conntrack_max=%d", want) }
	if have >= most-most/10 {
		add(Wrong, fmt.Sprintf("the kernel tracks %d connections of at most %d: what is new is soon dropped", have, most), more(2*most))
	}
	tracksUDP := len(n.UDPPorts) > 0 && s.Filter.NoTrack&UDP == 0
	want := 2 * n.Conns // from the client, and to the backend
	if tracksUDP {
		want += 2 * n.Sessions
	}
	if want > most {
		add(Tight, fmt.Sprintf("the limits let in flows that are %d tracked connections, and the kernel tracks at most %d", want, most), more(want))
	}
	if tracksUDP {
		add(Tight, fmt.Sprintf("the kernel tracks UDP here: a flood from many addresses fills its table of %d connections, whatever filters say", most),
			fmt.Sprintf("nft 'table inet untracked { chain in { type filter hook prerouting priority raw; udp dport { %s } notrack; }; chain out { type filter hook output priority raw; udp sport { %[1]s } notrack; }; }'", portSet(n.UDPPorts)))
	}
	return found
}

// portSet writes ports in order as nft has them.
func portSet(ports []uint16) string {
	var parts []string
	for len(ports) > 0 {
		n := 1
		for n < len(ports) && ports[n] == ports[n-1]+1 {
			n++
		}
		part := strconv.Itoa(int(ports[0]))
		if n > 1 {
			part = fmt.Sprintf("%d-%d", ports[0], ports[n-1])
		}
		parts, ports = append(parts, part), ports[n:]
	}
	return strings.Join(parts, ", ")
}

// kernelHelp looks whether the option offload can be had.
func kernelHelp(s *State, n *Needs) []Finding {
	switch {
	case !n.Offload || s.NoOffload == nil:
		return nil
	case errors.Is(s.NoOffload, os.ErrPermission):
		return []Finding{{"nftables", Wrong, fmt.Sprintf("offload: %v", s.NoOffload), "setcap cap_net_admin+ep $(command -v wayhouse)"}}
	}
	return []Finding{{"nftables", Wrong, fmt.Sprintf("offload: %v", s.NoOffload), "modprobe -a nf_tables nft_fib_inet"}}
}

func offloads(s *State, _ *Needs) (found []Finding) {
	if !s.GSO {
		found = append(found, Finding{"offload", Tight, "UDP segmentation (GSO) does not work here: bursts cost more", "unset WAYHOUSE_UDP_OFFLOAD   # or a kernel from 4.18 on"})
	}
	if !s.GRO {
		found = append(found, Finding{"offload", Tight, "UDP coalescing (GRO) does not work here: bursts cost more", "unset WAYHOUSE_UDP_OFFLOAD   # or a kernel from 5.0 on"})
	}
	return found
}

func programs(s *State, _ *Needs) (found []Finding) {
	for _, x := range s.XDP {
		found = append(found, Finding{
			"bpf", Tight, fmt.Sprintf("on %s an XDP program (%d) takes packets before the rules and sockets of this host: whom it turns away is counted nowhere here", x.Link, x.ID),
			fmt.Sprintf("ip link set dev %s %s off   # unless it is meant to be there: bpftool prog show id %d", x.Link, x.Mode, x.ID),
		})
	}
	return found
}
