package listener

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// Route is a caddy-l4 route.
type Route struct {
	// Sets of matchers: all of one set must match. Without any, every
	// connection and session matches.
	MatcherSetsRaw []caddy.ModuleMap `json:"match,omitempty" caddy:"namespace=layer4.matchers"`

	// What to do, in order.
	HandlersRaw []json.RawMessage `json:"handle,omitempty" caddy:"namespace=layer4.handlers inline_key=handler"`

	sets     [][]asked
	handlers []layer4.NextHandler
	native   Forwarder // the only handler, where it can take flows from the engines
	rejects  bool      // the only handler is a Rejecter
	decider  Decider   // the only handler, where it names a Forwarder for each flow
	front    frontPort // where the only handler gives flows to; the zero value: it does not

	byAddr   bool            // every matcher is an AddrMatcher
	addrSets [][]AddrMatcher // the sets, when byAddr
	prompt   bool            // no matcher may block: a worker may ask them
}

func (r *Route) provision(ctx caddy.Context) error {
	if err := r.namesKnown(); err != nil {
		return err
	}
	raw := slices.Clone(r.MatcherSetsRaw) // loading them lets go of it
	mods, err := ctx.LoadModule(r, "MatcherSetsRaw")
	if err != nil {
		return fmt.Errorf("match: %w", err)
	}
	var sets layer4.MatcherSets
	if err := sets.FromInterface(mods); err != nil {
		return fmt.Errorf("match: %w", err)
	}
	for _, set := range sets {
		var all []asked
		for _, m := range set {
			all = append(all, newAsked(m))
		}
		r.sets = append(r.sets, all)
	}
	r.prompt = promptSets(raw, true)
	r.addrSets, r.byAddr = addrSets(sets)
	mods, err = ctx.LoadModule(r, "HandlersRaw")
	if err != nil {
		return fmt.Errorf("handle: %w", err)
	}
	for i, mod := range mods.([]any) {
		h, ok := mod.(layer4.NextHandler)
		if !ok {
			return fmt.Errorf("handle[%d]: %T is no layer-4 handler", i, mod)
		}
		r.handlers = append(r.handlers, h)
	}
	if len(r.handlers) == 0 {
		return errors.New("handle: nothing to do: name a handler, as in {\"handler\": \"pool\", \"pool\": \"NAME\"}")
	}
	if len(r.handlers) == 1 {
		r.native, _ = r.handlers[0].(Forwarder)
		_, r.rejects = r.handlers[0].(Rejecter)
		r.decider, _ = r.handlers[0].(Decider)
		if f, ok := r.handlers[0].(Front); ok {
			r.front.name, r.front.port = f.Front()
		}
	}
	return nil
}

// namesKnown refuses matchers and handlers that there are not, and says which
// there are.
func (r *Route) namesKnown() error {
	for i, set := range r.MatcherSetsRaw {
		for _, name := range slices.Sorted(maps.Keys(set)) {
			if _, err := caddy.GetModule("layer4.matchers." + name); err != nil {
				return fmt.Errorf("match[%d].%s: there is no layer4.matchers.%s; %s", i, name, name, suggest.Module("layer4.matchers", name))
			}
		}
	}
	for i, raw := range r.HandlersRaw {
		var h struct{ Handler string }
		if json.Unmarshal(raw, &h) != nil || h.Handler == "" {
			continue // loading it says what is wrong
		}
		if _, err := caddy.GetModule("layer4.handlers." + h.Handler); err != nil {
			return fmt.Errorf("handle[%d].handler: there is no layer4.handlers.%s; %s", i, h.Handler, suggest.Module("layer4.handlers", h.Handler))
		}
	}
	return nil
}

// addrSets are the sets as AddrMatchers, if that is what all of them are.
func addrSets(sets layer4.MatcherSets) ([][]AddrMatcher, bool) {
	all := make([][]AddrMatcher, 0, len(sets))
	for _, set := range sets {
		as := make([]AddrMatcher, 0, len(set))
		for _, m := range set {
			a, ok := m.(AddrMatcher)
			if !ok {
				return nil, false
			}
			as = append(as, a)
		}
		all = append(all, as)
	}
	return all, true
}

// matchAddr is match for a route that is decided by addresses.
func (r *Route) matchAddr(client, local netip.AddrPort) bool {
	for _, set := range r.addrSets {
		if !slices.ContainsFunc(set, func(m AddrMatcher) bool { return !m.MatchAddr(client, local) }) {
			return true
		}
	}
	return len(r.addrSets) == 0
}

// asksSniffers reports whether a matcher asks a sniffer.
func (r *Route) asksSniffers() bool {
	return slices.ContainsFunc(r.sets, func(set []asked) bool {
		return slices.ContainsFunc(set, func(a asked) bool {
			var p sniff.Plan
			p.Add(a.matcher())
			return len(p) > 0
		})
	})
}
