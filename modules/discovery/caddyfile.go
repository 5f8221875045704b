package discovery

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// UnmarshalCaddyfile reads a source of any kind, from a dispenser that stands
// at the name of the kind, and returns the app's JSON for it. Syntax:
//
//	<kind> [<arguments...>] {
//		<option> <value>
//	}
func UnmarshalCaddyfile(d *caddyfile.Dispenser) (json.RawMessage, error) {
	kind := d.Val()
	if _, err := caddy.GetModule(namespace + "." + kind); err != nil {
		return nil, d.Errf("unrecognized source kind %q; %s", kind, suggest.Module(namespace, kind))
	}
	m, err := caddyfile.UnmarshalModule(d, namespace+"."+kind)
	if err != nil {
		return nil, err
	}
	return caddyconfig.JSONModuleObject(m, inlineKey, kind, nil), nil
}

// UnmarshalUse reads what a pool says of its source, from a dispenser that
// stands before the arguments. A word alone is left to Load, which knows the
// names. Syntax:
//
//	<name>
//	<kind> [<arguments...>] {
//		<option> <value>
//	}
func UnmarshalUse(d *caddyfile.Dispenser) (json.RawMessage, error) {
	if !d.NextArg() {
		return nil, d.Errf("source: the name or the kind is missing, as in source dns game.example.com 7777")
	}
	word := d.Val()
	if d.CountRemainingArgs() > 0 || beforeBlock(d) {
		return UnmarshalCaddyfile(d)
	}
	return json.Marshal(word)
}

// beforeBlock reports whether a block follows in the same line.
func beforeBlock(d *caddyfile.Dispenser) bool {
	line := d.Line()
	if !d.Next() {
		return false
	}
	defer d.Prev()
	return d.Val() == "{" && d.Line() == line && !d.Token().Quoted()
}
