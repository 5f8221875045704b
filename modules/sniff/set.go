package sniff

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

const namespace = "wayhouse.sniffers"

// Named is a sniffer of a config by its name, counted.
type Named struct {
	Name  string
	Place string // where it comes from

	s         Sniffer
	mayReject bool
	oneLook   bool
	prompt    bool // native: it answers at once

	results [numResults]prometheus.Counter
	seconds prometheus.Observer
}

var (
	calls = metrics.Counter("sniffer_calls_total", "Calls of a sniffer by their result.", "name", "result")
	took  = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: metrics.Namespace, Name: "sniffer_call_seconds", Help: "Wall-clock time of a call of a sniffer.",
		Buckets: []float64{250e-9, 1e-6, 4e-6, 16e-6, 64e-6, 256e-6, 1e-3, 4e-3, 16e-3, 64e-3},
	}, []string{"name"})
)

func init() { metrics.Add(took) }

// result indexes the values of the label result.
const (
	resultOK = iota
	resultUnrecognised
	resultUndecided
	resultFault // and from here on by Fault
	numResults  = resultFault + int(Broken)
)

var resultNames = [numResults]string{"ok", "unrecognised", "undecided", "timeout", "trap", "bad_output", "busy", "broken"}

func newNamed(name, place string, s Sniffer) *Named {
	n := &Named{Name: name, Place: place, s: s, seconds: took.WithLabelValues(name)}
	_, never := s.(NeverRejects)
	n.mayReject = !never
	_, n.oneLook = s.(OneLook)
	_, n.prompt = s.(Native)
	for i, r := range resultNames {
		n.results[i] = calls.WithLabelValues(name, r)
	}
	return n
}

// Sniff empties h, calls the sniffer and counts the call.
func (n *Named) Sniff(in *Input, h *Hint) Verdict {
	h.Reset()
	start := time.Now()
	v := n.s.Sniff(in, h)
	n.seconds.Observe(time.Since(start).Seconds())
	result := resultOK
	switch {
	case v == Unrecognised:
		result = resultUnrecognised
	case v == Undecided && h.Fault != NoFault:
		result = resultFault + int(h.Fault) - 1
	case v == Undecided:
		result = resultUndecided
	}
	n.results[result].Inc()
	return v
}

// Set is the sniffers of a config by name. Native ones without options need no
// declaration: the name of the kind is enough.
type Set struct {
	ctx     caddy.Context
	byName  map[string]*Named
	refuses []refuser
}

// refuser is a Host that says why a sniffer of that name cannot be used, nil
// when it has none.
type refuser interface{ Refused(name string) error }

// setKey finds the set in the context of the modules of a config.
const setKey caddy.CtxKey = "wayhouse_sniffers"

// NewSet makes the set of a config from the hosts that it declares, which are
// modules by their name.
func NewSet(ctx caddy.Context, hosts map[string]any) (*Set, error) {
	s := &Set{ctx: ctx, byName: make(map[string]*Named)}
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		h, ok := hosts[name].(Host)
		if !ok {
			return nil, fmt.Errorf("%s: %T is no host of sniffers", name, hosts[name])
		}
		if err := h.Sniffers(s.add); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if r, ok := h.(refuser); ok {
			s.refuses = append(s.refuses, r)
		}
	}
	return s, nil
}

// Native is a native sniffer, which answers at once. A declared one may have
// the name of its own kind; other sniffers may not have the name of a kind.
type Native interface {
	Sniffer
	caddy.Module
}

func (s *Set) add(name, place string, sn Sniffer) error {
	if err := CheckName(name); err != nil {
		return err
	}
	if before := s.byName[name]; before != nil {
		return fmt.Errorf("two sniffers are named %q: one of %s, one of %s", name, before.Place, place)
	}
	if info, err := caddy.GetModule(namespace + "." + name); err == nil {
		if native, ok := sn.(Native); !ok || native.CaddyModule().ID != info.ID {
			return fmt.Errorf("two sniffers are named %q: the native module %s, which needs no declaration, and one of %s", name, info.ID, place)
		}
	}
	s.byName[name] = newNamed(name, place, sn)
	return nil
}

// CheckName keeps names usable in file names, metrics and Caddyfiles.
func CheckName(name string) error {
	if name == "" {
		return errors.New("a sniffer's name is empty")
	}
	for _, r := range name {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', r == '-', r == '_':
		default:
			return fmt.Errorf("the sniffer name %q has %q in it: letters, digits, - and _ are allowed", name, r)
		}
	}
	return nil
}

// Get is the sniffer of that name. It is for Provision: a native one that is
// not declared is loaded by the first that asks.
func (s *Set) Get(name string) (*Named, error) {
	if n := s.byName[name]; n != nil {
		return n, nil
	}
	id := namespace + "." + name
	if _, err := caddy.GetModule(id); err != nil {
		for _, r := range s.refuses {
			if err := r.Refused(name); err != nil {
				return nil, err
			}
		}
		return nil, fmt.Errorf("no sniffer is named %q; %s", name, suggest.Hint(name, s.Names()))
	}
	m, err := s.ctx.LoadModuleByID(id, nil)
	if err != nil {
		return nil, fmt.Errorf("the native sniffer %s cannot do without options: declare it under a name of its own in sniffers.native: %w", name, err)
	}
	sn, ok := m.(Sniffer)
	if !ok {
		return nil, fmt.Errorf("%s: %T is no sniffer", id, m)
	}
	n := newNamed(name, "the native module "+id, sn)
	s.byName[name] = n
	return n, nil
}

// Names are those that Get knows.
func (s *Set) Names() []string {
	names := slices.Collect(maps.Keys(s.byName))
	for _, name := range suggest.Modules(namespace) {
		if s.byName[name] == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// In is ctx with the set in it, for the modules that ctx loads.
func (s *Set) In(ctx caddy.Context) caddy.Context { return ctx.WithValue(setKey, s) }

// From is the set of the config that ctx belongs to. Outside the wayhouse app
// it is the app's, and without the app the undeclared native sniffers.
func From(ctx caddy.Context) (*Set, error) {
	if s, ok := ctx.Value(setKey).(*Set); ok {
		return s, nil
	}
	app, err := ctx.AppIfConfigured("wayhouse")
	if errors.Is(err, caddy.ErrNotConfigured) {
		return NewSet(ctx, nil)
	}
	if err != nil {
		return nil, err
	}
	if a, ok := app.(interface{ Sniffers() *Set }); ok {
		return a.Sniffers(), nil
	}
	return NewSet(ctx, nil)
}
