// Package agones finds the game servers of an Agones fleet, by the GameServers
// of a Kubernetes cluster. How those are listed and watched is in internal/kube;
// at which address players reach one is in gameserver.go.
package agones

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/kube"
	"github.com/wayhouse-proxy/wayhouse/internal/placeholder"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

func init() { caddy.RegisterModule(new(Source)) }

// Source finds the game servers of a namespace that are in certain states.
type Source struct {
	discovery.Settings
	kube.Access

	// The name of the fleet. Placeholders are replaced at load. Default:
	// GameServers of any fleet, and of none.
	Fleet string `json:"fleet,omitempty"`

	// What the labels of a GameServer have to be, all of: NAME, !NAME, NAME=VALUE
	// or NAME!=VALUE, as in Kubernetes' selectors. Default: anything.
	Labels []string `json:"labels,omitempty"`

	// The states in which a GameServer gets players: Ready, Allocated, Reserved,
	// RequestReady, Scheduled. Without Allocated, a server loses its place in the
	// pool as soon as it is given to a match. Default: Ready, Allocated.
	States []string `json:"states,omitempty"`

	// The name of the port. Default: the first one.
	PortName string `json:"port_name,omitempty"`

	// Which of the node's addresses, or the pod's, players are sent to:
	// ExternalIP, InternalIP or PodIP. To a pod's address the container's port
	// belongs. Default: the address that Agones tells clients, else the first of
	// ExternalIP and InternalIP.
	AddressType string `json:"address_type,omitempty"`

	// The counter whose capacity is how many flows a server may have at once. One
	// that a server does not have, and a capacity of 0, limit nothing. Not with a
	// list. Default: none.
	Counter string `json:"counter,omitempty"`

	// The list whose capacity is that. Not with a counter. Default: none.
	CounterList string `json:"list,omitempty"`

	// What becomes of the backends when there is no such server any more: keep
	// has them stay, and health checks find that they are gone; withdraw empties
	// the pool, so that nobody is sent to whatever gets their ports next.
	// Default: keep.
	OnEmpty string `json:"on_empty,omitempty"`

	wants    wants
	client   *kube.Client
	follower *kube.Follower
	log      func(server, why string) // that one is left out
	left     map[string]string        // owned by List: why servers are left out, by name

	mu      sync.Mutex
	known   map[string]discovery.Endpoint // by name, as listed last
	listing bool
}

// The values of on_empty.
const (
	keep     = "keep"
	withdraw = "withdraw"
)

// fleetLabel has, on a GameServer, the name of its fleet.
const fleetLabel = "agones.dev/fleet"

// states are those in which a server may be reached.
var states = []string{"Ready", "Allocated", "Reserved", "RequestReady", "Scheduled"}

var addressTypes = []string{externalIP, internalIP, podIP}

// CaddyModule returns the Caddy module information.
func (*Source) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.sources.agones",
		New: func() caddy.Module { return new(Source) },
	}
}

// Provision sets the defaults and reads tokens and certificates. It asks
// nothing.
func (a *Source) Provision(ctx caddy.Context) (err error) {
	if err := a.Settings.Provision(ctx); err != nil {
		return err
	}
	if len(a.States) == 0 {
		a.States = []string{"Ready", "Allocated"}
	}
	if a.OnEmpty == "" {
		a.OnEmpty = keep
	}
	if err := placeholder.Replace(placeholder.Option{Name: "fleet", Value: &a.Fleet}); err != nil {
		return err
	}
	if err := a.check(); err != nil {
		return err
	}
	a.log = a.warn
	a.wants = wants{states: a.States, port: a.PortName, address: a.AddressType, counter: a.Counter, list: a.CounterList}
	if a.client, err = a.Connect(); err != nil {
		return err
	}
	a.follower = a.client.Follow(kube.Objects{
		Group: "agones.dev/v1", Resource: "gameservers", Labels: a.selector(), Concerns: a.concerns,
	})
	return nil
}

// term is one of a label selector.
var term = func() *regexp.Regexp {
	const (
		value = `[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?`
		name  = `([a-z0-9][-a-z0-9.]{0,252}/)?` + value
	)
	return regexp.MustCompile(`^(!?` + name + `|` + name + `(=|==|!=)(` + value + `)?)$`)
}()

