package listener

import (
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/overload"
)

// UnmarshalCaddyfile sets up the listener from Caddyfile tokens; d stands at
// its name. What matchers and handlers there are is up to caddy-l4. Syntax:
//
//	<name> <addresses...> {
//		prefix         <network>
//		freebind
//		transparent
//		accept_proxy <networks...> {
//			...
//		}
//		peek_timeout   <duration>
//		peek_max_bytes <number>
//		on_undecided   refuse|next
//		route_hint
//		first_packet_gate
//		filter <kind> {
//			...
//		}
//		@<name> <matcher> [<arguments...>]
//		@<name> {
//			<matcher> [<arguments...>]
//		}
//		route [@<name>...] {
//			<handler> [<arguments...>]
//		}
//	}
func (l *Listener) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	if l.Bind = d.RemainingArgs(); len(l.Bind) == 0 {
		return d.Errf("listener %s: an address is missing, as in udp/0.0.0.0:7777", d.Val())
	}
	var segments routeSegments
	err := caddyopt.BlockOf(d, "a listener", caddyopt.Options{
		"prefix":            caddyopt.String(&l.Prefix),
		"freebind":          caddyopt.Word(&l.FreeBind),
		"transparent":       caddyopt.Word(&l.Transparent),
		"accept_proxy":      caddyopt.Func(l.unmarshalProxy),
		"peek_timeout":      caddyopt.Ptr(&l.Peek.Timeout, caddyopt.Duration),
		"peek_max_bytes":    caddyopt.Ptr(&l.Peek.MaxBytes, caddyopt.Int),
		"on_undecided":      caddyopt.Enum(&l.Peek.OnUndecided, onUndecidedRefuse, onUndecidedNext),
		"route_hint":        caddyopt.Word(&l.RouteHint),
		"first_packet_gate": caddyopt.Word(&l.FirstPacketGate),
		"filter":            caddyopt.Many(caddyopt.Func(l.unmarshalFilter)),
		"@":                 caddyopt.Func(segments.matcher),
		"route":             caddyopt.Many(caddyopt.Func(segments.route)),
	})
	if err != nil {
		return err
	}
	l.Routes, err = segments.parse()
	return err
}

func (l *Listener) unmarshalProxy(d *caddyfile.Dispenser) error {
	l.AcceptProxy = new(AcceptProxy)
	return l.AcceptProxy.unmarshal(d)
}

func (l *Listener) unmarshalFilter(d *caddyfile.Dispenser) error {
	raw, err := filter.UnmarshalCaddyfile(d)
	l.FiltersRaw = append(l.FiltersRaw, raw)
	return err
}

// routeSegments are the parts of a block that make its routes. They are put
// aside, as a route may name matchers that stand after it.
type routeSegments struct {
	matchers map[string]*caddyfile.Dispenser
	routes   []*caddyfile.Dispenser
}

func (s *routeSegments) matcher(d *caddyfile.Dispenser) error {
	name := d.Val()
	if name == "@" {
		return d.Errf("a matcher has a name, as in @query")
	}
	if s.matchers == nil {
		s.matchers = make(map[string]*caddyfile.Dispenser)
	}
	s.matchers[name] = d.NewFromNextSegment()
	return nil
}

func (s *routeSegments) route(d *caddyfile.Dispenser) error {
	s.routes = append(s.routes, d.NewFromNextSegment())
	return nil
}

func (s *routeSegments) parse() ([]*Route, error) {
	sets := make(map[string]caddy.ModuleMap)
	for _, name := range slices.Sorted(maps.Keys(s.matchers)) {
		d := s.matchers[name]
		d.Next() // consume the name
		d.SetContext(caddyfile.MatcherNameCtxKey, name[1:])
		if err := knownModules(*d, "matcher"); err != nil {
			return nil, err
		}
		set, err := layer4.ParseCaddyfileNestedMatcherSet(d)
		if err != nil {
			return nil, err
		}
		if len(set) == 0 {
			return nil, d.Errf("%s: a matcher is missing", name)
		}
		sets[name] = set
	}
	var routes []*Route
	for _, d := range s.routes {
		d.Next() // consume "route"
		r := new(Route)
		for d.NextArg() {
			set, ok := sets[d.Val()]
			if !ok {
				return nil, d.Errf("route: no matcher is named %s; %s", d.Val(), suggest.Hint(d.Val(), slices.Collect(maps.Keys(sets))))
			}
			r.MatcherSetsRaw = append(r.MatcherSetsRaw, set)
		}
		if err := knownModules(*d, "handler"); err != nil {
			return nil, err
		}
		if err := layer4.ParseCaddyfileNestedHandlers(d, &r.HandlersRaw); err != nil {
			return nil, err
		}
		if len(r.HandlersRaw) == 0 {
			return nil, d.Errf("route: a handler is missing, as in route { pool NAME }")
		}
		routes = append(routes, r)
	}
	return routes, nil
}

// knownModules refuses the name of a layer-4 handler or matcher that there is
// not, in the block or line that d has come to. caddy-l4 would, without a word
// about those there are.
func knownModules(d caddyfile.Dispenser, kind string) error {
	namespace := "layer4." + kind + "s"
	for nesting := d.Nesting(); d.NextArg() || d.NextBlock(nesting); d.NextSegment() {
		if _, err := caddy.GetModule(namespace + "." + d.Val()); err != nil {
			return d.Errf("unrecognized %s %q; %s", kind, d.Val(), suggest.Module(namespace, d.Val()))
		}
	}
	return nil
}

// CaddyfileOptions are the options of limits. Syntax:
//
//	max_connections          <number>
//	max_udp_sessions         <number>
//	max_new_sessions_per_sec <number>
//	overload {
//		level1_at <percent>
//		level2_at <percent>
//		release   <points>
//		hold      <duration>
//	}
func (l *Limits) CaddyfileOptions() caddyopt.Options {
	return caddyopt.Options{
		"max_connections":          caddyopt.Ptr(&l.MaxConnections, caddyopt.Int),
		"max_udp_sessions":         caddyopt.Ptr(&l.MaxUDPSessions, caddyopt.Int),
		"max_new_sessions_per_sec": caddyopt.Ptr(&l.MaxNewSessionsPerSec, caddyopt.Int),
		"overload": caddyopt.Func(func(d *caddyfile.Dispenser) error {
			l.Overload = new(overload.Config)
			return caddyopt.Block(d, l.Overload.CaddyfileOptions())
		}),
	}
}
