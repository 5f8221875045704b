package doctor

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// sound is a host on which nothing is wrong for wanted.
func sound() *State {
	all, all6 := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	return &State{
		Caps: 1 << unix.CAP_NET_ADMIN, Files: 100_000,
		Sysctls: map[string]string{
			"net.ipv4.ip_local_port_range": "32768\t60999", "net.ipv4.ip_unprivileged_port_start": "0", "net.core.somaxconn": "4096",
			"net.core.rmem_max": "212992", "net.core.wmem_max": "212992", "net.ipv4.ip_nonlocal_bind": "0", "net.ipv6.ip_nonlocal_bind": "0",
			"net.netfilter.nf_conntrack_max": "65536", "net.netfilter.nf_conntrack_count": "0", "net.ipv4.conf.all.rp_filter": "0", "net.ipv4.conf.default.rp_filter": "1",
		},
		Rules:  []Rule{{false, 1, 0xff, "100"}, {true, 1, 0xff, "100"}},
		Routes: []Route{{"100", all}, {"100", all6}, {"local", netip.MustParsePrefix("2001:db8:ace::/48")}, {"local", netip.MustParsePrefix("192.0.2.1/32")}},
		Filter: Filter{Tproxy: []Tproxy{{"ip", both, 7777, 0x101}, {"ip6", both, 7777, 0x101}}, Marked: [families]Protos{both, both}},
		GSO:    true, GRO: true,
	}
}

func wanted() *Needs {
	return &Needs{
		LowPorts: []uint16{443}, UDPPorts: []uint16{7777}, Transparent: []Redirect{{false, 7777, both}, {true, 7777, both}},
		Binds: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:ace::1")}, From: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		Prefixes: []netip.Prefix{netip.MustParsePrefix("2001:db8:ace:1::/64")}, Conns: 2000, Sessions: 5000, Sources: 1, Offload: true,
	}
}