// check comes before Connect, for all of it is a part of what is asked.
func (a *Source) check() error {
	if a.Fleet != "" && !kube.IsName(a.Fleet) {
		return fmt.Errorf("fleet: %q is not made of up to 63 small letters, digits and hyphens", a.Fleet)
	}
	for i, l := range a.Labels {
		if !term.MatchString(l) {
			return fmt.Errorf("labels[%d]: %q is none of NAME, !NAME, NAME=VALUE and NAME!=VALUE", i, l)
		}
	}
	for i, s := range a.States {
		if !slices.Contains(states, s) {
			return fmt.Errorf("states[%d]: %q is none of %s, in which a server may be reached", i, s, strings.Join(states, ", "))
		}
	}
	switch {
	case a.AddressType != "" && !slices.Contains(addressTypes, a.AddressType):
		return fmt.Errorf("address_type: %q is none of %s", a.AddressType, strings.Join(addressTypes, ", "))
	case a.Counter != "" && a.CounterList != "":
		return errors.New("counter: only one of counter and list can be the capacity; leave out the other")
	case a.OnEmpty != keep && a.OnEmpty != withdraw:
		return fmt.Errorf("on_empty: %q is neither keep nor withdraw", a.OnEmpty)
	}
	return nil
}

// selector is that of the labels.
func (a *Source) selector() string {
	terms := slices.Clone(a.Labels)
	if a.Fleet != "" {
		terms = append(terms, fleetLabel+"="+a.Fleet)
	}
	return strings.Join(terms, ",")
}

// Close gives up connections.
func (a *Source) Close() error {
	if a.client != nil {
		a.client.Close()
	}
	return nil
}

// found is what a list tells of one server.
type found struct {
	name string
	at   discovery.Endpoint
	left string // why it is left out; "": it is not
}

// List implements discovery.Source.
func (a *Source) List(ctx context.Context) (discovery.Set, error) {
	a.mu.Lock()
	a.listing = true
	a.mu.Unlock()
	servers, err := kube.List(ctx, a.follower, a.wants.add)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listing = false
	if err != nil {
		return discovery.Set{}, err
	}
	set := discovery.Set{Withdrawn: len(servers) == 0 && a.OnEmpty == withdraw}
	left := make(map[string]string)
	a.known = make(map[string]discovery.Endpoint, len(servers))
	for _, s := range servers {
		a.known[s.name] = s.at
		set.Endpoints = append(set.Endpoints, s.at) // the host counts what is no address
		if s.left == "" {
			continue
		}
		if left[s.name] = s.left; a.left[s.name] != s.left {
			a.log(s.name, s.left)
		}
	}
	a.left = left
	return set, nil
}

// warn logs that a server is left out. The logger is the process's: the source
// may outlive the config that it is of.
func (a *Source) warn(server, why string) {
	caddy.Log().Named("wayhouse.sources.agones").Warn("game server left out",
		zap.String("server", server), zap.String("namespace", a.client.Namespace()), zap.String("reason", why))
}

// concerns reports whether an event changes the set. Most do not: a server tells
// of each player in its counters, and of itself in labels and annotations.
func (a *Source) concerns(deleted bool, object json.RawMessage) bool {
	var g gameServer
	if json.Unmarshal(object, &g) != nil {
		return true
	}
	var now []found
	if !deleted {
		now = a.wants.add(nil, &g)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	before, was := a.known[g.Metadata.Name]
	switch {
	case a.listing: // the list may be of a time before this
		return true
	case len(now) == 0:
		return was
	}
	return !was || now[0].at != before
}

// Watch implements discovery.Source.
func (a *Source) Watch(ctx context.Context, changed func()) error {
	return a.follower.Watch(ctx, changed)
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens. Syntax:
//
//	agones [<fleet>] {
//		label            <terms...>
//		states           <states...>
//		port_name        <name>
//		address_type     ExternalIP|InternalIP|PodIP
//		counter          <name>
//		list             <name>
//		on_empty         keep|withdraw
//		namespace        <name>
//		api              <url>
//		token_file       <path>
//		ca_file          <path>
//		kubeconfig       <path> [<context>]
//		refresh_interval <duration>
//	}
func (a *Source) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	if d.NextArg() {
		a.Fleet = d.Val()
	}
	options := a.Settings.CaddyfileOptions()
	maps.Copy(options, a.Access.CaddyfileOptions())
	maps.Copy(options, caddyopt.Options{
		"label":        caddyopt.Strings(&a.Labels),
		"states":       caddyopt.Strings(&a.States),
		"port_name":    caddyopt.String(&a.PortName),
		"address_type": caddyopt.Enum(&a.AddressType, addressTypes...),
		"counter":      caddyopt.String(&a.Counter),
		"list":         caddyopt.String(&a.CounterList),
		"on_empty":     caddyopt.Enum(&a.OnEmpty, keep, withdraw),
	})
	return caddyopt.BlockOf(d, "the source agones", options)
}

// Interface guards
var (
	_ discovery.Source      = (*Source)(nil)
	_ caddy.Provisioner     = (*Source)(nil)
	_ caddy.Validator       = (*Source)(nil)
	_ caddyfile.Unmarshaler = (*Source)(nil)
	_ io.Closer             = (*Source)(nil)
)
