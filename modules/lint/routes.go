package lint

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/literal"
	"github.com/wayhouse-proxy/wayhouse/internal/ticket"
	listening "github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// What routes do to each other.

// addressMatchers need no bytes of the flow.
var addressMatchers = []string{"client_cidr", "dst", "port", "remote_ip", "local_ip", "remote_ip_list", "clock"}

// needsBytes reports whether a matcher may be undecided.
func needsBytes(name, options string) bool {
	if name != "not" {
		return !slices.Contains(addressMatchers, name)
	}
	var sets []map[string]json.RawMessage
	if json.Unmarshal([]byte(options), &sets) != nil {
		return true
	}
	for _, set := range sets {
		for name, options := range set {
			if needsBytes(name, string(options)) {
				return true
			}
		}
	}
	return false
}

func (r *route) needsBytes() bool {
	return slices.ContainsFunc(r.sets, func(set map[string]string) bool {
		for name, options := range set {
			if needsBytes(name, options) {
				return true
			}
		}
		return false
	})
}

// catchAll reports whether every flow matches.
func (r *route) catchAll() bool {
	return len(r.sets) == 0 || slices.ContainsFunc(r.sets, func(set map[string]string) bool {
		for name, options := range set {
			if name != "client_cidr" && name != "dst" || !everyAddress(options) {
				return false
			}
		}
		return true
	})
}

func everyAddress(options string) bool {
	var o struct {
		CIDRs []string `json:"cidrs"`
	}
	return json.Unmarshal([]byte(options), &o) == nil && slices.Contains(o.CIDRs, "0.0.0.0/0") && slices.Contains(o.CIDRs, "::/0")
}

// lasts are handlers after which no flow goes on to the next route.
var lasts = []string{"pool", "reject", "http_front", "proxy", "echo", "close"}

// final reports whether a flow that matches never sees the next route.
func (d *document) final(r *route) bool {
	return slices.ContainsFunc(r.handlers, func(h handler) bool {
		return slices.Contains(lasts, h.Name) || h.Name == "resolve" && d.app.Resolvers[h.Resolver].OnError != "fallback_route"
	})
}

// changes reports whether a flow may go on after the route with other bytes.
func (d *document) changes(r *route) bool {
	return !d.final(r) && slices.ContainsFunc(r.handlers, func(h handler) bool {
		return h.Name != "resolve" && h.Name != "route_hint"
	})
}

// covers reports whether whatever matches set matches a set of r.
func (r *route) covers(set map[string]string) bool {
	return slices.ContainsFunc(r.sets, func(own map[string]string) bool {
		for name, options := range own {
			if has, ok := set[name]; !ok || has != options {
				return false
			}
		}
		return true
	})
}

func unreachable(d *document, found report) {
	d.each(func(l *listener, i int, path string) {
		r := l.Routes[i]
		for k, before := range l.Routes[:i] {
			if !d.final(before) {
				continue
			}
			if before.catchAll() {
				found("unreachable_route", path, "nothing reaches it: routes[%d] takes every flow; put this one before it, or drop it", k)
				return
			}
			if len(r.sets) == 0 || slices.ContainsFunc(l.Routes[k+1:i], d.changes) {
				continue
			}
			if !slices.ContainsFunc(r.sets, func(set map[string]string) bool { return !before.covers(set) }) {
				found("unreachable_route", path, "nothing reaches it: routes[%d] takes whatever it matches; put this one before it, or drop it", k)
				return
			}
		}
	})
}

func missingCatchAll(d *document, found report) {
	for _, name := range d.names {
		l := d.app.Listeners[name]
		if len(l.Routes) == 0 || slices.ContainsFunc(l.Routes, func(r *route) bool { return r.catchAll() }) {
			continue
		}
		found("missing_catch_all", listenerPath(name)+".routes",
			"a flow that matches none of the %d routes is closed or dropped and counted as no_route: end with a route without matchers", len(l.Routes))
	}
}

// handshakeOnly are sniffers that recognise a session by its first datagram
// alone.
var handshakeOnly = []string{"quic", "wireguard", "openvpn", "raknet", "teamspeak3", "dtls", "enet"}

// handshake is what a route asks that is handshake-only on UDP, "" when it asks
// nothing of the kind.
func (d *document) handshake(r *route) string {
	for _, set := range r.sets {
		if name, kind := d.sniffer(set); slices.Contains(handshakeOnly, kind) {
			return "the sniffer " + name
		}
		if _, ok := set["sni"]; ok {
			return "the matcher sni"
		}
	}
	return ""
}

// sniffer is the one that a set of matchers asks, and its kind where another
// name was declared for it.
func (d *document) sniffer(set map[string]string) (name, kind string) {
	var o struct {
		Name string `json:"name"`
	}
	if json.Unmarshal([]byte(set["sniffer"]), &o) != nil {
		return "", ""
	}
	if declared, ok := d.app.Sniffers.Native[o.Name]; ok {
		return o.Name, declared.Kind
	}
	return o.Name, o.Name
}

func (l *listener) udp() bool {
	return slices.ContainsFunc(l.Bind, func(b string) bool { return strings.HasPrefix(b, "udp/") })
}

func (l *listener) tcp() bool {
	return slices.ContainsFunc(l.Bind, func(b string) bool { return strings.HasPrefix(b, "tcp/") })
}

// rejects reports whether the route is there to turn flows away.
func (r *route) rejects() bool {
	return len(r.handlers) == 1 && r.handlers[0].Name == "reject"
}

// sameAction reports whether two routes do the same with a flow.
func (r *route) sameAction(other *route) bool {
	return slices.EqualFunc(r.handlers, other.handlers, func(a, b handler) bool { return a.text == b.text })
}

