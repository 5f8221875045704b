// Package offload has the kernel turn away what listeners would refuse, before
// a socket sees it: the addresses on deny lists, and sources that go on when a
// limit has refused them again and again. It is help and nothing else: with it,
// without it, or when somebody takes it away, the same flows get in.
//
//	worker: Refused, Admitted → ring ─┐
//	app: Serve, Close ────────────────┼→ run → table (nftables)
//	deny lists, each second ──────────┘     ← drops, each second and when asked
//
// One goroutine, run, owns the table and everything that is known of it. It is
// started by the first config that wants the kernel's help and ends with the
// last.
//
// What keeps the kernel from dropping what would get in:
//
//   - Sessions that live are not asked about again, whatever becomes of their
//     source. Before a source is published all sessions are looked through, and
//     those of the source are kept out of it (table.keep). A worker has answered
//     all it was asked by the time it takes part in that, so that a session is
//     either seen, or begins later: of a source that is denied, none does, and
//     one of a source over its limit is told of by Admitted.
//   - Of connections only what opens them is dropped.
//   - A source over its limit is let through at the rate of the limit.
package offload

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
)

// Config is how the kernel helps. As JSON it is the kind alone, or an object.
type Config struct {
	// What the kernel is to use: nftables.
	Kind string `json:"kind,omitempty"`

	// How often a source is refused within a second before the kernel turns it
	// away, from 1 to 10000. Default: 20.
	BlockAfter *int `json:"block_after,omitempty"`

	// How long the kernel turns a source away, from 1s to 1h; one that still goes
	// on is refused and published again. Default: 10s.
	BlockFor *caddy.Duration `json:"block_for,omitempty"`

	// The most sources that the kernel turns away at a time, for each listener,
	// from 16 to 1048576. Default: 65536.
	MaxBlocked *int `json:"max_blocked,omitempty"`
}

// The kinds there are, and default values and bounds.
const (
	kindNFTables = "nftables"

	defaultBlockAfter = 20
	maxBlockAfter     = 10_000
	defaultBlockFor   = 10 * time.Second
	minBlockFor       = time.Second
	maxBlockFor       = time.Hour
	defaultMaxBlocked = 1 << 16
	minMaxBlocked     = 16
	mostMaxBlocked    = 1 << 20
)

// UnmarshalJSON decodes a kind, or an object with errors that name the key.
func (c *Config) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		return json.Unmarshal(b, &c.Kind)
	}
	type plain Config
	return strictjson.Unmarshal(b, (*plain)(c))
}

// settings is a Config with the defaults filled in.
type settings struct {
	after      uint16
	blockFor   time.Duration
	maxBlocked int
}

func (c *Config) settings() settings {
	s := settings{defaultBlockAfter, defaultBlockFor, defaultMaxBlocked}
	if c.BlockAfter != nil {
		s.after = uint16(*c.BlockAfter)
	}
	if c.BlockFor != nil {
		s.blockFor = time.Duration(*c.BlockFor)
	}
	if c.MaxBlocked != nil {
		s.maxBlocked = *c.MaxBlocked
	}
	return s
}

// Validate refuses what the kernel cannot do.
func (c *Config) Validate() error {
	s := c.settings()
	switch {
	case c.Kind == "":
		return fmt.Errorf("kind: is missing; there is %s", kindNFTables)
	case c.Kind != kindNFTables:
		return fmt.Errorf("kind: %q is not known; there is %s", c.Kind, kindNFTables)
	case c.BlockAfter != nil && (*c.BlockAfter < 1 || *c.BlockAfter > maxBlockAfter):
		return fmt.Errorf("block_after: %d is not from 1 to %d", *c.BlockAfter, maxBlockAfter)
	case s.blockFor < minBlockFor || s.blockFor > maxBlockFor:
		return fmt.Errorf("block_for: %v is not from %v to %v", s.blockFor, minBlockFor, maxBlockFor)
	case s.maxBlocked < minMaxBlocked || s.maxBlocked > mostMaxBlocked:
		return fmt.Errorf("max_blocked: %d is not from %d to %d", s.maxBlocked, minMaxBlocked, mostMaxBlocked)
	}
	return nil
}

