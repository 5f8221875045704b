// Package doctor looks for what keeps a host from doing what a config asks of it:
// capabilities, limits, sysctls, redirection and routes. What is there is
// gathered in gather.go, what is wanted read from the config in needs.go; each
// check here is a function of the two.
package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

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

	Rules  []Rule  // policy rules that look at marks
	Routes []Route // local ones
	Tproxy []Tproxy
	Marked bool  // a rule marks what belongs to transparent sockets
	NoNft  error // why Tproxy and Marked are not known

	GSO, GRO bool
}

// Rule is a policy rule.
type Rule struct {
	V6    bool
	Mark  uint64
	Table string
}

// Route is a local route: what it covers is this host's.
type Route struct {
	Table string
	To    netip.Prefix
}

// Tproxy is a rule that redirects.
type Tproxy struct {
	Family string // ip, ip6, or "" for both
	Port   uint16
	Mark   uint64
}

// Needs is what a config asks for.
type Needs struct {
	LowPorts    []uint16       // ports below 1024
	Transparent []Redirect     // of transparent listeners
	Prefixes    []netip.Prefix // of listeners
	Flows       int64          // sockets it may have by its limits; 0: no limit
	Sessions    int64          // max_udp_sessions
	Sources     int            // fewest source addresses of a pool, at least 1
}

// Redirect is a port that redirected traffic goes to.
type Redirect struct {
	V6   bool
	Port uint16
}

// Check applies every check.
func Check(s *State, n *Needs) []Finding {
	var found []Finding
	for _, check := range []func(*State, *Needs) []Finding{capabilities, files, ports, buffers, prefixes, redirection, reversePath, offloads} {
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
	want := uint64(n.Flows) + spareFiles
	if n.Flows == 0 || s.Files >= want {
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

// prefixes looks whether the host takes the addresses of prefixes for its own.
func prefixes(s *State, n *Needs) (found []Finding) {
	for _, p := range n.Prefixes {
		if !s.local("local", p) {
			found = append(found, Finding{"prefix", Wrong, fmt.Sprintf("the host does not take the addresses of %s for its own", p), fmt.Sprintf("ip %s route add local %s dev lo", family(!p.Addr().Is4()), p)})
		}
	}
	return found
}

// local reports whether a table has a local route over all of a prefix.
func (s *State) local(table string, p netip.Prefix) bool {
	return slices.ContainsFunc(s.Routes, func(r Route) bool {
		return r.Table == table && r.To.Addr().Is4() == p.Addr().Is4() && r.To.Bits() <= p.Bits() && r.To.Contains(p.Addr())
	})
}

func family(v6 bool) string {
	if v6 {
		return "-6"
	}
	return "-4"
}

func redirection(s *State, n *Needs) (found []Finding) {
	if len(n.Transparent) == 0 {
		return nil
	}
	if s.NoNft != nil {
		return []Finding{{"redirection", Tight, fmt.Sprintf("the rules that redirect cannot be looked at: %v", s.NoNft), "apt-get install nftables   # and run this as root"}}
	}
	checked := make(map[bool]bool)
	for _, r := range n.Transparent {
		ip, every := "ip", netip.MustParsePrefix("0.0.0.0/0")
		if r.V6 {
			ip, every = "ip6", netip.MustParsePrefix("::/0")
		}
		i := slices.IndexFunc(s.Tproxy, func(t Tproxy) bool { return (t.Family == ip || t.Family == "") && t.Port == r.Port })
		if i < 0 {
			found = append(found, Finding{"redirection", Wrong, fmt.Sprintf("no rule redirects %s traffic to port %d", ip, r.Port),
				fmt.Sprintf("nft add rule inet wayhouse prerouting %s daddr NETWORK meta l4proto '{ tcp, udp }' th dport %d tproxy %s to :%d meta mark set 1 accept", ip, r.Port, ip, r.Port)})
			continue
		}
		if checked[r.V6] {
			continue
		}
		checked[r.V6] = true
		mark := s.Tproxy[i].Mark
		k := slices.IndexFunc(s.Rules, func(rule Rule) bool { return rule.V6 == r.V6 && rule.Mark == mark && mark != 0 })
		switch {
		case mark == 0:
			found = append(found, Finding{"redirection", Wrong, fmt.Sprintf("the rule that redirects to port %d sets no mark, by which it would be delivered to this host", r.Port), "add \"meta mark set 1\" to the rule"})
		case k < 0:
			found = append(found, Finding{"policy route", Wrong, fmt.Sprintf("no rule looks up what is marked %d, so that it is not delivered to this host", mark), fmt.Sprintf("ip %s rule add fwmark %d lookup 100", family(r.V6), mark)})
		case !s.local(s.Rules[k].Table, every):
			found = append(found, Finding{"policy route", Wrong, fmt.Sprintf("table %s does not deliver everything to this host", s.Rules[k].Table), fmt.Sprintf("ip %s route add local %s dev lo table %s", family(r.V6), every, s.Rules[k].Table)})
		}
	}
	if !s.Marked {
		found = append(found, Finding{"return path", Wrong, "no rule marks what backends answer to the clients' addresses, so that it is not delivered to this host",
			"nft add rule inet wayhouse prerouting meta l4proto '{ tcp, udp }' socket transparent 1 meta mark set 1 accept"})
	}
	return found
}

// reversePath looks for interfaces that drop what comes from where answers would
// not go, which is what backends send from a client's address's point of view.
func reversePath(s *State, n *Needs) (found []Finding) {
	if len(n.Transparent) == 0 {
		return nil
	}
	for name, v := range s.Sysctls {
		if v == "1" && isReversePath(name) {
			found = append(found, Finding{"return path", Wrong, name + " is 1: what is redirected may be dropped", "sysctl -w " + name + "=2"})
		}
	}
	slices.SortFunc(found, func(a, b Finding) int { return cmpString(a.Text, b.Text) })
	return found
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
