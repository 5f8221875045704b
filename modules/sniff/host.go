package sniff

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

func init() { caddy.RegisterModule(new(Declared)) }

const hostNamespace = "wayhouse.sniffer_hosts"

// Declared are native sniffers with options, each by a name of its own; those
// without options need no declaration.
type Declared struct {
	SniffersRaw map[string]json.RawMessage `json:"-" caddy:"namespace=wayhouse.sniffers inline_key=sniffer"`

	sniffers map[string]any
}

// CaddyModule returns the Caddy module information.
func (*Declared) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  hostNamespace + ".native",
		New: func() caddy.Module { return new(Declared) },
	}
}

// UnmarshalJSON decodes the sniffers by name.
func (n *Declared) UnmarshalJSON(b []byte) error { return json.Unmarshal(b, &n.SniffersRaw) }

// MarshalJSON encodes the sniffers by name.
func (n *Declared) MarshalJSON() ([]byte, error) { return json.Marshal(n.SniffersRaw) }

// Provision loads the sniffers.
func (n *Declared) Provision(ctx caddy.Context) error {
	if len(n.SniffersRaw) == 0 {
		return nil
	}
	mods, err := ctx.LoadModule(n, "SniffersRaw")
	if err != nil {
		return err
	}
	n.sniffers = mods.(map[string]any)
	return nil
}

// Sniffers implements Host.
func (n *Declared) Sniffers(add func(name, place string, s Sniffer) error) error {
	for _, name := range slices.Sorted(maps.Keys(n.sniffers)) {
		s, ok := n.sniffers[name].(Sniffer)
		if !ok {
			return fmt.Errorf("%s: %T is no sniffer", name, n.sniffers[name])
		}
		if err := add(name, "sniffers.native."+name, s); err != nil {
			return err
		}
	}
	return nil
}

// UnmarshalCaddyfile sets up the sniffers from Caddyfile tokens. Syntax:
//
//	native {
//		<name> <kind> [<arguments...>]
//	}
func (n *Declared) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume host name
	what := d.Val()
	if d.NextArg() {
		return d.Errf("unexpected argument %q of %s", d.Val(), what)
	}
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name := d.Val()
		if n.SniffersRaw[name] != nil {
			return d.Errf("%s: there is a sniffer of this name already", name)
		}
		if !d.NextArg() {
			return d.Errf("%s: the kind is missing, as in mygame regex_first_bytes hex:ffffffff", name)
		}
		kind := d.Val()
		m, err := load(d, namespace, "sniffer", kind)
		if err != nil {
			return err
		}
		if n.SniffersRaw == nil {
			n.SniffersRaw = make(map[string]json.RawMessage)
		}
		n.SniffersRaw[name] = caddyconfig.JSONModuleObject(m, "sniffer", kind, nil)
	}
	return nil
}

// CaddyfileOption reads the app's option sniffers into to. Syntax:
//
//	sniffers <host> {
//		...
//	}
func CaddyfileOption(to *caddy.ModuleMap) caddyopt.Option {
	return caddyopt.Many(caddyopt.Func(func(d *caddyfile.Dispenser) error {
		if !d.NextArg() {
			return d.Errf("sniffers: the host is missing, as in sniffers native { ... }")
		}
		name := d.Val()
		if (*to)[name] != nil {
			return d.Errf("sniffers %s: given twice", name)
		}
		m, err := load(d, hostNamespace, "host of sniffers", name)
		if err != nil {
			return err
		}
		if *to == nil {
			*to = make(caddy.ModuleMap)
		}
		(*to)[name] = caddyconfig.JSON(m, nil)
		return nil
	}))
}

// load reads a module of a namespace from a dispenser that stands at its name.
func load(d *caddyfile.Dispenser, in, what, name string) (any, error) {
	if _, err := caddy.GetModule(in + "." + name); err != nil {
		return nil, d.Errf("unrecognized %s %q; %s", what, name, suggest.Module(in, name))
	}
	return caddyfile.UnmarshalModule(d, in+"."+name)
}

// Interface guards
var (
	_ Host                  = (*Declared)(nil)
	_ caddy.Provisioner     = (*Declared)(nil)
	_ caddyfile.Unmarshaler = (*Declared)(nil)
)
