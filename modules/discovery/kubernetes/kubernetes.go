// Package kubernetes finds the backends of pools among the pods of a Kubernetes
// service, by its EndpointSlices. How they are listed and watched is in
// internal/kube.
package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/kube"
	"github.com/wayhouse-proxy/wayhouse/internal/placeholder"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

func init() { caddy.RegisterModule(new(Source)) }

// Source finds the ready endpoints of a service.
type Source struct {
	discovery.Settings
	kube.Access

	// The name of the service. Placeholders are replaced at load. Needed.
	Service string `json:"service,omitempty"`

	// The name of the service's port. Default: the first port of each slice.
	// Slices without the port are passed over.
	PortName string `json:"port_name,omitempty"`

	// Which addresses are taken of a service that has both kinds: ipv4 or ipv6.
	// Default: both, each of which is a backend.
	Family Family `json:"family,omitempty"`

	client   *kube.Client
	follower *kube.Follower
}

// Family is a kind of addresses.
type Family string

// The families.
const (
	IPv4 Family = "ipv4"
	IPv6 Family = "ipv6"
)

// serviceLabel has, on a slice, the name of its service.
const serviceLabel = "kubernetes.io/service-name"

// CaddyModule returns the Caddy module information.
func (*Source) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.sources.kubernetes",
		New: func() caddy.Module { return new(Source) },
	}
}

// Provision sets the defaults and reads tokens and certificates. It asks
// nothing.
func (s *Source) Provision(ctx caddy.Context) (err error) {
	if err := s.Settings.Provision(ctx); err != nil {
		return err
	}
	if err := placeholder.Replace(
		placeholder.Option{Name: "service", Value: &s.Service},
		placeholder.Option{Name: "port_name", Value: &s.PortName},
	); err != nil {
		return err
	}
	if err := s.check(); err != nil {
		return err
	}
	if s.client, err = s.Connect(); err != nil {
		return err
	}
	s.follower = s.client.Follow(kube.Objects{
		Group: "discovery.k8s.io/v1", Resource: "endpointslices", Labels: serviceLabel + "=" + s.Service,
	})
	return nil
}

// check comes before Connect, for the service is a part of what is asked.
func (s *Source) check() error {
	switch {
	case s.Service == "":
		return errors.New("service: none; give the name of a service, as in kubernetes match-server")
	case !kube.IsName(s.Service):
		return fmt.Errorf("service: %q is not made of up to 63 small letters, digits and hyphens", s.Service)
	case s.PortName != "" && !kube.IsName(s.PortName):
		return fmt.Errorf("port_name: %q is not made of up to 63 small letters, digits and hyphens", s.PortName)
	case s.Family != "" && s.Family != IPv4 && s.Family != IPv6:
		return fmt.Errorf("family: %q is neither ipv4 nor ipv6", s.Family)
	}
	return nil
}

// Close gives up connections.
func (s *Source) Close() error {
	if s.client != nil {
		s.client.Close()
	}
	return nil
}

// List implements discovery.Source.
func (s *Source) List(ctx context.Context) (discovery.Set, error) {
	found, err := kube.List(ctx, s.follower, s.add)
	if err != nil {
		return discovery.Set{}, err
	}
	return discovery.Set{Endpoints: found}, nil
}

// Watch implements discovery.Source.
func (s *Source) Watch(ctx context.Context, changed func()) error {
	return s.follower.Watch(ctx, changed)
}

// slice is what matters of an EndpointSlice.
type slice struct {
	AddressType string
	Endpoints   []struct {
		Addresses  []string
		Conditions struct{ Ready *bool }
	}
	Ports []struct {
		Name string
		Port *int
	}
}

// add appends the endpoints of a slice that are ready. One that does not say so
// is. Of several addresses, nobody but the first has a meaning. What cannot be
// an address is left to the host, which counts it.
func (s *Source) add(found []discovery.Endpoint, slice *slice) []discovery.Endpoint {
	port, ok := s.port(slice)
	if !ok || !s.wants(slice.AddressType) {
		return found
	}
	for _, e := range slice.Endpoints {
		if ready := e.Conditions.Ready; ready != nil && !*ready || len(e.Addresses) == 0 {
			continue
		}
		ip, _ := netip.ParseAddr(e.Addresses[0])
		found = append(found, discovery.Endpoint{Addr: netip.AddrPortFrom(ip, port)})
	}
	return found
}

func (s *Source) wants(addressType string) bool {
	switch addressType {
	case "IPv4":
		return s.Family != IPv6
	case "IPv6":
		return s.Family != IPv4
	}
	return false // FQDN
}

// port is the one that is wanted of a slice's. A port without a number stands
// for all of them, which is no address.
func (s *Source) port(slice *slice) (port uint16, ok bool) {
	for _, p := range slice.Ports {
		if s.PortName != "" && p.Name != s.PortName {
			continue
		}
		if p.Port == nil || *p.Port < 1 || *p.Port > 65535 {
			return 0, false
		}
		return uint16(*p.Port), true
	}
	return 0, false
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens. Syntax:
//
//	kubernetes <service> {
//		namespace        <name>
//		port_name        <name>
//		family           ipv4|ipv6
//		api              <url>
//		token_file       <path>
//		ca_file          <path>
//		kubeconfig       <path> [<context>]
//		refresh_interval <duration>
//	}
func (s *Source) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	if !d.Args(&s.Service) {
		return d.Errf("source kubernetes: the service is missing, as in kubernetes match-server")
	}
	options := s.Settings.CaddyfileOptions()
	maps.Copy(options, s.Access.CaddyfileOptions())
	maps.Copy(options, caddyopt.Options{
		"port_name": caddyopt.String(&s.PortName),
		"family":    caddyopt.Enum(&s.Family, IPv4, IPv6),
	})
	return caddyopt.BlockOf(d, "the source kubernetes", options)
}

// Interface guards
var (
	_ discovery.Source      = (*Source)(nil)
	_ caddy.Provisioner     = (*Source)(nil)
	_ caddy.Validator       = (*Source)(nil)
	_ caddyfile.Unmarshaler = (*Source)(nil)
	_ io.Closer             = (*Source)(nil)
)
