// Package docker finds the containers that run game servers: it asks a Docker
// daemon for those with certain labels, and hears from it when one starts, stops
// or becomes healthy. daemon.go speaks to the daemon; container.go says at which
// address players reach a container.
package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

func init() { caddy.RegisterModule(new(Source)) }

// Source finds the running containers that have certain labels.
type Source struct {
	discovery.Settings
	Remote

	// The labels of the containers, each a name or NAME=VALUE. A container needs
	// all of them. At least one is needed, as in wayhouse.pool=lobby.
	Labels []string `json:"labels,omitempty"`

	// What stands before the names of the labels that say more about a container:
	// PREFIX.port, .network, .weight, .priority, .max_sessions. With another
	// prefix a second source can have another port of the same containers.
	// Default: wayhouse.
	Prefix string `json:"prefix,omitempty"`

	// The port that players want, in the container: a number, or a range in which
	// the container has exactly one port; with /tcp or /udp where those differ.
	// The label goes before it. Default: the only port that the container exposes.
	Port string `json:"port,omitempty"`

	// The network to reach containers in, by its name or by the one that it has in
	// the Compose file of the container. The label goes before it. Default: the
	// only network of the container.
	Network string `json:"network,omitempty"`

	// Reach containers at ports that are published on the host, not in a network.
	Published bool `json:"published,omitempty"`

	// The IP address of the host, for ports that are published on all of its
	// addresses, and for containers on its network. Default: the address of the
	// endpoint; 127.0.0.1 when that is a socket.
	HostAddress string `json:"host_address,omitempty"`

	// ipv4 or ipv6: the only addresses of containers that are used. Default: the
	// IPv4 address, and the IPv6 one of a container that has no other.
	Family string `json:"family,omitempty"`

	// Take containers too whose health check has not succeeded yet or fails.
	// Default: those that are healthy or have no health check.
	AnyHealth bool `json:"any_health,omitempty"`

	// What becomes of the backends when the daemon has no such container any more:
	// keep has them stay, and health checks find that they are gone; withdraw
	// empties the pool, so that nobody is sent to whatever gets their addresses
	// next. Default: keep.
	OnEmpty string `json:"on_empty,omitempty"`

	wants  wants
	daemon *daemon
	left   map[string]string           // owned by List: why containers are left out, by ID
	log    func(container, why string) // that one is left out
}

// The values of family and on_empty.
const (
	ipv4     = "ipv4"
	ipv6     = "ipv6"
	keep     = "keep"
	withdraw = "withdraw"
)

const defaultPrefix = "wayhouse"

// CaddyModule returns the Caddy module information.
func (*Source) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.sources.docker",
		New: func() caddy.Module { return new(Source) },
	}
}

// Provision sets the defaults and reads the certificates.
func (d *Source) Provision(ctx caddy.Context) error {
	if err := d.Settings.Provision(ctx); err != nil {
		return err
	}
	if d.Prefix == "" {
		d.Prefix = defaultPrefix
	}
	if d.OnEmpty == "" {
		d.OnEmpty = keep
	}
	d.log = d.warn
	var err error
	if d.daemon, err = d.Remote.provision(); err != nil {
		return err
	}
	d.wants = wants{prefix: d.Prefix, network: d.Network, port: anyPort, published: d.Published, family: d.Family, host: d.Remote.host}
	if d.Port != "" {
		if d.wants.port, err = parsePort(d.Port); err != nil {
			return fmt.Errorf("port: %w", err)
		}
	}
	if d.HostAddress != "" {
		a, err := netip.ParseAddr(d.HostAddress)
		if err != nil || a.IsUnspecified() || a.IsMulticast() || a.Zone() != "" {
			return fmt.Errorf("host_address: %q is not the IP address of a host", d.HostAddress)
		}
		d.wants.host = a.Unmap()
	}
	return nil
}

// Validate checks what Provision has left.
func (d *Source) Validate() error {
	if err := d.Settings.Validate(); err != nil {
		return err
	}
	if len(d.Labels) == 0 {
		return errors.New("labels: none; every container of the host would be taken: give one, as in wayhouse.pool=lobby")
	}
	for i, l := range d.Labels {
		if name, _, _ := strings.Cut(l, "="); name == "" || strings.TrimSpace(name) != name {
			return fmt.Errorf("labels[%d]: %q is neither a label nor LABEL=VALUE", i, l)
		}
	}
	if strings.ContainsAny(d.Prefix, " =") || strings.HasSuffix(d.Prefix, ".") {
		return fmt.Errorf("prefix: %q cannot be the beginning of a label, as wayhouse can; the dot behind it is not part of it", d.Prefix)
	}
	switch {
	case d.Family != "" && d.Family != ipv4 && d.Family != ipv6:
		return fmt.Errorf("family: %q is neither ipv4 nor ipv6", d.Family)
	case d.OnEmpty != keep && d.OnEmpty != withdraw:
		return fmt.Errorf("on_empty: %q is neither keep nor withdraw", d.OnEmpty)
	case d.Published && d.Network != "":
		return errors.New("network: ports that are published are reached on the host, in no network; leave out network or published")
	case d.Published && !d.wants.host.IsValid():
		return errors.New("host_address: missing; the endpoint is a name, and the ports that containers have on their host need its IP address")
	case d.HostAddress != "" && d.Family != "" && !d.wants.wantsFamily(d.wants.host):
		return fmt.Errorf("host_address: %s is not %s, as family asks for", d.HostAddress, d.Family)
	}
	return nil
}

