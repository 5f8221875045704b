// Package pool holds the backends that flows are sent to. A Config is what the
// user writes; a Pool is one config's view of it, with the set of backends a
// flow may be given now; a Backend is one address of one pool, and outlives
// configs, so that its health, its operator state and its counts do.
package pool

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/proxyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
)

// Config is a pool: the backends that flows are spread over, how they are
// checked, and what becomes of flows whose backend goes away.
type Config struct {
	// The backends: ip:port or host:port. A host name is resolved when the config
	// starts and again whenever its answer expires, and every address of it is a
	// backend. When resolving fails, the addresses that are known stay. At
	// least one, unless there is a source; a port of 0 and a target listed twice
	// are refused.
	Targets []string `json:"targets,omitempty"`

	// Who says which backends there are, instead of targets: the name of one of
	// the app's sources, or an object with the kind, under source, and its
	// options. A string that names no source is a kind without options.
	SourceRaw json.RawMessage `json:"source,omitempty" caddy:"namespace=wayhouse.sources inline_key=source"`

	// How a backend is chosen for a new flow: the policy, round_robin,
	// least_conn, weighted, consistent_hash, first_available or another module,
	// and its options. Default: round_robin.
	BalancerRaw json.RawMessage `json:"balancer,omitempty" caddy:"namespace=wayhouse.balancers inline_key=policy"`

	// How the backends are checked: the check, tcp_connect, udp_probe, http, none
	// or another module, and its options. A pool that only UDP listeners use has
	// to name one. Default: tcp_connect.
	HealthRaw json.RawMessage `json:"health,omitempty" caddy:"namespace=wayhouse.health_checks inline_key=check"`

	// What one backend may be given. Default: no limits.
	PerBackend PerBackend `json:"per_backend,omitzero"`

	// How long a TCP backend may take to accept before the next one is tried.
	// Zero is refused. Default: 300ms.
	ConnectTimeout *caddy.Duration `json:"connect_timeout,omitempty"`

	// How long a flow may be without a byte in either direction before it is
	// ended. Zero is refused. Default: 90s.
	IdleTimeout *caddy.Duration `json:"idle_timeout,omitempty"`

	// How old a flow may become before it is ended. Default: no limit.
	MaxLifetime caddy.Duration `json:"max_lifetime,omitempty"`

	// How many backends are tried for one TCP flow before it is refused. At
	// least 1. Default: 2.
	MaxTries *int `json:"max_tries,omitempty"`

	// How long a TCP connection is silent before the kernel asks whether the other
	// end still lives, on both sides; "off" or 0 never asks. Default: 30s.
	Keepalive *Keepalive `json:"keepalive,omitempty"`

	// Send small TCP segments at once (TCP_NODELAY) on both sides. Default: true.
	NoDelay *bool `json:"nodelay,omitempty"`

	// What happens to new flows while every backend is down: refuse them, or
	// try_all, spread them over all the backends the operator has enabled.
	// Default: refuse.
	OnAllDown AllDown `json:"on_all_down,omitempty"`

	// What happens to the UDP sessions of a backend that goes down: hold leaves
	// them and ends them when it is still down after hold; close ends them at
	// once; rehome moves them to another backend at once. A TCP connection ends
	// by itself. Default: hold.
	OnBackendDown DownMode `json:"on_backend_down,omitempty"`

	// How long the UDP sessions of a backend that is down are left. Refused with another
	// on_backend_down than hold; zero is refused, for that is close. Default: 30s.
	Hold *caddy.Duration `json:"hold,omitempty"`

	// What happens to the flows of a backend that is no longer in the pool, by
	// DNS or by a new config: drain lets them end by themselves, close ends them
	// at once. Default: drain.
	OnBackendRemoved RemovedMode `json:"on_backend_removed,omitempty"`

	// When draining flows are ended after all. Refused with another
	// on_backend_removed than drain. Default: never.
	DrainDeadline caddy.Duration `json:"drain_deadline,omitempty"`

	// The addresses of this host to connect to backends from, IPv4, IPv6 or both.
	// Those of the backend's family are used in turn, which multiplies the ports
	// there are; checks use the first. A family without one is left to the
	// kernel. Default: the kernel's choice.
	SourceAddresses []string `json:"source_addresses,omitempty"`

	proxyopt.Options
}

