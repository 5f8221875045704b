package health

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// UnmarshalCaddyfile reads a check of any kind, from a dispenser that stands at
// the name of the kind, and returns the pool's JSON for it. Syntax:
//
//	<kind> {
//		<option> <value>
//	}
func UnmarshalCaddyfile(d *caddyfile.Dispenser) (json.RawMessage, error) {
	kind := d.Val()
	if _, err := caddy.GetModule("wayhouse.health_checks." + kind); err != nil {
		return nil, d.Errf("unrecognized health check %q", kind)
	}
	m, err := caddyfile.UnmarshalModule(d, "wayhouse.health_checks."+kind)
	if err != nil {
		return nil, err
	}
	return caddyconfig.JSONModuleObject(m, "check", kind, nil), nil
}

// options are the setters of a block's options, each with one value.
type options map[string]func(value string) error

// block reads the options of a kind and those of every kind, each at most once.
func block(d *caddyfile.Dispenser, s *Settings, own options) error {
	common := options{
		"interval": func(v string) error { return duration(ptr(&s.Interval), v) },
		"timeout":  func(v string) error { return duration(ptr(&s.Timeout), v) },
		"rise":     func(v string) error { return number(ptr(&s.Rise), v) },
		"fall":     func(v string) error { return number(ptr(&s.Fall), v) },
	}
	d.Next() // consume the name of the kind
	kind := d.Val()
	if d.NextArg() {
		return d.Errf("unexpected argument %q", d.Val())
	}
	seen := make(map[string]bool)
	for d.NextBlock(0) {
		name := d.Val()
		set, ok := own[name]
		if !ok {
			if set, ok = common[name]; !ok {
				return d.Errf("unrecognized option %q of %s", name, kind)
			}
		}
		if seen[name] {
			return d.Errf("%s: given twice", name)
		}
		seen[name] = true
		args := d.RemainingArgs()
		if len(args) != 1 {
			return d.Errf("%s: want one value, not %d", name, len(args))
		}
		if err := set(args[0]); err != nil {
			return d.Errf("%s: %v", name, err)
		}
		if d.NextBlock(1) {
			return d.Errf("%s: takes no block", name)
		}
	}
	return nil
}

func ptr[T any](p **T) *T {
	if *p == nil {
		*p = new(T)
	}
	return *p
}

func str(to *string) func(string) error {
	return func(v string) error { *to = v; return nil }
}

func number(to *int, v string) error {
	n, err := strconv.Atoi(v)
	if err != nil {
		return fmt.Errorf("%q is not a number", v)
	}
	*to = n
	return nil
}

func duration(to *caddy.Duration, v string) error {
	d, err := caddy.ParseDuration(v)
	if err != nil {
		return fmt.Errorf("%q is not a duration, such as 500ms", v)
	}
	*to = caddy.Duration(d)
	return nil
}
