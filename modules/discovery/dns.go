package discovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
)

func init() { caddy.RegisterModule(new(DNS)) }

// DNS has every address of a host name (A and AAAA), at one port. The answer
// says how long it holds, from 1s to 5m; when asking fails, also of one family
// alone, the addresses that are known stay.
type DNS struct {
	Settings
	Polled
	Resolvers

	// The host name. Needed.
	Name string `json:"name,omitempty"`

	// The port of the backends, from 1 to 65535. Needed.
	Port int `json:"port,omitempty"`

	target hostport.Target
	names  names
}

// CaddyModule returns the Caddy module information.
func (*DNS) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.sources.dns",
		New: func() caddy.Module { return new(DNS) },
	}
}

// Provision reads the name and the resolvers.
func (s *DNS) Provision(ctx caddy.Context) (err error) {
	if err := s.Settings.Provision(ctx); err != nil {
		return err
	}
	if s.Name == "" {
		return errors.New("name: missing, as in game.example.com")
	}
	if s.Port < 1 || s.Port > 65535 {
		return fmt.Errorf("port: %d is not a number from 1 to 65535", s.Port)
	}
	if s.target, err = hostport.Parse(net.JoinHostPort(s.Name, strconv.Itoa(s.Port))); err != nil || s.target.Host == "" {
		return fmt.Errorf("name: %q is not a host name", s.Name)
	}
	s.names.resolver, err = s.dns()
	return err
}

// List implements Source.
func (s *DNS) List(ctx context.Context) (Set, error) {
	set, err := listTargets(ctx, &s.names, []hostport.Target{s.target})
	set.Ordered = false
	if set.Incomplete != nil && !s.names.known[s.target.Host].Half {
		return Set{}, set.Incomplete
	}
	return set, err
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens. Syntax:
//
//	dns [<name> <port>] {
//		name             <name>
//		port             <number>
//		resolvers        <ip[:port]...>
//		refresh_interval <duration>
//	}
func (s *DNS) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	options := s.CaddyfileOptions()
	maps.Copy(options, s.resolverOptions())
	maps.Copy(options, caddyopt.Options{"name": caddyopt.String(&s.Name), "port": caddyopt.Int(&s.Port)})
	if d.NextArg() {
		s.Name = d.Val()
		if !d.NextArg() {
			return d.Errf("dns %s: the port is missing, as in dns %s 7777", s.Name, s.Name)
		}
		n, err := strconv.Atoi(d.Val())
		if err != nil {
			return d.Errf("port: %q is not a whole number", d.Val())
		}
		s.Port = n
		delete(options, "name")
		delete(options, "port")
	}
	return caddyopt.BlockOf(d, "the source dns", options)
}

// Resolvers are the DNS servers that a source asks.
type Resolvers struct {
	// The DNS servers, ip or ip:port, in the order in which they are asked.
	// Names are asked for as they are written then. Default: those of
	// /etc/resolv.conf, and for host names /etc/hosts and the search list.
	Servers []string `json:"resolvers,omitempty"`
}

func (r *Resolvers) resolverOptions() caddyopt.Options {
	return caddyopt.Options{"resolvers": caddyopt.Strings(&r.Servers)}
}

const dnsPort = 53

// dns is who is asked.
func (r *Resolvers) dns() (*lookup.DNS, error) {
	if len(r.Servers) == 0 {
		return lookup.Host, nil
	}
	d := new(lookup.DNS)
	for i, s := range r.Servers {
		a, err := netip.ParseAddrPort(s)
		if err != nil {
			ip, ierr := netip.ParseAddr(strings.Trim(s, "[]"))
			if ierr != nil {
				return nil, fmt.Errorf("resolvers[%d]: %q is neither ip nor ip:port", i, s)
			}
			a = netip.AddrPortFrom(ip, dnsPort)
		}
		if ip := a.Addr().Unmap(); a.Port() == 0 || !hostport.OneHost(ip) {
			return nil, fmt.Errorf("resolvers[%d]: %q is not the address of a server", i, s)
		}
		d.Servers = append(d.Servers, a)
	}
	return d, nil
}

// Interface guards
var (
	_ Source                = (*DNS)(nil)
	_ caddy.Provisioner     = (*DNS)(nil)
	_ caddy.Validator       = (*DNS)(nil)
	_ caddyfile.Unmarshaler = (*DNS)(nil)
)
