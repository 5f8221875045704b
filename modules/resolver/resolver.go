// Package resolver asks somebody else where a flow goes: a matchmaker, a
// directory. Each kind of transport is a module wayhouse.resolvers.NAME; Host
// keeps answers, asks once for flows that want the same, and bounds what may be
// under way.
package resolver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/proxyproto"
)

// Request is what is known of a flow. Nobody changes it.
type Request struct {
	Listener      string
	Client, Local netip.AddrPort // the client, and the address of ours it spoke to
	SNI           string         // the TLS server name; "": none
	RoutingKey    string         // what a sniffer has found; "": nothing
	FirstBytes    []byte         // of the stream so far, or the first datagram
	TraceParent   string         // W3C's traceparent, for the service; "": the flow is not traced
}

// Answer is where a flow goes. Without Pool and Target the resolver knows of no
// place.
type Answer struct {
	Pool   string
	Target netip.AddrPort // wins over Pool

	TTL    time.Duration // how long the answer may be kept, when HasTTL
	HasTTL bool
}

// Empty reports whether the answer names no place.
func (a *Answer) Empty() bool { return a.Pool == "" && !a.Target.IsValid() }

// Resolver is a kind of transport. A Host calls Resolve from the goroutines of
// flows, many at a time. It must return soon after ctx has ended, and must not
// keep the request. What an answer says is checked by the Host. A resolver that
// has something to close is an io.Closer: Close is called when its config has
// gone and its last call has returned.
type Resolver interface {
	Resolve(ctx context.Context, r *Request) (Answer, error)

	// Common returns the options that all kinds share; embedding Settings
	// provides it.
	Common() *Settings
}

// Settings are the options of every kind of resolver. A kind embeds them.
type Settings struct {
	// How long an answer is waited for, in all. Default: 40ms.
	Timeout *caddy.Duration `json:"timeout,omitempty"`

	// What becomes of a flow without an answer: because none came in time,
	// because it cannot be used, because it names no place. reject ends the
	// flow, fallback_route goes on to the next route, stale_ok uses the last
	// answer of the cache although it is too old, when there is one, and else
	// ends the flow. An answer that names no place is never replaced by an old
	// one. Default: reject.
	OnError string `json:"on_error,omitempty"`

	// Keep answers. Default: every flow is asked about.
	Cache *Cache `json:"cache,omitempty"`

	// How many bytes a TCP connection should have sent before it is asked about;
	// the listener's peek timeout ends the wait. More are waited for when the
	// cache's key needs them. Default: 0.
	WaitBytes int `json:"wait_bytes,omitempty"`

	// How long a connect to a target may take. Pools have their own.
	// Default: 300ms.
	TargetConnectTimeout *caddy.Duration `json:"target_connect_timeout,omitempty"`

	// How long a flow to a target may be without a byte in either direction.
	// Default: 90s.
	TargetIdleTimeout *caddy.Duration `json:"target_idle_timeout,omitempty"`

	// The networks that targets may be in, as prefixes or addresses. A target
	// outside is no answer. Default: any unicast address.
	AllowTargets []string `json:"allow_targets,omitempty"`

	// The header that targets get. A pool has its own.
	proxyopt.Options

	allow cidr.Set
	proxy proxyproto.Form
	parts []keyPart
}

// The values of on_error.
const (
	Reject        = "reject"
	FallbackRoute = "fallback_route"
	StaleOK       = "stale_ok"
)

// Cache keeps answers for as long as the process lives and the resolver's
// config stays the same.
type Cache struct {
	// What of a flow the answer depends on, all of: src_ip, src_ip_port, sni,
	// routing_key, first_bytes:A:B (from byte A up to B, B not included). A flow
	// that lacks one is asked about and its answer not kept. The listener and the
	// address that was hit are no part of it. At least one is needed.
	Key []string `json:"key,omitempty"`

	// How long an answer without a ttl_sec of its own is kept; zero: not at all.
	// Default: 30s.
	PositiveTTL *caddy.Duration `json:"positive_ttl,omitempty"`

	// How long it is remembered that the resolver knows of no place; zero: not at
	// all. Failures are not kept. Default: 2s.
	NegativeTTL *caddy.Duration `json:"negative_ttl,omitempty"`

	// How many answers are kept, from 1 to 1000000. The one unused for longest
	// makes room. Default: 200000.
	MaxEntries *int `json:"max_entries,omitempty"`
}

// DefaultTimeout is the default of timeout.
const DefaultTimeout = 40 * time.Millisecond

const (
	defaultConnectTimeout = 300 * time.Millisecond
	defaultIdleTimeout    = 90 * time.Second
	defaultPositiveTTL    = 30 * time.Second
	defaultNegativeTTL    = 2 * time.Second
	defaultMaxEntries     = 200000
	mostEntries           = 1000000
	mostFirstBytes        = 16384 // what a listener may peek
)

