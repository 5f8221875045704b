package doctor

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
)

// What becomes of packets on their way to listeners and back: whose addresses
// are the host's, what is redirected, and by which route it is delivered.

// addresses looks whether the host takes for its own what listeners and pools
// are bound to.
func addresses(s *State, n *Needs) (found []Finding) {
	if len(n.Binds)+len(n.From)+len(n.Prefixes) == 0 {
		return nil
	}
	if s.NoRoutes != nil {
		return []Finding{{"address", Tight, fmt.Sprintf("whether addresses are this host's cannot be looked at: %v", s.NoRoutes), "apt-get install iproute2"}}
	}
	for _, p := range n.Prefixes {
		if !s.local("local", p) {
			found = append(found, Finding{"prefix", Wrong, fmt.Sprintf("the host does not take the addresses of %s for its own", p), fmt.Sprintf("ip %s route add local %s dev lo", family(!p.Addr().Is4()), p)})
		}
	}
	for _, kind := range []struct {
		addrs         []netip.Addr
		what, besides string
	}{
		{n.Binds, "a listener is bound to %s, which is no address of this host", "   # or freebind in the listener, when it comes later"},
		{n.From, "source_addresses has %s, which is no address of this host", ""},
	} {
		for _, a := range kind.addrs {
			if !s.local("local", netip.PrefixFrom(a, a.BitLen())) && s.Sysctls["net."+sysctlFamily(a)+".ip_nonlocal_bind"] != "1" {
				found = append(found, Finding{"address", Wrong, fmt.Sprintf(kind.what, a), fmt.Sprintf("ip addr add %s/%d dev lo", a, a.BitLen()) + kind.besides})
			}
		}
	}
	return found
}

func sysctlFamily(a netip.Addr) string {
	if a.Is4() {
		return "ipv4"
	}
	return "ipv6"
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
	if s.NoFilter != nil {
		return []Finding{{"redirection", Tight, fmt.Sprintf("the rules that redirect cannot be looked at: %v", s.NoFilter), "apt-get install nftables   # and run this as root"}}
	}
	routed := make(map[Rule]bool)
	for _, r := range n.Transparent {
		ip, every := "ip", netip.MustParsePrefix("0.0.0.0/0")
		if r.V6 {
			ip, every = "ip6", netip.MustParsePrefix("::/0")
		}
		missing := r.Protos
		for _, t := range s.Filter.Tproxy {
			if t.Port != r.Port || !t.of(r.V6) {
				continue
			}
			missing &^= t.Protos
			if t.Mark == 0 {
				found = append(found, Finding{"redirection", Wrong, fmt.Sprintf("the rule that redirects to port %d sets no mark, by which it would be delivered to this host", r.Port), "add \"meta mark set 1\" to the rule"})
				continue
			}
			if key := (Rule{V6: r.V6, Mark: t.Mark}); !routed[key] {
				routed[key] = true
				found = append(found, s.policyRoute(r.V6, t.Mark, every)...)
			}
		}
		if missing != 0 {
			found = append(found, Finding{"redirection", Wrong, fmt.Sprintf("no rule redirects %s traffic over %s to port %d", ip, missing, r.Port),
				addRule(fmt.Sprintf("%s daddr NETWORK meta l4proto { %s } th dport %d tproxy %[1]s to :%[3]d meta mark set 1 accept", ip, missing.list(), r.Port))})
		}
	}
	return found
}

// policyRoute looks by which table what has a mark is delivered.
func (s *State) policyRoute(v6 bool, mark uint64, every netip.Prefix) []Finding {
	if s.NoRoutes != nil {
		return []Finding{{"policy route", Tight, fmt.Sprintf("the policy route cannot be looked at: %v", s.NoRoutes), "apt-get install iproute2"}}
	}
	i := slices.IndexFunc(s.Rules, func(r Rule) bool { return r.V6 == v6 && r.Mark == mark&r.Mask })
	switch {
	case i < 0:
		return []Finding{{"policy route", Wrong, fmt.Sprintf("no rule looks up what is marked %d, so that it is not delivered to this host", mark), fmt.Sprintf("ip %s rule add fwmark %d lookup 100", family(v6), mark)}}
	case !s.local(s.Rules[i].Table, every):
		return []Finding{{"policy route", Wrong, fmt.Sprintf("table %s does not deliver everything to this host", s.Rules[i].Table), fmt.Sprintf("ip %s route add local %s dev lo table %s", family(v6), every, s.Rules[i].Table)}}
	}
	return nil
}

// returnPath looks whether what backends answer is marked too.
func returnPath(s *State, n *Needs) (found []Finding) {
	if s.NoFilter != nil {
		return nil // as redirection says
	}
	var missing Protos
	for _, r := range n.Transparent {
		i := v4
		if r.V6 {
			i = v6
		}
		missing |= r.Protos &^ s.Filter.Marked[i]
	}
	if missing != 0 {
		found = append(found, Finding{"return path", Wrong, fmt.Sprintf("no rule marks what backends answer to the clients' addresses over %s, so that it is not delivered to this host", missing),
			addRule(fmt.Sprintf("meta l4proto { %s } socket transparent 1 meta mark set 1 accept", missing.list()))})
	}
	return found
}

// addRule is the command for a rule, which makes the chain where there is none.
func addRule(rule string) string {
	return "nft 'add table inet wayhouse; add chain inet wayhouse prerouting { type filter hook prerouting priority mangle; }; add rule inet wayhouse prerouting " + rule + "'"
}

// reversePath looks for interfaces that drop what comes from where answers would
// not go, which is what backends send from a client's address's point of view.
func reversePath(s *State, n *Needs) (found []Finding) {
	if len(n.Transparent) == 0 || s.Sysctls["net.ipv4.conf.all.rp_filter"] == "2" { // the larger one counts
		return nil
	}
	for name, v := range s.Sysctls {
		if v == "1" && isReversePath(name) {
			found = append(found, Finding{"return path", Wrong, name + " is 1: what is redirected may be dropped", "sysctl -w " + name + "=2"})
		}
	}
	slices.SortFunc(found, func(a, b Finding) int { return cmp.Compare(a.Text, b.Text) })
	return found
}
