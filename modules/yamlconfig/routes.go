package yamlconfig

import (
	"slices"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// action is a route as the checks between the parts see it.
type action struct {
	at       value
	match    string // the type of the matcher
	sniffer  string
	pool     string
	resolver string
}

// same reports whether two routes lead to the same place.
func (a *action) same(b *action) bool { return a.pool == b.pool && a.resolver == b.resolver }

// routes reads the routes of a listener, or its pool.
func (d *document) routes(f *fields, l *listenerOf) (all []object) {
	short, list := f.get("pool"), f.get("routes")
	switch {
	case short.given() && list.given():
		list.fail("pool is given too: a listener has one of the two")
	case short.given():
		name := short.some()
		known(short, "pool", name, d.pools)
		l.actions = append(l.actions, action{at: short, match: "always", pool: name})
		return []object{{"handle": []object{{"handler": "pool", "pool": name}}}}
	case f.given() && (!list.given() || list.n.Content == nil):
		f.fail("neither pool nor routes is given: at least one route is needed, or everything would be dropped")
	}
	for _, v := range list.list() {
		if d.spent() {
			break
		}
		r, a := v.fields(), action{at: v}
		match := d.match(r.need("match", "type: always takes everything").fields(), l, &a)
		handler := d.action(r.need("action", "where the flows go").fields(), &a)
		r.end()
		l.actions = append(l.actions, a)
		o := object{"handle": []object{handler}}
		if match != nil {
			o["match"] = []object{match}
		}
		all = append(all, o)
	}
	return all
}

// action reads the place that a route leads to.
func (d *document) action(f *fields, a *action) object {
	pool, resolver := f.get("pool"), f.get("resolver")
	a.pool, a.resolver = pool.some(), resolver.some()
	switch {
	case pool.given() == resolver.given() && f.given():
		f.fail("an action has exactly one of pool and resolver")
	case pool.given():
		known(pool, "pool", a.pool, d.pools)
	case resolver.given():
		known(resolver, "resolver", a.resolver, d.resolvers)
	}
	f.end()
	if resolver.given() {
		return object{"handler": "resolve", "resolver": a.resolver}
	}
	return object{"handler": "pool", "pool": a.pool}
}

// match reads a matcher. It is nil for one that takes everything.
func (d *document) match(f *fields, l *listenerOf, a *action) object {
	a.match = f.need("type", "always, client_cidr, dst, port, first_bytes, sni or sniffer").
		oneOf("always", "client_cidr", "dst", "port", "first_bytes", "sni", "sniffer")
	defer f.end()
	o := object{}
	switch a.match {
	case "always":
		return nil
	case "client_cidr", "dst":
		o["cidrs"] = f.need("cidrs", "the networks or addresses").texts()
	case "port":
		o["ports"] = f.need("ports", "numbers, or ranges such as 30000-30009").ports()
	case "first_bytes":
		o.set("prefix", f.get("prefix").some())
		if n := f.get("length").fields(); n.given() {
			length := object{}
			length.whole("min", n.get("min"), 0, 65535)
			length.whole("max", n.get("max"), 0, 65535)
			n.end()
			o["length"] = length
		}
	case "sni":
		o.set("host", d.hosts(f))
	case "sniffer":
		return d.snifferMatch(f, a)
	default:
		f.entries(func(string, value) bool { return true })
		return nil
	}
	f.ask("layer4.matchers."+a.match, o, nil)
	return object{a.match: o}
}

// hosts are the names that a match gives, or its suffix.
func (d *document) hosts(f *fields) []string {
	hosts, suffix := f.get("host"), f.get("suffix")
	if s := suffix.some(); s != "" {
		if hosts.given() {
			suffix.fail("host is given too: write the suffix there, as .example.com or *.example.com")
		}
		if s[0] != '.' {
			s = "." + s
		}
		return []string{s}
	}
	return hosts.textOrTexts()
}

// snifferMatch reads a matcher that asks a sniffer. Which there are in a
// directory is known when it is read, at load.
func (d *document) snifferMatch(f *fields, a *action) object {
	name := f.get("sniffer")
	if n := f.get("name"); n.given() {
		if name.given() {
			n.fail("sniffer is given too: leave one of the two out")
		}
		name = n
	}
	if !name.given() && f.given() {
		f.fail("sniffer is missing: the name of one, such as minecraft")
	}
	a.sniffer = name.some()
	if names := suggest.Modules("wayhouse.sniffers"); a.sniffer != "" && !d.sniffers && !slices.Contains(names, a.sniffer) {
		name.fail("there is no sniffer %q, and settings.sniffers names no directory of others; %s", a.sniffer, suggest.Hint(a.sniffer, names))
	}
	o := object{"name": a.sniffer}
	hosts := d.hosts(f)
	if _, err := sniff.ParseHosts(hosts); err != nil {
		f.blame(err, nil)
	}
	o.set("host", hosts)
	return object{"sniffer": o}
}

// ports are numbers and ranges.
func (v value) ports() []any {
	all := []any{}
	for _, e := range v.list() {
		if e.n.Tag == "!!int" {
			if n, ok := e.number(1, 65535); ok {
				all = append(all, n)
			}
			continue
		}
		all = append(all, e.some())
	}
	return all
}