// The defaults of the timeouts.
const (
	DefaultConnectTimeout = 300 * time.Millisecond
	DefaultIdleTimeout    = 90 * time.Second
)

// PerBackend limits what one backend is given.
type PerBackend struct {
	// How many flows a backend may have at once. Default: no limit.
	MaxSessions *int64 `json:"max_sessions,omitempty"`

	// How many new flows a backend may be given in a second; one second's worth
	// at once. From 1 to 1000000. Default: no limit.
	MaxNewPerSec *int64 `json:"max_new_per_sec,omitempty"`
}

// AllDown is what becomes of new flows while every backend is down.
type AllDown string

// The values of on_all_down.
const (
	Refuse AllDown = "refuse"
	TryAll AllDown = "try_all"
)

// DownMode is what becomes of the flows of a backend that goes down.
type DownMode string

// The values of on_backend_down.
const (
	DownHold   DownMode = "hold"
	DownClose  DownMode = "close"
	DownRehome DownMode = "rehome"
)

// RemovedMode is what becomes of the flows of a backend that leaves the pool.
type RemovedMode string

// The values of on_backend_removed.
const (
	RemovedDrain RemovedMode = "drain"
	RemovedClose RemovedMode = "close"
)

// Keepalive is a duration, or "off" for zero.
type Keepalive time.Duration

// UnmarshalJSON reads a duration or "off".
func (k *Keepalive) UnmarshalJSON(b []byte) error {
	if string(b) == `"off"` {
		*k = 0
		return nil
	}
	var d caddy.Duration
	if err := d.UnmarshalJSON(b); err != nil {
		return fmt.Errorf(`%s is neither a duration, such as 30s, nor "off"`, b)
	}
	*k = Keepalive(d)
	return nil
}

// Settings are a pool's options with the defaults filled in.
type Settings struct {
	ConnectTimeout   time.Duration
	IdleTimeout      time.Duration
	MaxLifetime      time.Duration // 0: none
	MaxTries         int
	Keepalive        time.Duration // 0: off
	NoDelay          bool
	OnAllDown        AllDown
	OnBackendDown    DownMode
	Hold             time.Duration
	OnBackendRemoved RemovedMode
	DrainDeadline    time.Duration // 0: none
	SourceAddresses  []netip.Addr
	MaxSessions      int64 // of one backend; 0: no limit
	MaxNewPerSec     int64 // of one backend; 0: no limit
	Proxy            proxyproto.Form
}

// DrainSpread is over how long the flows of a backend are ended once its drain
// deadline has passed: their clients all come back at once otherwise.
func (s *Settings) DrainSpread() time.Duration { return min(s.DrainDeadline/10, maxDrainSpread) }

const maxDrainSpread = 30 * time.Second

func or[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

// settings fills in the defaults. The sources and the header are those that
// Validate has found good.
func (c *Config) settings() Settings {
	s := Settings{
		ConnectTimeout:   time.Duration(or(c.ConnectTimeout, caddy.Duration(DefaultConnectTimeout))),
		IdleTimeout:      time.Duration(or(c.IdleTimeout, caddy.Duration(DefaultIdleTimeout))),
		MaxLifetime:      time.Duration(c.MaxLifetime),
		MaxTries:         or(c.MaxTries, 2),
		Keepalive:        time.Duration(or(c.Keepalive, Keepalive(30*time.Second))),
		NoDelay:          or(c.NoDelay, true),
		OnAllDown:        orString(c.OnAllDown, Refuse),
		OnBackendDown:    orString(c.OnBackendDown, DownHold),
		Hold:             time.Duration(or(c.Hold, caddy.Duration(30*time.Second))),
		OnBackendRemoved: orString(c.OnBackendRemoved, RemovedDrain),
		DrainDeadline:    time.Duration(c.DrainDeadline),
		MaxSessions:      or(c.PerBackend.MaxSessions, 0),
		MaxNewPerSec:     or(c.PerBackend.MaxNewPerSec, 0),
	}
	s.Proxy, _ = c.ProxyForm()
	for _, a := range c.SourceAddresses {
		if ip, err := netip.ParseAddr(a); err == nil {
			s.SourceAddresses = append(s.SourceAddresses, ip.Unmap())
		}
	}
	return s
}

func orString[T ~string](v, def T) T {
	if v == "" {
		return def
	}
	return v
}