// UnmarshalCaddyfile sets up the option from Caddyfile tokens; d stands at its
// name. Syntax:
//
//	offload nftables {
//		block_after <number>
//		block_for   <duration>
//		max_blocked <number>
//	}
func (c *Config) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Errf("offload: the kind is missing, as in offload %s", kindNFTables)
	}
	c.Kind = d.Val()
	return caddyopt.BlockOf(d, "offload", caddyopt.Options{
		"block_after": caddyopt.Ptr(&c.BlockAfter, caddyopt.Int),
		"block_for":   caddyopt.Ptr(&c.BlockFor, caddyopt.Duration),
		"max_blocked": caddyopt.Ptr(&c.MaxBlocked, caddyopt.Int),
	})
}

// Rate is how many new flows a limit admits, and how many at once.
type Rate struct {
	PerSecond float64
	Burst     int64
}

// Bind is a local address and port of a listener.
type Bind struct {
	UDP  bool
	Addr netip.AddrPort // a wildcard is [::] or 0.0.0.0
}

// Scope is what a config wants for one listener.
type Scope struct {
	Listener string
	Binds    []Bind

	// Guard is false for a listener whose clients the kernel must not judge. Its
	// addresses are then kept out of those of a wildcard.
	Guard bool

	// Denied are the sources that lists refuse, whatever else is asked, with
	// addresses in their plain form. It returns what stands for their present
	// state; for the one it has returned before, it may leave out the sources. It
	// is called by one goroutine, each second, and may take a while for a state
	// that is new. nil: nobody is denied.
	Denied func(before any) (sources cidr.Ranges, now any)

	// PerIP and PerNet are how much of a source, or network, that is over its
	// limit is let through: what the limit admits, or more.
	PerIP, PerNet Rate
}

// Flows calls yield for the client of every UDP session there is, until it
// returns false. It asks the workers, each of which has by then kept or refused
// whatever it was asked about before.
type Flows func(yield func(client netip.AddrPort) bool)

// notPlain are the IPv6 addresses that stand for IPv4 addresses, as cidr.Plain
// has it: the kernel would take them for what they look like.
var notPlain = cidr.Ranges{
	{First: netip.MustParseAddr("::1.0.0.0"), Last: netip.MustParseAddr("::255.255.255.255")},
	{First: netip.MustParseAddr("::ffff:0.0.0.0"), Last: netip.MustParseAddr("::ffff:255.255.255.255")},
}

// targets are what the binds of scopes make of the maps, by the listener's id.
// The narrowest bind has an address: a listener on one address of ours comes
// before another's wildcard, and 0.0.0.0 before [::].
func targets(scopes []*Scope, id func(string) int) map[target]int {
	to := make(map[target]int)
	for _, wide := range []bool{true, false} { // what is narrower replaces what is wider
		for _, s := range scopes {
			n := 0
			if s.Guard {
				n = id(s.Listener)
			}
			for _, b := range s.Binds {
				k := target{proto: protoOf(b.UDP), port: b.Addr.Port()}
				a := b.Addr.Addr()
				dual := a == netip.IPv6Unspecified()
				if dual != wide {
					continue
				}
				switch {
				case dual:
					for k.family = range 2 {
						to[k] = n
					}
				case a.IsUnspecified():
					k.family = v4
					to[k] = n
				default:
					k.addr = a.WithZone("")
					k.family = familyOf(a)
					to[k] = n
				}
			}
		}
	}
	return to
}

func protoOf(udp bool) uint8 {
	const tcp, udpNumber = 6, 17
	if udp {
		return udpNumber
	}
	return tcp
}

// kindOf is the kind of source that a filter's rule counts, by the rule's
// ending; false for one that no source in particular has broken.
func kindOf(rule string) (kind int, ok bool) {
	switch {
	case strings.HasSuffix(rule, "_ip"):
		return anIP, true
	case strings.HasSuffix(rule, "_net"):
		return aNet, true
	}
	return 0, false
}
