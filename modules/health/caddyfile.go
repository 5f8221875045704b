package health

import (
	"encoding/json"
	"maps"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

const namespace = "wayhouse.health_checks"

// UnmarshalCaddyfile reads a check of any kind, from a dispenser that stands at
// the name of the kind, and returns the pool's JSON for it. Syntax:
//
//	<kind> {
//		<option> <value>
//	}
func UnmarshalCaddyfile(d *caddyfile.Dispenser) (json.RawMessage, error) {
	kind := d.Val()
	if _, err := caddy.GetModule(namespace + "." + kind); err != nil {
		return nil, d.Errf("unrecognized health check %q; %s", kind, suggest.Module(namespace, kind))
	}
	m, err := caddyfile.UnmarshalModule(d, namespace+"."+kind)
	if err != nil {
		return nil, err
	}
	return caddyconfig.JSONModuleObject(m, "check", kind, nil), nil
}

// block reads the options of a kind and those of every kind.
func block(d *caddyfile.Dispenser, s *Settings, own caddyopt.Options) error {
	d.Next() // consume the name of the kind
	options := caddyopt.Options{
		"interval": caddyopt.Ptr(&s.Interval, caddyopt.Duration),
		"timeout":  caddyopt.Ptr(&s.Timeout, caddyopt.Duration),
		"rise":     caddyopt.Ptr(&s.Rise, caddyopt.Int),
		"fall":     caddyopt.Ptr(&s.Fall, caddyopt.Int),
	}
	maps.Copy(options, own)
	return caddyopt.Block(d, options)
}
