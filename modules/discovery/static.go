package discovery

import (
	"context"
	"fmt"
	"maps"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
)

func init() { caddy.RegisterModule(new(Static)) }

// Static is a list of backends that several pools share.
type Static struct {
	Settings
	Polled

	// The backends: ip:port or host:port, as in a pool's targets. A host name is
	// resolved again whenever its answer expires, and every address of it is a
	// backend. At least one; one listed twice is refused.
	Targets []string `json:"targets,omitempty"`

	targets []hostport.Target
	names   names
}

// CaddyModule returns the Caddy module information.
func (*Static) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.sources.static",
		New: func() caddy.Module { return new(Static) },
	}
}

// Provision reads the targets.
func (s *Static) Provision(ctx caddy.Context) (err error) {
	if err := s.Settings.Provision(ctx); err != nil {
		return err
	}
	if s.targets, err = hostport.ParseList(s.Targets); err != nil {
		return fmt.Errorf("targets: %w", err)
	}
	s.names.resolver = lookup.Host
	return nil
}

// List implements Source.
func (s *Static) List(ctx context.Context) (Set, error) {
	return listTargets(ctx, &s.names, s.targets)
}

// listTargets returns the addresses of targets, in their order.
func listTargets(ctx context.Context, n *names, targets []hostport.Target) (Set, error) {
	var hosts []string
	for _, t := range targets {
		if t.Host != "" {
			hosts = append(hosts, t.Host)
		}
	}
	ttl, trouble := n.find(ctx, hosts)
	set := Set{TTL: ttl, Ordered: true, Incomplete: trouble}
	if len(hosts) == 0 {
		set.TTL = 0 // nothing expires
	}
	for _, t := range targets {
		if t.Host == "" {
			set.Endpoints = append(set.Endpoints, Endpoint{Addr: t.Addr})
			continue
		}
		for _, ip := range n.known[t.Host].Addrs {
			set.Endpoints = append(set.Endpoints, Endpoint{Addr: netip.AddrPortFrom(ip, t.Port)})
		}
	}
	if len(set.Endpoints) == 0 {
		return Set{}, trouble
	}
	return set, nil
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens. Syntax:
//
//	static <targets...> {
//		to               <targets...>
//		refresh_interval <duration>
//	}
func (s *Static) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	s.Targets = d.RemainingArgs()
	options := s.CaddyfileOptions()
	maps.Copy(options, caddyopt.Options{"to": caddyopt.Strings(&s.Targets)})
	return caddyopt.BlockOf(d, "the source static", options)
}

// Interface guards
var (
	_ Source                = (*Static)(nil)
	_ caddy.Provisioner     = (*Static)(nil)
	_ caddy.Validator       = (*Static)(nil)
	_ caddyfile.Unmarshaler = (*Static)(nil)
)
