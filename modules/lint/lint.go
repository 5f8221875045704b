// Package lint looks for what is allowed in a config and hardly ever meant: a
// route that nothing reaches, a pool that nobody uses, a catch-all that takes
// what a sniffer's route has lost. It reads the JSON of a config that is known
// to be good; each rule is a function of its own.
package lint

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// Finding is one thing that is likely a mistake.
type Finding struct {
	Rule string `json:"rule"`
	Path string `json:"path"` // in the config
	Text string `json:"text"` // what is wrong, and what would be right
}

func (f Finding) String() string { return fmt.Sprintf("%s: %s [%s]", f.Path, f.Text, f.Rule) }

// Load says what keeps a config from running, as caddy validate does, or checks
// it.
func Load(config []byte) ([]Finding, error) {
	var cfg *caddy.Config
	if err := caddy.StrictUnmarshalJSON(caddy.RemoveMetaFields(config), &cfg); err != nil {
		return nil, fmt.Errorf("decoding config: %w", err)
	}
	if err := caddy.Validate(cfg); err != nil {
		return nil, err
	}
	return Check(config)
}

// Check applies the rules to a config that is known to be good. The findings
// are in the order of their paths.
func Check(config []byte) ([]Finding, error) {
	d, err := read(config)
	if err != nil {
		return nil, err
	}
	var found []Finding
	for _, rule := range rules {
		rule(d, func(rule, path, format string, args ...any) {
			found = append(found, Finding{rule, path, fmt.Sprintf(format, args...)})
		})
	}
	slices.SortStableFunc(found, func(a, b Finding) int { return cmp.Compare(a.Path, b.Path) })
	return found, nil
}

// report takes a finding.
type report func(rule, path, format string, args ...any)

var rules = []func(*document, report){
	unreachable, missingCatchAll, handshakeLeak, handshakeIdle, openGate, unseenBytes, undecidedNext,
	nestedCIDRs, unusedPools, unusedResolvers, poolTimeouts, listenerTimeouts, silentListeners,
}

// document is a config as the rules see it.
type document struct {
	apps map[string]any // all of it

	app struct {
		Pools     map[string]*pool.Config `json:"pools"`
		Resolvers map[string]resolver     `json:"resolvers"`
		Listeners map[string]*listener    `json:"listeners"`
		Sniffers  struct {
			Native map[string]struct {
				Kind string `json:"sniffer"`
			} `json:"native"`
		} `json:"sniffers"`
	}

	names []string // of listeners, in order
}

type resolver struct {
	Timeout      *caddy.Duration `json:"timeout"`
	OnError      string          `json:"on_error"`
	AllowTargets []string        `json:"allow_targets"`
}

type listener struct {
	Bind []string `json:"bind"`
	Peek struct {
		Timeout     *caddy.Duration `json:"timeout"`
		MaxBytes    *int            `json:"max_bytes"`
		OnUndecided string          `json:"on_undecided"`
	} `json:"peek"`
	Filters         []filter `json:"filters"`
	RouteHint       bool     `json:"route_hint"`
	FirstPacketGate bool     `json:"first_packet_gate"`
	Routes          []*route `json:"routes"`
}

type filter struct {
	Kind  string          `json:"filter"`
	Allow json.RawMessage `json:"allow"` // networks, or countries
	Deny  json.RawMessage `json:"deny"`
}

type route struct {
	Match  []map[string]json.RawMessage `json:"match"`
	Handle []json.RawMessage            `json:"handle"`

	sets     []map[string]string // each matcher in one spelling, by name
	handlers []handler
}

type handler struct {
	Name     string `json:"handler"`
	Pool     string `json:"pool"`
	Resolver string `json:"resolver"`
	text     string // the handler in one spelling
}

func read(config []byte) (*document, error) {
	var whole struct {
		Apps map[string]any `json:"apps"`
	}
	if err := json.Unmarshal(config, &whole); err != nil {
		return nil, err
	}
	raw, ok := whole.Apps["wayhouse"]
	if !ok {
		return nil, errors.New("the config has no app wayhouse")
	}
	d := &document{apps: whole.Apps}
	b, err := json.Marshal(raw)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, &d.app); err != nil {
		return nil, err
	}
	d.names = slices.Sorted(maps.Keys(d.app.Listeners))
	for _, l := range d.app.Listeners {
		for _, r := range l.Routes {
			if err := r.read(); err != nil {
				return nil, err
			}
		}
	}
	return d, nil
}

func (r *route) read() error {
	for _, set := range r.Match {
		one := make(map[string]string)
		for name, raw := range set {
			one[name] = string(raw) // d.app was written anew: keys are in order
		}
		r.sets = append(r.sets, one)
	}
	for _, raw := range r.Handle {
		h := handler{text: string(raw)}
		if err := json.Unmarshal(raw, &h); err != nil {
			return err
		}
		r.handlers = append(r.handlers, h)
	}
	return nil
}

// each calls f for every route, in order, with its path.
func (d *document) each(f func(l *listener, i int, path string)) {
	for _, name := range d.names {
		l := d.app.Listeners[name]
		for i := range l.Routes {
			f(l, i, routePath(name, i))
		}
	}
}

func routePath(listener string, i int) string {
	return fmt.Sprintf("%s.routes[%d]", listenerPath(listener), i)
}

func listenerPath(name string) string { return "apps.wayhouse.listeners." + name }

// objects calls f for every object of a config, at any depth.
func objects(v any, f func(map[string]any)) {
	switch v := v.(type) {
	case map[string]any:
		f(v)
		for _, below := range v {
			objects(below, f)
		}
	case []any:
		for _, below := range v {
			objects(below, f)
		}
	}
}
