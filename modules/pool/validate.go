package pool

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
)

// Validate checks what needs no guest module. Every error begins with the key
// it is about.
func (c *Config) Validate() error {
	if c.hasSource() {
		if len(c.Targets) > 0 {
			return errors.New("source: there are targets too; a pool has either")
		}
	} else if _, err := hostport.ParseList(c.Targets); err != nil {
		return fmt.Errorf("targets: %w", err)
	}
	if err := c.PerBackend.validate(); err != nil {
		return fmt.Errorf("per_backend.%w", err)
	}
	for _, d := range []struct {
		key  string
		v    *caddy.Duration
		hint string
	}{
		{"connect_timeout", c.ConnectTimeout, "leave it out for 300ms"},
		{"idle_timeout", c.IdleTimeout, "leave it out for 90s"},
		{"hold", c.Hold, "use on_backend_down close to end flows at once"},
	} {
		if d.v != nil && *d.v <= 0 {
			return fmt.Errorf("%s: %v is not above zero; %s", d.key, time.Duration(*d.v), d.hint)
		}
	}
	switch {
	case c.MaxLifetime < 0:
		return fmt.Errorf("max_lifetime: %v is below zero; leave it out for no limit", time.Duration(c.MaxLifetime))
	case c.DrainDeadline < 0:
		return fmt.Errorf("drain_deadline: %v is below zero; leave it out for none", time.Duration(c.DrainDeadline))
	case c.MaxTries != nil && *c.MaxTries < 1:
		return fmt.Errorf("max_tries: %d is less than 1, the first try", *c.MaxTries)
	case c.Keepalive != nil && *c.Keepalive < 0:
		return fmt.Errorf(`keepalive: %v is below zero; use "off"`, time.Duration(*c.Keepalive))
	}
	if err := oneOf("on_all_down", c.OnAllDown, Refuse, TryAll); err != nil {
		return err
	}
	if err := oneOf("on_backend_down", c.OnBackendDown, DownHold, DownClose, DownRehome); err != nil {
		return err
	}
	if err := oneOf("on_backend_removed", c.OnBackendRemoved, RemovedDrain, RemovedClose); err != nil {
		return err
	}
	if c.Hold != nil && c.OnBackendDown != "" && c.OnBackendDown != DownHold {
		return fmt.Errorf("hold: on_backend_down is %s, which does not wait; leave hold out, or set on_backend_down to hold", c.OnBackendDown)
	}
	if c.DrainDeadline != 0 && c.OnBackendRemoved == RemovedClose {
		return errors.New("drain_deadline: on_backend_removed is close, which does not wait; leave drain_deadline out, or set on_backend_removed to drain")
	}
	if _, err := c.ProxyForm(); err != nil {
		return err
	}
	return validSources(c.SourceAddresses)
}

// hasSource reports whether a source is given.
func (c *Config) hasSource() bool {
	return len(c.SourceRaw) > 0 && string(c.SourceRaw) != "null"
}

func (p *PerBackend) validate() error {
	if p.MaxSessions != nil && *p.MaxSessions < 1 {
		return fmt.Errorf("max_sessions: %d is less than 1; leave it out for no limit", *p.MaxSessions)
	}
	if n := p.MaxNewPerSec; n != nil && (*n < 1 || *n > 1_000_000) {
		return fmt.Errorf("max_new_per_sec: %d is not between 1 and 1000000; leave it out for no limit", *n)
	}
	return nil
}

func oneOf[T ~string](key string, v T, allowed ...T) error {
	if v == "" || slices.Contains(allowed, v) {
		return nil
	}
	names := make([]string, len(allowed))
	for i, a := range allowed {
		names[i] = string(a)
	}
	return fmt.Errorf("%s: %q is none of %s", key, v, strings.Join(names, ", "))
}

func validSources(list []string) error {
	seen := make(map[netip.Addr]bool)
	for _, s := range list {
		a, err := netip.ParseAddr(s)
		switch a = a.Unmap(); {
		case err != nil:
			return fmt.Errorf("source_addresses: %q is not an IP address", s)
		case !hostport.OneHost(a):
			return fmt.Errorf("source_addresses: %s is no address to connect from", a)
		case seen[a]:
			return fmt.Errorf("source_addresses: %s is listed twice", a)
		}
		seen[a] = true
	}
	return nil
}

// CheckTarget says what is wrong with one entry of targets.
func CheckTarget(s string) error {
	_, err := hostport.Parse(s)
	return err
}
