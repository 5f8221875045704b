// Command panicky is wayhouse with a matcher, a handler, a balancer, a filter and
// a sniffer that panic, to test that a mistake in a module ends one flow and nothing else.
package main

import (
	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/mholt/caddy-l4/layer4"

	_ "github.com/wayhouse-proxy/wayhouse"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func init() {
	caddy.RegisterModule(Matcher{})
	caddy.RegisterModule(Handler{})
	caddy.RegisterModule(Balancer{})
	caddy.RegisterModule(Filter{})
	caddy.RegisterModule(Sniffer{})
}

func main() { caddycmd.Main() }

// Matcher panics when the first byte is a P, and matches M.
type Matcher struct{}

// CaddyModule returns the Caddy module information.
func (Matcher) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "layer4.matchers.panicky", New: func() caddy.Module { return new(Matcher) }}
}

// Match implements layer4.ConnMatcher.
func (Matcher) Match(cx *layer4.Connection) (bool, error) {
	var b [1]byte
	if _, err := cx.Read(b[:]); err != nil {
		return false, err
	}
	if b[0] == 'P' {
		panic("the matcher has met a P")
	}
	return b[0] == 'M', nil
}

// Handler panics.
type Handler struct{}

// CaddyModule returns the Caddy module information.
func (Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "layer4.handlers.panicky", New: func() caddy.Module { return new(Handler) }}
}

// Handle implements layer4.NextHandler.
func (Handler) Handle(*layer4.Connection, layer4.Handler) error { panic("the handler was called") }

// Balancer panics.
type Balancer struct{}

// CaddyModule returns the Caddy module information.
func (Balancer) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.balancers.panicky", New: func() caddy.Module { return new(Balancer) }}
}

// Pick implements balancer.Balancer.
func (Balancer) Pick([]balancer.Candidate, balancer.Flow) int { panic("the balancer was asked") }

// Filter panics.
type Filter struct{}

// CaddyModule returns the Caddy module information.
func (Filter) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.filters.panicky", New: func() caddy.Module { return new(Filter) }}
}

// Check implements filter.Filter.
func (Filter) Check(filter.Flow) string { panic("the filter was asked") }

// Sniffer panics.
type Sniffer struct{}

// CaddyModule returns the Caddy module information.
func (Sniffer) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.sniffers.panicky", New: func() caddy.Module { return new(Sniffer) }}
}

// Sniff implements sniff.Sniffer.
func (Sniffer) Sniff(*sniff.Input, *sniff.Hint) sniff.Verdict { panic("the sniffer was asked") }

// Interface guards
var (
	_ layer4.ConnMatcher = Matcher{}
	_ layer4.NextHandler = Handler{}
	_ balancer.Balancer  = Balancer{}
	_ filter.Filter      = Filter{}
	_ sniff.Sniffer      = Sniffer{}
)
