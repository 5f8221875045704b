package resolver

import (
	"encoding/json"
	"maps"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// UnmarshalCaddyfile reads a resolver of any kind, from a dispenser that stands
// at the name of the kind, and returns the app's JSON for it. Syntax:
//
//	<kind> [<arguments...>] {
//		<option> <value>
//	}
func UnmarshalCaddyfile(d *caddyfile.Dispenser) (json.RawMessage, error) {
	kind := d.Val()
	if _, err := caddy.GetModule(namespace + "." + kind); err != nil {
		return nil, d.Errf("unrecognized resolver kind %q; %s", kind, suggest.Module(namespace, kind))
	}
	m, err := caddyfile.UnmarshalModule(d, namespace+"."+kind)
	if err != nil {
		return nil, err
	}
	return caddyconfig.JSONModuleObject(m, inlineKey, kind, nil), nil
}

// CaddyfileOptions are the options of every kind. Syntax:
//
//	timeout    <duration>
//	on_error   reject|fallback_route|stale_ok
//	wait_bytes <number>
//	cache {
//		key          <parts...>
//		positive_ttl <duration>
//		negative_ttl <duration>
//		max_entries  <number>
//	}
//	target_connect_timeout <duration>
//	target_idle_timeout    <duration>
//	allow_targets          <prefixes...>
//
// and proxy_protocol, see internal/proxyopt.
func (s *Settings) CaddyfileOptions() caddyopt.Options {
	options := caddyopt.Options{
		"timeout":    caddyopt.Ptr(&s.Timeout, caddyopt.Duration),
		"on_error":   caddyopt.Enum(&s.OnError, Reject, FallbackRoute, StaleOK),
		"wait_bytes": caddyopt.Int(&s.WaitBytes),
		"cache": caddyopt.Func(func(d *caddyfile.Dispenser) error {
			s.Cache = new(Cache)
			return caddyopt.Block(d, caddyopt.Options{
				"key":          caddyopt.Strings(&s.Cache.Key),
				"positive_ttl": caddyopt.Ptr(&s.Cache.PositiveTTL, caddyopt.Duration),
				"negative_ttl": caddyopt.Ptr(&s.Cache.NegativeTTL, caddyopt.Duration),
				"max_entries":  caddyopt.Ptr(&s.Cache.MaxEntries, caddyopt.Int),
			})
		}),
		"target_connect_timeout": caddyopt.Ptr(&s.TargetConnectTimeout, caddyopt.Duration),
		"target_idle_timeout":    caddyopt.Ptr(&s.TargetIdleTimeout, caddyopt.Duration),
		"allow_targets":          caddyopt.Strings(&s.AllowTargets),
	}
	maps.Copy(options, s.ProxyOptions())
	return options
}

// unmarshalRemote reads a kind that asks a service. Syntax:
//
//	<kind> <url> {
//		ca_file <path>
//		header  <name> <value>
//		...
//	}
func unmarshalRemote(d *caddyfile.Dispenser, s *Settings, r *Remote) error {
	d.Next() // consume the name of the kind
	kind := d.Val()
	if !d.NextArg() {
		return d.Errf("resolver %s: the URL is missing, as in %s https://matchmaker.example.com:8443", kind, kind)
	}
	r.Endpoint = d.Val()
	options := s.CaddyfileOptions()
	maps.Copy(options, caddyopt.Options{
		"ca_file": caddyopt.String(&r.CAFile),
		"header": caddyopt.Many(caddyopt.Func(func(d *caddyfile.Dispenser) error {
			var name, v string
			if !d.AllArgs(&name, &v) {
				return d.Errf("header: a name and a value are wanted, as in header Authorization \"Bearer {env.TOKEN}\"")
			}
			if _, twice := r.Headers[name]; twice {
				return d.Errf("header: %s is given twice", name)
			}
			if r.Headers == nil {
				r.Headers = make(map[string]string)
			}
			r.Headers[name] = v
			return nil
		})),
	})
	return caddyopt.BlockOf(d, "a resolver", options)
}

// UnmarshalCaddyfile sets up the resolver from Caddyfile tokens; see
// CaddyfileOptions for the options that all kinds have. Syntax:
//
//	http <url> {
//		ca_file <path>
//		header  <name> <value>
//		...
//	}
func (h *HTTP) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return unmarshalRemote(d, &h.Settings, &h.Remote)
}

// UnmarshalCaddyfile sets up the resolver from Caddyfile tokens; see
// CaddyfileOptions for the options that all kinds have. Syntax:
//
//	grpc <url> {
//		ca_file <path>
//		header  <name> <value>
//		...
//	}
func (g *GRPC) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return unmarshalRemote(d, &g.Settings, &g.Remote)
}

// Interface guards
var (
	_ caddyfile.Unmarshaler = (*HTTP)(nil)
	_ caddyfile.Unmarshaler = (*GRPC)(nil)
)
