package doctor

import (
	"encoding/json"
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
		Caps: 1 << unix.CAP_NET_ADMIN, Files: 10000,
		Sysctls: map[string]string{
			"net.ipv4.ip_local_port_range": "32768\t60999", "net.ipv4.ip_unprivileged_port_start": "0", "net.core.somaxconn": "4096",
			"net.core.rmem_max": "212992", "net.core.wmem_max": "212992", "net.ipv4.conf.all.rp_filter": "0", "net.ipv4.conf.default.rp_filter": "1",
		},
		Rules:  []Rule{{false, 1, "100"}, {true, 1, "100"}},
		Routes: []Route{{"100", all}, {"100", all6}, {"local", netip.MustParsePrefix("2001:db8:ace::/48")}},
		Tproxy: []Tproxy{{"ip", 7777, 1}, {"ip6", 7777, 1}},
		Marked: true, GSO: true, GRO: true,
	}
}

func wanted() *Needs {
	return &Needs{
		LowPorts: []uint16{443}, Transparent: []Redirect{{false, 7777}, {true, 7777}},
		Prefixes: []netip.Prefix{netip.MustParsePrefix("2001:db8:ace:1::/64")}, Flows: 9000, Sessions: 20000, Sources: 1,
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
		"the other capability":        {func(s *State, _ *Needs) { s.Caps |= 1 << unix.CAP_NET_RAW }, ""},
		"low port":                    {func(s *State, _ *Needs) { s.Sysctls["net.ipv4.ip_unprivileged_port_start"] = "1024" }, "capabilities wrong port 443"},
		"descriptors":                 {func(s *State, _ *Needs) { s.Files = 9000 }, "files wrong 9128"},
		"local ports":                 {func(_ *State, n *Needs) { n.Sessions = 28233 }, "ports tight 28232 local ports"},
		"local ports of two":          {func(_ *State, n *Needs) { n.Sessions, n.Sources = 28233, 2 }, ""},
		"backlog":                     {func(s *State, _ *Needs) { s.Sysctls["net.core.somaxconn"] = "128" }, "buffers tight somaxconn is 128"},
		"prefix without a route":      {func(s *State, _ *Needs) { s.Routes = s.Routes[:2] }, "prefix wrong 2001:db8:ace:1::/64"},
		"no rule redirects":           {func(s *State, _ *Needs) { s.Tproxy = s.Tproxy[1:] }, "redirection wrong no rule redirects ip traffic to port 7777"},
		"one rule for both":           {func(s *State, _ *Needs) { s.Tproxy = []Tproxy{{"", 7777, 1}} }, ""},
		"redirected elsewhere":        {func(s *State, _ *Needs) { s.Tproxy[1].Port = 7778 }, "redirection wrong no rule redirects ip6"},
		"no mark":                     {func(s *State, _ *Needs) { s.Tproxy[0].Mark = 0 }, "redirection wrong sets no mark"},
		"another mark":                {func(s *State, _ *Needs) { s.Rules[1].Mark = 2 }, "policy route wrong marked 1"},
		"no local route":              {func(s *State, _ *Needs) { s.Routes = s.Routes[1:] }, "policy route wrong table 100"},
		"answers are not marked":      {func(s *State, _ *Needs) { s.Marked = false }, "return path wrong no rule marks"},
		"strict reverse path":         {func(s *State, _ *Needs) { s.Sysctls["net.ipv4.conf.eth0.rp_filter"] = "1" }, "return path wrong net.ipv4.conf.eth0.rp_filter"},
		"strict, nothing transparent": {func(s *State, n *Needs) { s.Sysctls["net.ipv4.conf.eth0.rp_filter"] = "1"; n.Transparent = nil }, ""},
		"rules unknown":               {func(s *State, _ *Needs) { s.NoNft = errors.New("no nft") }, "redirection tight no nft"},
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

func TestRule(t *testing.T) {
	var s State
	for _, expr := range []string{
		`[{"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "daddr"}}, "right": {"prefix": {"addr": "198.51.100.0", "len": 24}}}},
		  {"tproxy": {"family": "ip", "port": 7777}}, {"mangle": {"key": {"meta": {"key": "mark"}}, "value": 1}}, {"accept": null}]`,
		`[{"match": {"op": "==", "left": {"socket": {"key": "transparent"}}, "right": 1}}, {"mangle": {"key": {"meta": {"key": "mark"}}, "value": 1}}]`,
		`[{"tproxy": 7}, {"mangle": {"key": "x", "value": {"set": []}}}, {"match": null}]`,
	} {
		var e []map[string]json.RawMessage
		if err := json.Unmarshal([]byte(expr), &e); err != nil {
			t.Fatal(err)
		}
		s.rule(e)
	}
	if len(s.Tproxy) == 0 || s.Tproxy[0] != (Tproxy{"ip", 7777, 1}) || !s.Marked {
		t.Errorf("read as %+v, marked %v", s.Tproxy, s.Marked)
	}
}
