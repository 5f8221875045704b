package pool

import (
	"fmt"
	"maps"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
	"github.com/wayhouse-proxy/wayhouse/modules/health"
)

// CaddyfileOptions are the options of a pool, in the app and in a handler.
// Syntax:
//
//	to                 <targets...>
//	source             <name> | <kind> [<arguments...>] { ... }
//	balancer           <policy> [<arguments...>] { ... }
//	health             <check> { ... }
//	max_sessions       <number>
//	max_new_per_sec    <number>
//	connect_timeout    <duration>
//	idle_timeout       <duration>
//	max_lifetime       <duration>
//	max_tries          <number>
//	keepalive          <duration>|off
//	nodelay            on|off
//	on_all_down        refuse|try_all
//	on_backend_down    hold [<duration>]|close|rehome
//	on_backend_removed drain [<duration>]|close
//	source_addresses   <ips...>
//
// and proxy_protocol, see internal/proxyopt.
func (c *Config) CaddyfileOptions() caddyopt.Options {
	options := caddyopt.Options{
		"to": caddyopt.Strings(&c.Targets),
		"source": caddyopt.Func(func(d *caddyfile.Dispenser) (err error) {
			c.SourceRaw, err = discovery.UnmarshalUse(d)
			return err
		}),
		"balancer":        caddyopt.Func(c.unmarshalBalancer),
		"health":          caddyopt.Func(c.unmarshalHealth),
		"max_sessions":    caddyopt.Ptr(&c.PerBackend.MaxSessions, caddyopt.Int),
		"max_new_per_sec": caddyopt.Ptr(&c.PerBackend.MaxNewPerSec, caddyopt.Int),
		"connect_timeout": caddyopt.Ptr(&c.ConnectTimeout, caddyopt.Duration),
		"idle_timeout":    caddyopt.Ptr(&c.IdleTimeout, caddyopt.Duration),
		"max_lifetime":    caddyopt.Duration(&c.MaxLifetime),
		"max_tries":       caddyopt.Ptr(&c.MaxTries, caddyopt.Int),
		"keepalive":       caddyopt.Ptr(&c.Keepalive, keepalive),
		"nodelay":         caddyopt.Ptr(&c.NoDelay, caddyopt.Switch),
		"on_all_down":     caddyopt.Enum(&c.OnAllDown, Refuse, TryAll),
		"on_backend_down": modeAndDuration(
			caddyopt.Enum(&c.OnBackendDown, DownHold, DownClose, DownRehome),
			caddyopt.Ptr(&c.Hold, caddyopt.Duration)),
		"on_backend_removed": modeAndDuration(
			caddyopt.Enum(&c.OnBackendRemoved, RemovedDrain, RemovedClose),
			caddyopt.Duration(&c.DrainDeadline)),
		"source_addresses": caddyopt.Strings(&c.SourceAddresses),
	}
	maps.Copy(options, c.ProxyOptions())
	return options
}

func (c *Config) unmarshalBalancer(d *caddyfile.Dispenser) (err error) {
	if !d.NextArg() {
		return d.Errf("balancer: the policy is missing, as in balancer round_robin")
	}
	c.BalancerRaw, err = balancer.UnmarshalCaddyfile(d)
	return err
}

func (c *Config) unmarshalHealth(d *caddyfile.Dispenser) (err error) {
	if !d.NextArg() {
		return d.Errf("health: the check is missing, as in health tcp_connect")
	}
	c.HealthRaw, err = health.UnmarshalCaddyfile(d)
	return err
}

func keepalive(to *Keepalive) caddyopt.Option {
	return caddyopt.Value(to, func(s string) (Keepalive, error) {
		if s == "off" {
			return 0, nil
		}
		d, err := caddy.ParseDuration(s)
		if err != nil {
			return 0, fmt.Errorf("%q is neither a duration, such as 30s, nor off", s)
		}
		return Keepalive(d), nil
	})
}

// modeAndDuration is an option with a mode and, after it, how long the mode
// waits. Which modes wait is for Validate to say.
func modeAndDuration(mode, wait caddyopt.Option) caddyopt.Option {
	return caddyopt.Func(func(d *caddyfile.Dispenser) error {
		if err := mode.Read(d); err != nil || d.CountRemainingArgs() == 0 {
			return err
		}
		return wait.Read(d)
	})
}