// filters are those of the containers that are wanted.
func (d *Source) filters() filters {
	f := filters{"label": d.Labels, "status": {"running"}}
	if !d.AnyHealth {
		f["health"] = []string{"healthy", "none"}
	}
	return f
}

// List implements discovery.Source.
func (d *Source) List(ctx context.Context) (discovery.Set, error) {
	list, err := d.daemon.list(ctx, d.filters())
	if err != nil {
		return discovery.Set{}, err
	}
	hosts, err := d.hosts(ctx, list)
	if err != nil {
		return discovery.Set{}, err
	}
	var set discovery.Set
	left := make(map[string]string)
	for i := range list {
		c := &list[i]
		net := c
		if id := c.joins(); id != "" {
			net = hosts[id]
		}
		e, err := d.wants.endpoint(c, net)
		if err != nil {
			left[c.ID] = err.Error()
			d.tell(c, left[c.ID])
			e = discovery.Endpoint{} // which the host counts
		}
		set.Endpoints = append(set.Endpoints, e)
	}
	d.left = left
	set.Withdrawn = len(list) == 0 && d.OnEmpty == withdraw
	return set, nil
}

// tell logs why a container is left out, once.
func (d *Source) tell(c *container, why string) {
	if d.left[c.ID] != why {
		d.log(c.name(), why)
	}
}

// warn logs that a container is left out. The logger is the process's: the
// source may outlive the config that it is of.
func (d *Source) warn(container, why string) {
	caddy.Log().Named("wayhouse.sources.docker").Warn("container left out",
		zap.String("container", container), zap.Strings("labels", d.Labels), zap.String("reason", why))
}

// hosts returns, by their IDs, the containers whose network others share. They
// need not have the labels.
func (d *Source) hosts(ctx context.Context, list []container) (map[string]*container, error) {
	var ids []string
	for i := range list {
		if id := list[i].joins(); id != "" && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	found, err := d.daemon.list(ctx, filters{"id": ids})
	if err != nil {
		return nil, err
	}
	hosts := make(map[string]*container, len(found))
	for i := range found {
		hosts[found[i].ID] = &found[i]
	}
	return hosts, nil
}

// happenings are the events after which the list may be another. Those of
// networks are told of containers that are put in and taken out while they run.
var happenings = filters{
	"type":  {"container", "network"},
	"event": {"start", "die", "pause", "unpause", "health_status", "connect", "disconnect"},
}

// steady is how long a stream of events must have lasted for its end to be
// nothing out of the ordinary: proxies end those that are idle.
const steady = time.Minute

// Watch implements discovery.Source.
func (d *Source) Watch(ctx context.Context, changed func()) error {
	for {
		began := time.Now()
		// changed at its beginning, for what has happened before.
		err := d.daemon.events(ctx, happenings, changed, func(e event) {
			if d.concerns(e) {
				changed()
			}
		})
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		case time.Since(began) < steady:
			return errors.New("the daemon has ended the stream of events")
		}
	}
}

// concerns reports whether an event may be about a container that is wanted. The
// daemon cannot say of those of networks.
func (d *Source) concerns(e event) bool {
	if e.Type != "container" {
		return true
	}
	return !slices.ContainsFunc(d.Labels, func(l string) bool {
		name, want, valued := strings.Cut(l, "=")
		v, ok := e.Actor.Attributes[name]
		return !ok || valued && v != want
	})
}

// Close ends the connections.
func (d *Source) Close() error {
	if d.daemon != nil {
		d.daemon.client.Close()
	}
	return nil
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens; see
// discovery.Settings for the options that all kinds have. Syntax:
//
//	docker [<labels...>] {
//		endpoint     <url>
//		ca_file      <path>
//		cert_file    <path>
//		key_file     <path>
//		label        <labels...>
//		prefix       <prefix>
//		port         <port>|<range>[/tcp|/udp]
//		network      <name>
//		published
//		host_address <address>
//		family       ipv4|ipv6
//		any_health
//		on_empty     keep|withdraw
//		...
//	}
func (d *Source) UnmarshalCaddyfile(t *caddyfile.Dispenser) error {
	t.Next() // consume the name of the kind
	d.Labels = append(d.Labels, t.RemainingArgs()...)
	options := d.CaddyfileOptions()
	options["endpoint"] = caddyopt.String(&d.Endpoint)
	options["ca_file"] = caddyopt.String(&d.CAFile)
	options["cert_file"] = caddyopt.String(&d.CertFile)
	options["key_file"] = caddyopt.String(&d.KeyFile)
	options["label"] = caddyopt.Strings(&d.Labels)
	options["prefix"] = caddyopt.String(&d.Prefix)
	options["port"] = caddyopt.String(&d.Port)
	options["network"] = caddyopt.String(&d.Network)
	options["published"] = caddyopt.Word(&d.Published)
	options["host_address"] = caddyopt.String(&d.HostAddress)
	options["family"] = caddyopt.Enum(&d.Family, ipv4, ipv6)
	options["any_health"] = caddyopt.Word(&d.AnyHealth)
	options["on_empty"] = caddyopt.Enum(&d.OnEmpty, keep, withdraw)
	return caddyopt.BlockOf(t, "the source docker", options)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Source)(nil)
	_ caddy.Validator       = (*Source)(nil)
	_ discovery.Source      = (*Source)(nil)
	_ caddyfile.Unmarshaler = (*Source)(nil)
	_ io.Closer             = (*Source)(nil)
)