// Common returns s.
func (s *Settings) Common() *Settings { return s }

func or[T any](p **T, def T) {
	if *p == nil {
		*p = &def
	}
}

// Provision sets the defaults. Load calls it.
func (s *Settings) Provision(caddy.Context) error {
	or(&s.Timeout, caddy.Duration(DefaultTimeout))
	or(&s.TargetConnectTimeout, caddy.Duration(defaultConnectTimeout))
	or(&s.TargetIdleTimeout, caddy.Duration(defaultIdleTimeout))
	if s.OnError == "" {
		s.OnError = Reject
	}
	var err error
	if s.proxy, err = s.ProxyForm(); err != nil {
		return err
	}
	s.allow = cidr.Set{}
	if err := s.allow.AddAll(s.AllowTargets); err != nil {
		return fmt.Errorf("allow_targets%w", err)
	}
	if c := s.Cache; c != nil {
		or(&c.PositiveTTL, caddy.Duration(defaultPositiveTTL))
		or(&c.NegativeTTL, caddy.Duration(defaultNegativeTTL))
		or(&c.MaxEntries, defaultMaxEntries)
		s.parts = nil
		for i, text := range c.Key {
			p, err := parseKeyPart(text)
			if err != nil {
				return fmt.Errorf("cache.key[%d]: %w", i, err)
			}
			if slices.Contains(s.parts, p) {
				return fmt.Errorf("cache.key[%d]: %s is given twice", i, text)
			}
			s.parts = append(s.parts, p)
		}
	}
	return nil
}

// Validate checks what Provision has left. Load calls it.
func (s *Settings) Validate() error {
	for _, d := range []struct {
		key string
		d   *caddy.Duration
		def time.Duration
	}{
		{"timeout", s.Timeout, DefaultTimeout},
		{"target_connect_timeout", s.TargetConnectTimeout, defaultConnectTimeout},
		{"target_idle_timeout", s.TargetIdleTimeout, defaultIdleTimeout},
	} {
		if *d.d <= 0 {
			return fmt.Errorf("%s: %v is not above zero; leave it out for %v", d.key, time.Duration(*d.d), d.def)
		}
	}
	if s.OnError != Reject && s.OnError != FallbackRoute && s.OnError != StaleOK {
		return fmt.Errorf("on_error: %q is none of %s, %s, %s", s.OnError, Reject, FallbackRoute, StaleOK)
	}
	if s.WaitBytes < 0 || s.WaitBytes > mostFirstBytes {
		return fmt.Errorf("wait_bytes: %d is not from 0 to %d", s.WaitBytes, mostFirstBytes)
	}
	c := s.Cache
	switch {
	case c == nil && s.OnError == StaleOK:
		return errors.New("on_error: stale_ok without a cache has no old answers: add cache, or choose reject")
	case c == nil:
		return nil
	case len(c.Key) == 0:
		return errors.New("cache.key: none; give what the answer depends on, as in src_ip or first_bytes:0:16")
	case *c.PositiveTTL < 0:
		return fmt.Errorf("cache.positive_ttl: %v is negative", time.Duration(*c.PositiveTTL))
	case *c.NegativeTTL < 0:
		return fmt.Errorf("cache.negative_ttl: %v is negative", time.Duration(*c.NegativeTTL))
	case *c.MaxEntries < 1 || *c.MaxEntries > mostEntries:
		return fmt.Errorf("cache.max_entries: %d is not from 1 to %d; leave it out for %d", *c.MaxEntries, mostEntries, defaultMaxEntries)
	}
	return nil
}

// Proxy is the header that targets get.
func (s *Settings) Proxy() proxyproto.Form { return s.proxy }

// FirstBytes is how many bytes a TCP connection should have sent.
func (s *Settings) FirstBytes() int {
	n := s.WaitBytes
	for _, p := range s.parts {
		n = max(n, p.to)
	}
	return n
}

// Needs reports whether the cache's key has a part in it, so that it is worth
// waiting for.
func (s *Settings) Needs(part Part) bool {
	for _, p := range s.parts {
		if p.kind == part {
			return true
		}
	}
	return false
}

// errTarget is an answer whose target is not allowed.
type errTarget netip.AddrPort

func (e errTarget) Error() string {
	return fmt.Sprintf("the target %s is not allowed", netip.AddrPort(e))
}

// checkTarget says whether flows may go to a target.
func (s *Settings) checkTarget(t netip.AddrPort) error {
	a := t.Addr()
	if t.Port() == 0 || a.Zone() != "" || a.IsUnspecified() || a.IsMulticast() || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return errTarget(t)
	}
	if len(s.AllowTargets) > 0 && !s.allow.Contains(a) {
		return errTarget(t)
	}
	return nil
}
