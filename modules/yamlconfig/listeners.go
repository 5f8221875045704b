package yamlconfig

import (
	"net/netip"
	"strings"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// listenerOf is what the checks between the parts have to know of a listener.
type listenerOf struct {
	name        string
	bind        value
	udp         bool
	binds       []listener.Bind
	prefix      value
	covers      netip.Prefix // of prefix
	transparent value
	gate        value
	actions     []action
}

// filter reads an element of filters, which listeners name.
func (d *document) filter(_ string, f *fields) object {
	kind := f.need("type", "deny_cidr, allow_cidr or rate_limit").oneOf("deny_cidr", "allow_cidr", "rate_limit")
	switch kind {
	case "deny_cidr", "allow_cidr":
		o := object{"filter": "acl"}
		o.set(strings.TrimSuffix(kind, "_cidr"), f.need("cidrs", "the networks").texts())
		f.ask("wayhouse.filters.acl", without(o, "filter"), map[string]string{"allow": "cidrs", "deny": "cidrs"})
		return o
	case "rate_limit":
		scope := f.need("scope", "src_ip or src_/24")
		key := map[string]string{"src_ip": "per_ip", "src_/24": "per_net"}[scope.oneOf("src_ip", "src_/24", "global")]
		if scope.given() && key == "" && scope.n.Value == "global" {
			scope.fail("a limit for everybody together is settings.limits.max_new_sessions_per_sec")
		}
		rate := object{}
		rate.whole("rate", f.need("new_per_sec", "how many a second"), 1, 1000000)
		rate.whole("burst", f.get("burst"), 1, 1000000)
		return object{"filter": "rate_limit", key: rate}
	}
	f.entries(func(string, value) bool { return true })
	return nil
}

// listener reads an element of listeners.
func (d *document) listener(name string, f *fields) object {
	l, o := &listenerOf{name: name}, object{}
	d.listeners = append(d.listeners, l)
	if err := listener.CheckName(name); name != "" && err != nil {
		f.get("name").fail("%s", err)
	}
	network := f.need("protocol", "tcp or udp").oneOf("tcp", "udp")
	l.udp = network == "udp"
	l.bind = f.need("bind", "an address, such as 0.0.0.0:7777 or 0.0.0.0:30000-30099")
	if addr := l.bind.some(); addr != "" && network != "" {
		var err error
		if l.binds, err = listener.ParseBind(network + "/" + addr); err != nil {
			l.bind.fail("%s", err)
		}
		o["bind"] = []string{network + "/" + addr}
	}
	d.addresses(f, l, o)
	o.set("filters", d.listenerFilters(f))
	peek := object{}
	peek.millis("timeout", f.get("peek_timeout_ms"))
	peek.whole("max_bytes", f.get("peek_max_bytes"), 1, 16384)
	o.set("peek", peek)
	o.set("route_hint", f.get("route_hint").truth())
	l.gate = f.get("first_packet_gate")
	o.set("first_packet_gate", l.gate.truth())
	if v := f.get("plugin_routes"); v.given() {
		v.fail("%s", noFleet)
	}
	o.set("routes", d.routes(f, l))
	return o
}

// addresses reads the options about addresses.
func (d *document) addresses(f *fields, l *listenerOf, o object) {
	l.prefix, l.transparent = f.get("prefix"), f.get("transparent")
	freebind := f.get("freebind")
	text := l.prefix.some()
	o.set("prefix", text)
	o.set("transparent", l.transparent.truth())
	o.set("freebind", freebind.truth())
	if freebind.truth() && l.udp {
		freebind.fail("is for TCP: a UDP listener takes a prefix, or transparent")
	}
	if text == "" {
		return
	}
	var err error
	if l.covers, err = cidr.Parse(text); err != nil {
		l.prefix.fail("%s", err)
		return
	}
	switch {
	case !l.udp:
		l.prefix.fail("is for protocol: udp; a TCP listener takes freebind, or transparent")
	case l.transparent.truth():
		l.transparent.fail("the listener has a prefix: both say which addresses are served; leave one out")
	case len(l.binds) > 1:
		l.bind.fail("the listener has a prefix, which takes one port and no range")
	case len(l.binds) == 1:
		wildcard := netip.IPv6Unspecified()
		if l.covers.Addr().Is4() {
			wildcard = netip.IPv4Unspecified()
		}
		if a := l.binds[0].Addr; a.Addr() != wildcard {
			l.bind.fail("the listener has a prefix, %s: bind the wildcard address of its family, %s", l.covers, netip.AddrPortFrom(wildcard, a.Port()))
		}
	}
}

// listenerFilters are the filters of a listener, in the order in which they are
// asked: its own, and then those that it names.
func (d *document) listenerFilters(f *fields) (all []object) {
	allow, deny := f.get("allow"), f.get("deny")
	if allow.given() || deny.given() {
		acl := object{}
		acl.set("allow", allow.texts())
		acl.set("deny", deny.texts())
		if len(acl) > 0 { // empty lists let everybody in, as none do
			f.ask("wayhouse.filters.acl", acl, nil)
			acl["filter"] = "acl"
			all = append(all, acl)
		}
	}
	if g := f.get("geo").fields(); g.given() {
		geo := object{"filter": "geo"}
		for _, key := range []string{"allow", "deny"} {
			list := g.get(key)
			geo.set(key, list.texts())
			for _, c := range list.list() {
				if s := c.text(); !countryCode(s) {
					c.fail("%q is not two letters of ISO 3166-1, such as DE", s)
				}
			}
		}
		g.end()
		if len(geo) == 1 {
			g.fail("allow and deny are both empty: give a country, such as DE")
		}
		if !d.geo {
			g.fail("needs a database: give its path in settings.geo_db")
		}
		all = append(all, geo)
	}
	if r := f.get("rate_limit").fields(); r.given() {
		limit := object{"filter": "rate_limit"}
		for _, key := range []string{"per_ip", "per_net"} {
			if p := r.get(key).fields(); p.given() {
				rate := object{}
				rate.whole("rate", p.need("rate", "how many a second"), 1, 1000000)
				rate.whole("burst", p.get("burst"), 1, 1000000)
				p.end()
				limit[key] = rate
			}
		}
		r.end()
		if len(limit) == 1 {
			r.fail("neither per_ip nor per_net is given: give at least one")
		}
		all = append(all, limit)
	}
	if s := f.get("per_source").fields(); s.given() {
		limit := object{"filter": "source_limit"}
		limit.whole("max_per_ip", s.get("max_per_ip"), 1, 1<<62)
		limit.whole("max_per_net", s.get("max_per_net"), 1, 1<<62)
		if !s.get("max_per_ip").given() && !s.get("max_per_net").given() {
			s.fail("neither max_per_ip nor max_per_net is given: give at least one")
		}
		s.end()
		all = append(all, limit)
	}
	for _, v := range f.get("filters").list() {
		if name := v.some(); known(v, "filter", name, d.filters) {
			all = append(all, d.filters[name])
		}
	}
	return all
}

func countryCode(s string) bool {
	letter := func(c byte) bool { return 'a' <= c|0x20 && c|0x20 <= 'z' }
	return len(s) == 2 && letter(s[0]) && letter(s[1])
}
