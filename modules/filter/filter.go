// Package filter has the filters of a listener, which say of a new connection
// or UDP session, before anything is kept of it, whether it gets in. Each kind is
// a module wayhouse.filters.NAME in a file of its own.
package filter

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

// Flow is what is known of a flow that wants in.
type Flow struct {
	Source        netip.Addr     // the client's address as lists and tables know it: see cidr.Plain
	Client, Local netip.AddrPort // the client, and the address of ours it speaks to
	UDP           bool
	Stats         *flow.Listener
}

// Filter decides about new flows. Check is called once for each, from the
// engines' workers, many at a time: it must not block or allocate. rule is empty
// for a flow that may pass; else the flow is refused, and rule, which is one of a
// few, is what it is counted and logged under.
type Filter interface {
	Check(f Flow) (rule string)
}

// Explainer is a filter that can tell what Check would say, and why, without a
// trace.
type Explainer interface {
	Explain(f Flow) (rule, reason string)
}

// Starter is a filter with work of its own. The listener calls Start before new
// flows meet the filter, and Stop when the config has ended. Start returns when
// the filter can decide; it may wait some seconds for that.
type Starter interface {
	Start() error
	Stop()
}

// Capper is a filter that bounds the flows that one source has at a time. They
// are counted when everything else has let the flow in, so that the count is
// exact.
type Capper interface {
	Caps() (perIP, perNet int64) // 0: no bound
}

// The rules of the filters here, as wayhouse_filter_blocked_total names them.
const (
	RuleACL     = "acl"
	RuleGeo     = "geo"
	RuleRateIP  = "rate_ip"
	RuleRateNet = "rate_net"
	RuleConnIP  = "src_conn_ip"
	RuleConnNet = "src_conn_net"
)

// Chain is the filters of a listener in the order in which they are asked.
type Chain struct {
	filters       []named
	perIP, perNet int64
}

type named struct {
	Filter
	name string
}

const namespace = "wayhouse.filters"

// listenerKey finds the name of the listener in the context of its filters.
const listenerKey caddy.CtxKey = "wayhouse_listener"

// place is where a filter stands: nth of its kind on the listener.
type place struct {
	listener string
	nth      int
}

// Load makes the chain of a listener.
func Load(ctx caddy.Context, listener string, raws []json.RawMessage) (*Chain, error) {
	c := new(Chain)
	nth := make(map[string]int)
	for i, raw := range raws {
		var kind struct {
			Name string `json:"filter"`
		}
		if err := json.Unmarshal(raw, &kind); err != nil {
			return nil, fmt.Errorf("filters[%d]: %w", i, err)
		}
		f, err := load(ctx.WithValue(listenerKey, place{listener, nth[kind.Name]}), kind.Name, raw)
		if err != nil {
			return nil, fmt.Errorf("filters[%d]%w", i, err)
		}
		nth[kind.Name]++
		c.filters = append(c.filters, named{f, kind.Name})
		if k, ok := f.(Capper); ok {
			perIP, perNet := k.Caps()
			c.perIP, c.perNet = least(c.perIP, perIP), least(c.perNet, perNet)
		}
	}
	return c, nil
}

// guest is what caddy loads a filter from.
type guest struct {
	Raw json.RawMessage `caddy:"namespace=wayhouse.filters inline_key=filter"`
}

func load(ctx caddy.Context, name string, raw json.RawMessage) (Filter, error) {
	if _, err := caddy.GetModule(namespace + "." + name); err != nil {
		return nil, fmt.Errorf(".filter: no filter is named %q; %s", name, suggest.Module(namespace, name))
	}
	mod, err := ctx.LoadModule(&guest{raw}, "Raw")
	if err != nil {
		return nil, fmt.Errorf(": %w", err)
	}
	f, ok := mod.(Filter)
	if !ok {
		return nil, fmt.Errorf(": %T is no filter", mod)
	}
	return f, nil
}

// least is the smaller of two bounds, where 0 is none.
func least(a, b int64) int64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// Len is how many filters there are.
func (c *Chain) Len() int { return len(c.filters) }

// Caps are the smallest bounds that filters set on the flows of a source; 0 is
// none.
func (c *Chain) Caps() (perIP, perNet int64) { return c.perIP, c.perNet }

// Check asks the filters. The first that refuses the flow is the last that is
// asked.
func (c *Chain) Check(f Flow) (rule string) {
	for i := range c.filters {
		if rule := c.filters[i].Check(f); rule != "" {
			return rule
		}
	}
	return ""
}

// Answer is what one filter says of a flow.
type Answer struct {
	Filter, Rule, Reason string
	Asked                bool // false: it cannot tell without counting
}

// Explain calls yield with what each filter would say, up to the first that
// refuses the flow.
func (c *Chain) Explain(f Flow, yield func(Answer) bool) {
	for _, n := range c.filters {
		a := Answer{Filter: n.name, Reason: "it is not asked here: it cannot tell without counting"}
		if e, ok := n.Filter.(Explainer); ok {
			a.Rule, a.Reason = e.Explain(f)
			a.Asked = true
		}
		if !yield(a) || a.Rule != "" {
			return
		}
	}
}

// Start starts those that have work of their own.
func (c *Chain) Start() error {
	for i, n := range c.filters {
		s, ok := n.Filter.(Starter)
		if !ok {
			continue
		}
		if err := s.Start(); err != nil {
			for _, before := range c.filters[:i] {
				if s, ok := before.Filter.(Starter); ok {
					s.Stop()
				}
			}
			return fmt.Errorf("filters[%d]: %w", i, err)
		}
	}
	return nil
}

// Stop undoes Start.
func (c *Chain) Stop() {
	for _, n := range c.filters {
		if s, ok := n.Filter.(Starter); ok {
			s.Stop()
		}
	}
}

// UnmarshalCaddyfile reads a filter of any kind, from a dispenser that stands
// before the name of the kind, and returns the listener's JSON for it. Syntax:
//
//	<kind> {
//		<option> <value>
//	}
func UnmarshalCaddyfile(d *caddyfile.Dispenser) (json.RawMessage, error) {
	if !d.NextArg() {
		return nil, d.Errf("filter: the kind is missing; %s", suggest.Module(namespace, ""))
	}
	kind := d.Val()
	if _, err := caddy.GetModule(namespace + "." + kind); err != nil {
		return nil, d.Errf("unrecognized filter %q; %s", kind, suggest.Module(namespace, kind))
	}
	m, err := caddyfile.UnmarshalModule(d, namespace+"."+kind)
	if err != nil {
		return nil, err
	}
	return caddyconfig.JSONModuleObject(m, "filter", kind, nil), nil
}

// placeOf is where the filter that ctx is for stands.
func placeOf(ctx caddy.Context) (place, error) {
	p, ok := ctx.Value(listenerKey).(place)
	if !ok {
		return place{}, errors.New("a filter belongs to a listener of the app wayhouse")
	}
	return p, nil
}