func TestCheck(t *testing.T) {
	for name, tc := range map[string]struct {
		spoil func(*State, *Needs)
		want  string // check, level and part of the text; "" is nothing
	}{
		"sound": {func(*State, *Needs) {}, ""},
		"no capability": {func(s *State, _ *Needs) {
			s.Caps = 0
			s.Sysctls["net.core.rmem_max"], s.Sysctls["net.core.wmem_max"] = "1048576", "1048576"
		}, "capabilities wrong transparent listeners"},
		"the other capability": {func(s *State, _ *Needs) { s.Caps |= 1 << unix.CAP_NET_RAW }, ""},
		"low port":             {func(s *State, _ *Needs) { s.Sysctls["net.ipv4.ip_unprivileged_port_start"] = "1024" }, "capabilities wrong port 443"},
		"descriptors":          {func(s *State, _ *Needs) { s.Files = 9000 }, "files wrong 9128"},
		"local ports":          {func(_ *State, n *Needs) { n.Sessions = 28233 }, "ports tight 28232 local ports"},
		"local ports of two":   {func(_ *State, n *Needs) { n.Sessions, n.Sources = 28233, 2 }, ""},
		"backlog":              {func(s *State, _ *Needs) { s.Sysctls["net.core.somaxconn"] = "128" }, "buffers tight somaxconn is 128"},
		"connections nearly all tracked": {func(s *State, _ *Needs) {
			s.Sysctls["net.netfilter.nf_conntrack_count"] = "58983"
			s.Filter.NoTrack = UDP
		}, "conntrack wrong 58983 connections of at most 65536"},
		"room for more": {func(s *State, _ *Needs) {
			s.Sysctls["net.netfilter.nf_conntrack_count"] = "58000"
			s.Filter.NoTrack = UDP
		}, ""},
		"UDP is tracked":           {func(s *State, _ *Needs) { s.Filter.Tracked = true }, "conntrack tight tracks UDP here"},
		"TCP alone is not tracked": {func(s *State, _ *Needs) { s.Filter.Tracked, s.Filter.NoTrack = true, TCP }, "conntrack tight tracks UDP here"},
		"more than is tracked": {func(s *State, n *Needs) {
			s.Filter.Tracked, s.Filter.NoTrack = true, UDP
			n.Conns = 32769
			s.Files = 1e6
		}, "conntrack tight 65538 tracked connections, and the kernel tracks at most 65536"},
		"no connection is tracked":      {func(s *State, _ *Needs) { delete(s.Sysctls, "net.netfilter.nf_conntrack_max"); s.Filter.Tracked = true }, ""},
		"offload without the right":     {func(s *State, _ *Needs) { s.NoOffload = unix.EPERM }, "nftables wrong offload: operation not permitted"},
		"offload without nftables":      {func(s *State, _ *Needs) { s.NoOffload = errors.New("no nftables") }, "nftables wrong no nftables"},
		"no offload":                    {func(s *State, n *Needs) { s.NoOffload = unix.EPERM; n.Offload = false }, ""},
		"prefix without a route":        {func(s *State, _ *Needs) { s.Routes[2].To = netip.MustParsePrefix("2001:db8:ace::1/128") }, "prefix wrong 2001:db8:ace:1::/64"},
		"bound to an address of nobody": {func(_ *State, n *Needs) { n.Binds[0] = netip.MustParseAddr("192.0.2.2") }, "address wrong a listener is bound to 192.0.2.2"},
		"from an address of nobody":     {func(_ *State, n *Needs) { n.From[0] = netip.MustParseAddr("2001:db8::2") }, "address wrong source_addresses has 2001:db8::2"},
		"nonlocal_bind": {func(s *State, n *Needs) {
			n.Binds[0], s.Sysctls["net.ipv4.ip_nonlocal_bind"] = netip.MustParseAddr("192.0.2.2"), "1"
		}, ""},
		"routes unknown": {func(s *State, n *Needs) {
			s.Rules, s.Routes, s.NoRoutes, n.Transparent = nil, nil, errors.New("no ip"), nil
		}, "address tight no ip"},
		"no rule redirects":      {func(s *State, _ *Needs) { s.Filter.Tproxy = s.Filter.Tproxy[1:] }, "redirection wrong no rule redirects ip traffic over TCP and UDP to port 7777"},
		"one protocol alone":     {func(s *State, _ *Needs) { s.Filter.Tproxy[1].Protos = TCP }, "redirection wrong no rule redirects ip6 traffic over UDP to port 7777"},
		"one rule for both":      {func(s *State, _ *Needs) { s.Filter.Tproxy = []Tproxy{{"", both, 7777, 1}} }, ""},
		"one for each":           {func(s *State, _ *Needs) { s.Filter.Tproxy = []Tproxy{{"", TCP, 7777, 1}, {"", UDP, 7777, 1}} }, ""},
		"redirected elsewhere":   {func(s *State, _ *Needs) { s.Filter.Tproxy[1].Port = 7778 }, "redirection wrong no rule redirects ip6"},
		"no mark":                {func(s *State, _ *Needs) { s.Filter.Tproxy[0].Mark = 0 }, "redirection wrong sets no mark"},
		"another mark":           {func(s *State, _ *Needs) { s.Rules[1].Mark = 2 }, "policy route wrong marked 257"},
		"another mask":           {func(s *State, _ *Needs) { s.Rules[1].Mask = 0xffff }, "policy route wrong marked 257"},
		"no local route":         {func(s *State, _ *Needs) { s.Routes = s.Routes[1:] }, "policy route wrong table 100"},
		"answers are not marked": {func(s *State, _ *Needs) { s.Filter.Marked = [families]Protos{} }, "return path wrong over TCP and UDP"},
		"those over UDP are not": {func(s *State, _ *Needs) { s.Filter.Marked[v6] = TCP }, "return path wrong over UDP"},
		"loose for all": {func(s *State, _ *Needs) {
			s.Sysctls["net.ipv4.conf.eth0.rp_filter"], s.Sysctls["net.ipv4.conf.all.rp_filter"] = "1", "2"
		}, ""},
		"strict reverse path":         {func(s *State, _ *Needs) { s.Sysctls["net.ipv4.conf.eth0.rp_filter"] = "1" }, "return path wrong net.ipv4.conf.eth0.rp_filter"},
		"strict, nothing transparent": {func(s *State, n *Needs) { s.Sysctls["net.ipv4.conf.eth0.rp_filter"] = "1"; n.Transparent = nil }, ""},
		"rules unknown":               {func(s *State, _ *Needs) { s.NoFilter = errors.New("no nft") }, "redirection tight no nft"},
		"an XDP program":              {func(s *State, _ *Needs) { s.XDP = []XDP{{"eth0", "xdpdrv", 12}} }, "bpf tight on eth0 an XDP program (12)"},
		"no GSO":                      {func(s *State, _ *Needs) { s.GSO = false }, "offload tight GSO"},
	} {
		t.Run(name, func(t *testing.T) {
			s, n := sound(), wanted()
			tc.spoil(s, n)
			found := Check(s, n)
			if tc.want == "" {
				if len(found) > 0 {
					t.Errorf("found %v", found)
				}
				return
			}
			if len(found) != 1 {
				t.Fatalf("found %v, want one thing", found)
			}
			f := found[0]
			rest, ok := strings.CutPrefix(tc.want, f.Check+" "+string(f.Level)+" ")
			if !ok || !strings.Contains(f.Text, rest) || f.Fix == "" {
				t.Errorf("found %+v, want %s", f, tc.want)
			}
		})
	}
}