func handshakeLeak(d *document, found report) {
	d.each(func(l *listener, i int, path string) {
		r := l.Routes[i]
		if !r.catchAll() || !l.udp() || l.FirstPacketGate || r.rejects() {
			return
		}
		for k, before := range l.Routes[:i] {
			name := d.handshake(before)
			if name == "" || before.sameAction(r) {
				continue
			}
			found("handshake_leak", path, "%s of routes[%d] recognises only the first datagrams of a session: one that has been idle too long "+
				"comes back with another and falls to this route; send both to one pool", name, k)
			return
		}
	})
}

// leastIdle is what keepalives of the handshake-only protocols stay well below.
const leastIdle = 60 * time.Second

func handshakeIdle(d *document, found report) {
	d.each(func(l *listener, i int, path string) {
		name := d.handshake(l.Routes[i])
		if name == "" || !l.udp() {
			return
		}
		for k, h := range l.Routes[i].handlers {
			if h.Name != "pool" {
				continue
			}
			c := d.app.Pools[h.Pool]
			if h.Pool == "" {
				c = new(pool.Config)
				if json.Unmarshal([]byte(h.text), c) != nil {
					continue
				}
			}
			if c == nil || c.IdleTimeout == nil || time.Duration(*c.IdleTimeout) >= leastIdle {
				continue
			}
			where := "apps.wayhouse.pools." + h.Pool
			if h.Pool == "" {
				where = fmt.Sprintf("%s.handle[%d]", path, k)
			}
			found("handshake_idle", where+".idle_timeout", "%v is below %v, and %s of %s cannot recognise a session that comes back: "+
				"stay well above the keepalive of the protocol", time.Duration(*c.IdleTimeout), leastIdle, name, path)
		}
	})
}

// leastPrefix is how many bytes a first_bytes has to know for its listener's gate
// to keep anything out.
const leastPrefix = 2

func openGate(d *document, found report) {
	d.each(func(l *listener, i int, path string) {
		if !l.FirstPacketGate {
			return
		}
		for k, set := range l.Routes[i].sets {
			if options, ok := set["first_bytes"]; ok && known(options) < leastPrefix {
				found("open_gate", fmt.Sprintf("%s.match[%d].first_bytes", path, k), "the gate lets in whatever this matches, with a prefix of %d bytes: "+
					"give it one of %d or more, or do without first_packet_gate", known(options), leastPrefix)
			}
			if name, kind := d.sniffer(set); kind == "openvpn" {
				found("open_gate", fmt.Sprintf("%s.match[%d].sniffer", path, k), "the gate lets in whatever the sniffer %s recognises, which goes by one byte: "+
					"about 2 of 256 random datagrams; put OpenVPN on a listener of its own", name)
			}
		}
	})
}

// known is how many bytes a first_bytes matcher looks for.
func known(options string) int {
	var o struct {
		Prefix string `json:"prefix"`
	}
	if json.Unmarshal([]byte(options), &o) != nil {
		return 0
	}
	b, _ := literal.Parse(o.Prefix)
	return len(b)
}

func unseenBytes(d *document, found report) {
	d.each(func(l *listener, i int, path string) {
		seen := listening.DefaultPeekMaxBytes
		if l.Peek.MaxBytes != nil {
			seen = *l.Peek.MaxBytes
		}
		if !l.tcp() {
			return
		}
		for k, set := range l.Routes[i].sets {
			for _, name := range []string{"first_bytes", "ticket"} {
				options, ok := set[name]
				if !ok {
					continue
				}
				if end := reach(name, options); end > seen {
					found("unseen_bytes", fmt.Sprintf("%s.match[%d].%s", path, k, name), "it goes by the first %d bytes, and of a connection peek.max_bytes, %d, are looked at: "+
						"none ever matches; raise peek.max_bytes", end, seen)
				}
			}
		}
	})
}

// reach is how many bytes a matcher has to see before it can match.
func reach(name, options string) int {
	var o struct {
		Offset int `json:"offset"`
	}
	if json.Unmarshal([]byte(options), &o) != nil {
		return 0
	}
	if name == "ticket" {
		return o.Offset + ticket.Len
	}
	return o.Offset + known(options)
}

func undecidedNext(d *document, found report) {
	for _, name := range d.names {
		l := d.app.Listeners[name]
		if l.Peek.OnUndecided != "next" {
			continue
		}
		for i, r := range l.Routes {
			lax := slices.IndexFunc(l.Routes[i+1:], func(later *route) bool { return !later.sameAction(r) && !later.rejects() })
			if !r.needsBytes() || lax < 0 {
				continue
			}
			found("undecided_next", listenerPath(name)+".peek.on_undecided",
				"with next, a client that sends slowly enough gets past routes[%d] to routes[%d]; refuse, the default, cuts it off", i, i+1+lax)
			break
		}
	}
}

func silentListeners(d *document, found report) {
	used := make(map[string]bool)
	for app, v := range d.apps {
		if app == "wayhouse" {
			continue
		}
		objects(v, func(o map[string]any) {
			list, _ := o["listen"].([]any)
			for _, a := range list {
				if s, ok := a.(string); ok {
					if name, ok := strings.CutPrefix(s, "wayhouse/"); ok {
						name, _, _ = strings.Cut(name, ":")
						used[name] = true
					}
				}
			}
		})
	}
	for _, name := range d.names {
		if l := d.app.Listeners[name]; len(l.Routes) == 0 && !used[name] {
			found("silent_listener", listenerPath(name), "it has no routes and no server listens on wayhouse/%s: every flow is turned away; add a route or a server", name)
		}
	}
}
