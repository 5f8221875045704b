package lint

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	listening "github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	resolving "github.com/wayhouse-proxy/wayhouse/modules/resolver"
)

// What is named, listed and timed.

// nestedCIDRs looks at the lists of networks.
func nestedCIDRs(d *document, found report) {
	d.each(func(l *listener, i int, path string) {
		for s, set := range l.Routes[i].Match {
			nestedIn(set, fmt.Sprintf("%s.match[%d]", path, s), found)
		}
	})
	for _, name := range d.names {
		for i, f := range d.app.Listeners[name].Filters {
			for key, raw := range map[string]json.RawMessage{"allow": f.Allow, "deny": f.Deny} {
				var list []string
				if f.Kind == "acl" && json.Unmarshal(raw, &list) == nil {
					nested(list, fmt.Sprintf("%s.filters[%d].%s", listenerPath(name), i, key), found)
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(d.app.Resolvers)) {
		nested(d.app.Resolvers[name].AllowTargets, "apps.wayhouse.resolvers."+name+".allow_targets", found)
	}
}

// nestedIn looks at the lists in a set of matchers.
func nestedIn(set map[string]json.RawMessage, path string, found report) {
	for _, m := range []struct{ name, key string }{{"client_cidr", "cidrs"}, {"dst", "cidrs"}, {"remote_ip", "ranges"}, {"local_ip", "ranges"}} {
		var o map[string][]string
		if json.Unmarshal(set[m.name], &o) == nil {
			nested(o[m.key], fmt.Sprintf("%s.%s.%s", path, m.name, m.key), found)
		}
	}
	var not []map[string]json.RawMessage
	if json.Unmarshal(set["not"], &not) == nil {
		for i, in := range not {
			nestedIn(in, fmt.Sprintf("%s.not[%d]", path, i), found)
		}
	}
}

// nested finds networks that another one of the list contains.
func nested(list []string, path string, found report) {
	type entry struct {
		p netip.Prefix
		i int
	}
	var all []entry
	for i, s := range list {
		if p, err := cidr.Parse(s); err == nil { // placeholders are not
			all = append(all, entry{p, i})
		}
	}
	seen := make(map[netip.Prefix]int)
	for _, e := range all {
		if _, twice := seen[e.p]; !twice {
			seen[e.p] = e.i
		}
	}
	for _, e := range all {
		if first := seen[e.p]; first != e.i {
			found("nested_cidr", fmt.Sprintf("%s[%d]", path, e.i), "%s is %s, which is in the list already: drop one", list[e.i], list[first])
			continue
		}
		for bits := e.p.Bits() - 1; bits >= 0; bits-- {
			wider, _ := e.p.Addr().Prefix(bits)
			if i, ok := seen[wider]; ok {
				found("nested_cidr", fmt.Sprintf("%s[%d]", path, e.i), "%s is in %s, which is in the list too: drop it, or narrow the other", list[e.i], list[i])
				break
			}
		}
	}
}

// namedAtRunTime reports whether pools are chosen by somebody outside the config.
func (d *document) namedAtRunTime() bool {
	outside := false
	objects(d.apps, func(o map[string]any) {
		outside = outside || o["handler"] == "resolve" || o["handler"] == "route_hint" || o["route_hint"] == true
	})
	return outside
}

func unusedPools(d *document, found report) {
	if d.namedAtRunTime() {
		return
	}
	used := d.strings("pool")
	for _, name := range slices.Sorted(maps.Keys(d.app.Pools)) {
		if !used[name] {
			found("unused_pool", "apps.wayhouse.pools."+name, "no route sends anything to it: name it in a pool handler, or drop it")
		}
	}
}

func unusedResolvers(d *document, found report) {
	used := d.strings("resolver")
	for _, name := range slices.Sorted(maps.Keys(d.app.Resolvers)) {
		if !used[name] {
			found("unused_resolver", "apps.wayhouse.resolvers."+name, "no route asks it: name it in a resolve handler, or drop it")
		}
	}
}

// strings are the values that a key has in handlers and upstreams, in every app.
func (d *document) strings(key string) map[string]bool {
	used := make(map[string]bool)
	collect := func(o map[string]any) {
		if s, ok := o[key].(string); ok {
			used[s] = true
		}
	}
	for app, v := range d.apps {
		if app == "wayhouse" { // the objects in resolvers name their kind by the same key
			v = v.(map[string]any)["listeners"]
		}
		objects(v, collect)
	}
	return used
}

func or(d *caddy.Duration, def time.Duration) time.Duration {
	if d == nil {
		return def
	}
	return time.Duration(*d)
}

func poolTimeouts(d *document, found report) {
	for _, name := range slices.Sorted(maps.Keys(d.app.Pools)) {
		timeouts(d.app.Pools[name], "apps.wayhouse.pools."+name, found)
	}
	d.each(func(l *listener, i int, path string) {
		for k, h := range l.Routes[i].handlers {
			c := new(pool.Config)
			if h.Name == "pool" && h.Pool == "" && json.Unmarshal([]byte(h.text), c) == nil {
				timeouts(c, fmt.Sprintf("%s.handle[%d]", path, k), found)
			}
		}
	})
}

func timeouts(c *pool.Config, path string, found report) {
	if c == nil {
		return
	}
	connect, idle, life := or(c.ConnectTimeout, pool.DefaultConnectTimeout), or(c.IdleTimeout, pool.DefaultIdleTimeout), time.Duration(c.MaxLifetime)
	if connect >= idle {
		found("timeout_order", path+".connect_timeout", "%v is not below idle_timeout, %v: a flow would be idle for too long before it has begun", connect, idle)
	}
	if life > 0 && life <= idle {
		found("timeout_order", path+".max_lifetime", "%v is not above idle_timeout, %v, which never ends a flow then", life, idle)
	}
}

func listenerTimeouts(d *document, found report) {
	for _, name := range d.names {
		l := d.app.Listeners[name]
		peek := or(l.Peek.Timeout, listening.DefaultPeekTimeout)
		shortest, of := time.Duration(0), ""
		for _, r := range l.Routes {
			for _, h := range r.handlers {
				if c := d.app.Pools[h.Pool]; h.Name == "pool" && c != nil {
					if idle := or(c.IdleTimeout, pool.DefaultIdleTimeout); of == "" || idle < shortest {
						shortest, of = idle, h.Pool
					}
				}
			}
		}
		if of != "" && peek >= shortest {
			found("timeout_order", listenerPath(name)+".peek.timeout", "%v is not below the idle_timeout of the pool %s, %v: a client that waits would be idle for too long at once", peek, of, shortest)
		}
	}
	d.each(func(l *listener, i int, path string) {
		peek := or(l.Peek.Timeout, listening.DefaultPeekTimeout)
		for k, h := range l.Routes[i].handlers {
			if h.Name != "resolve" {
				continue
			}
			if t := or(d.app.Resolvers[h.Resolver].Timeout, resolving.DefaultTimeout); t > peek {
				found("timeout_order", fmt.Sprintf("%s.handle[%d]", path, k), "the resolver %s may take %v, more than the listener's peek.timeout, %v: "+
					"a client waits longer for an answer than it may take to say who it is; shorten the resolver's timeout, or lengthen the listener's", h.Resolver, t, peek)
			}
		}
	})
}
