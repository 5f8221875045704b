package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
)

func init() { caddy.RegisterModule(new(SRV)) }

// SRV has the places that the SRV records of a name tell of, with their
// weights and priorities. A record with the target "." and no other says that
// the service is not available: the backends go. A name that does not exist, one
// without SRV records and every failure leave the backends that are known.
type SRV struct {
	Settings
	Polled
	Resolvers

	// The full name of the records, as in _game._udp.example.com. Needed.
	Record string `json:"record,omitempty"`

	names    names
	services func(ctx context.Context, record string) (lookup.Services, error)
}

// CaddyModule returns the Caddy module information.
func (*SRV) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.sources.dns_srv",
		New: func() caddy.Module { return new(SRV) },
	}
}

// Provision reads the name and the resolvers.
func (s *SRV) Provision(ctx caddy.Context) error {
	if err := s.Settings.Provision(ctx); err != nil {
		return err
	}
	if s.Record == "" {
		return errors.New("record: missing, as in _game._udp.example.com")
	}
	if !hostport.ValidHost(strings.TrimSuffix(strings.ToLower(s.Record), ".")) {
		return fmt.Errorf("record: %q is not the name of a record, as in _game._udp.example.com", s.Record)
	}
	r, err := s.dns()
	if err != nil {
		return err
	}
	s.names.resolver, s.services = r, r.Services
	return nil
}

// List implements Source. The hosts are looked up where the answer does not
// have their addresses.
func (s *SRV) List(ctx context.Context) (Set, error) {
	found, err := s.services(ctx, s.Record)
	if err != nil {
		return Set{}, err
	}
	if len(found.List) == 0 {
		return Set{Withdrawn: found.None}, nil
	}
	set := Set{}
	hosts := make([]string, 0, len(found.List))
	for _, v := range found.List {
		hosts = append(hosts, v.Host)
	}
	for host, told := range found.Addrs {
		s.names.tell(host, told)
	}
	ttl, trouble := s.names.find(ctx, hosts)
	set.TTL, set.Incomplete = min(max(found.TTL, lookup.MinTTL), ttl), trouble
	for _, v := range found.List {
		for _, ip := range s.names.known[v.Host].Addrs {
			set.Endpoints = append(set.Endpoints, Endpoint{
				Addr: netip.AddrPortFrom(ip, v.Port), Priority: v.Priority,
				// A weight of 0 is to get a very small share, and 1 is the smallest.
				Weight: max(uint32(v.Weight), 1),
			})
		}
	}
	if len(set.Endpoints) == 0 && trouble != nil {
		return Set{}, trouble
	}
	return set, nil
}

// tell takes in addresses that came with another answer.
func (n *names) tell(host string, told lookup.Told) {
	addrs := make([]netip.Addr, 0, len(told.Addrs))
	for _, a := range told.Addrs {
		if hostport.OneHost(a) {
			addrs = append(addrs, a)
		}
	}
	if len(addrs) == 0 {
		return
	}
	if n.known == nil {
		n.known = make(map[string]named)
	}
	k, _, _ := lookup.Known{}.Take(addrs, nil)
	ttl := min(max(told.TTL, lookup.MinTTL), lookup.MaxTTL)
	n.known[host] = named{k, time.Now().Add(ttl)}
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens. Syntax:
//
//	dns_srv [<record>] {
//		record           <name>
//		resolvers        <ip[:port]...>
//		refresh_interval <duration>
//	}
func (s *SRV) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	options := s.CaddyfileOptions()
	maps.Copy(options, s.resolverOptions())
	options["record"] = caddyopt.String(&s.Record)
	if d.NextArg() {
		s.Record = d.Val()
		delete(options, "record")
	}
	return caddyopt.BlockOf(d, "the source dns_srv", options)
}

// Interface guards
var (
	_ Source                = (*SRV)(nil)
	_ caddy.Provisioner     = (*SRV)(nil)
	_ caddy.Validator       = (*SRV)(nil)
	_ caddyfile.Unmarshaler = (*SRV)(nil)
)
