package proxy

import (
	"encoding/json"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/offload"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/resolver"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

func init() { httpcaddyfile.RegisterGlobalOption("wayhouse", parseGlobalOption) }

// parseGlobalOption sets up the app from Caddyfile tokens. Several blocks make
// one app. Syntax:
//
//	wayhouse {
//		workers        <number>
//		shutdown_grace <duration>
//		state_dir      <path>|off
//		limits {
//			max_connections          <number>
//			max_udp_sessions         <number>
//			max_new_sessions_per_sec <number>
//			overload {
//				...
//			}
//		}
//		geo_db         <path>
//		geo_asn_db     <path>
//		connection_log {
//			sample   <share>
//			open
//			progress <duration>
//		}
//		tracing
//		offload nftables {
//			block_after <number>
//			block_for   <duration>
//			max_blocked <number>
//		}
//		source <name> <kind> [<arguments...>] {
//			...
//		}
//		pool <name> {
//			to <targets...>
//			...
//		}
//		resolver <name> <kind> <url> {
//			...
//		}
//		sniffers <host> {
//			...
//		}
//		listener <name> <addresses...> {
//			...
//		}
//	}
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	app := new(App)
	d.Next() // consume option name
	options := app.caddyfileOptions()
	if before, ok := existing.(httpcaddyfile.App); ok {
		if err := app.mergeInto(before.Value, options); err != nil {
			return nil, d.WrapErr(err)
		}
	}
	if err := caddyopt.Block(d, options); err != nil {
		return nil, err
	}
	return httpcaddyfile.App{Name: "wayhouse", Value: caddyconfig.JSON(app, nil)}, nil
}

// mergeInto takes over what an earlier block has set. Pools and listeners are
// added to it; what is there once cannot be set again.
func (a *App) mergeInto(earlier json.RawMessage, options caddyopt.Options) error {
	var set map[string]json.RawMessage
	if err := json.Unmarshal(earlier, &set); err != nil {
		return err
	}
	for name := range options {
		if _, ok := set[name]; ok {
			options[name] = caddyopt.Func(func(d *caddyfile.Dispenser) error {
				return d.Errf("%s: given by an earlier wayhouse block already", name)
			})
		}
	}
	return json.Unmarshal(earlier, a)
}

func (a *App) caddyfileOptions() caddyopt.Options {
	return caddyopt.Options{
		"workers":        caddyopt.Int(&a.Workers),
		"shutdown_grace": caddyopt.Ptr(&a.ShutdownGrace, caddyopt.Duration),
		"state_dir":      caddyopt.String(&a.StateDir),
		"limits":         caddyopt.Nested(a.Limits.CaddyfileOptions()),
		"geo_db":         caddyopt.String(&a.GeoDB),
		"geo_asn_db":     caddyopt.String(&a.GeoASNDB),
		"connection_log": caddyopt.Func(a.unmarshalConnectionLog),
		"tracing":        caddyopt.Func(a.unmarshalTracing),
		"offload":        caddyopt.Func(a.unmarshalOffload),
		"source":         caddyopt.Many(caddyopt.Func(a.unmarshalSource)),
		"pool":           caddyopt.Many(caddyopt.Func(a.unmarshalPool)),
		"resolver":       caddyopt.Many(caddyopt.Func(a.unmarshalResolver)),
		"sniffers":       sniff.CaddyfileOption(&a.SniffersRaw),
		"listener":       caddyopt.Many(caddyopt.Func(a.unmarshalListener)),
	}
}

func (a *App) unmarshalOffload(d *caddyfile.Dispenser) error {
	a.Offload = new(offload.Config)
	return a.Offload.UnmarshalCaddyfile(d)
}

func (a *App) unmarshalSource(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Errf("source: the name is missing, as in source match dns game.example.com 7777")
	}
	name := d.Val()
	if a.SourcesRaw[name] != nil {
		return d.Errf("source %s: there is a source of this name already", name)
	}
	if !d.NextArg() {
		return d.Errf("source %s: the kind is missing, as in source %s dns game.example.com 7777", name, name)
	}
	raw, err := discovery.UnmarshalCaddyfile(d)
	if err != nil {
		return err
	}
	if a.SourcesRaw == nil {
		a.SourcesRaw = make(map[string]json.RawMessage)
	}
	a.SourcesRaw[name] = raw
	return nil
}

func (a *App) unmarshalTracing(*caddyfile.Dispenser) error {
	a.Tracing = new(tracing.Config)
	return nil
}

func (a *App) unmarshalConnectionLog(d *caddyfile.Dispenser) error {
	a.ConnectionLog = new(flow.LogConfig)
	return a.ConnectionLog.UnmarshalCaddyfile(d)
}

func (a *App) unmarshalPool(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Errf("pool: the name is missing, as in pool lobby { to 10.0.0.5:7777 }")
	}
	name := d.Val()
	if a.Pools[name] != nil {
		return d.Errf("pool %s: there is a pool of this name already", name)
	}
	if a.Pools == nil {
		a.Pools = make(map[string]*pool.Config)
	}
	c := new(pool.Config)
	a.Pools[name] = c
	return caddyopt.BlockOf(d, "a pool", c.CaddyfileOptions())
}

func (a *App) unmarshalResolver(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Errf("resolver: the name is missing, as in resolver matchmaker http https://matchmaker.example.com")
	}
	name := d.Val()
	if a.ResolversRaw[name] != nil {
		return d.Errf("resolver %s: there is a resolver of this name already", name)
	}
	if !d.NextArg() {
		return d.Errf("resolver %s: the kind is missing, as in resolver %s http https://matchmaker.example.com", name, name)
	}
	raw, err := resolver.UnmarshalCaddyfile(d)
	if err != nil {
		return err
	}
	if a.ResolversRaw == nil {
		a.ResolversRaw = make(map[string]json.RawMessage)
	}
	a.ResolversRaw[name] = raw
	return nil
}

func (a *App) unmarshalListener(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Errf("listener: the name is missing, as in listener game udp/0.0.0.0:7777 { ... }")
	}
	name := d.Val()
	if a.Listeners[name] != nil {
		return d.Errf("listener %s: there is a listener of this name already", name)
	}
	if a.Listeners == nil {
		a.Listeners = make(map[string]*listener.Listener)
	}
	l := new(listener.Listener)
	a.Listeners[name] = l
	return l.UnmarshalCaddyfile(d)
}
