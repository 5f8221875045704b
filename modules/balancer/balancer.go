// Package balancer chooses a backend for a new flow. Each policy is a module
// wayhouse.balancers.NAME in a file of its own.
package balancer

import (
	"net/netip"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// Candidate is a backend that takes new flows now.
type Candidate interface {
	Addr() netip.AddrPort
	Weight() uint32 // at least 1
	Active() int64  // flows it has now
}

// Flow is what is known of the flow a backend is wanted for. Listeners make it
// before the first byte toward a backend.
type Flow struct {
	Client, Local netip.AddrPort // the client, and the address of ours it spoke to
}

// Balancer chooses a backend. A pool calls Pick once for every new flow, from
// many goroutines at a time: it must not block, lock or allocate. candidates is
// never empty, is in the order of the config, and belongs to the pool: it must
// be neither changed nor kept. The answer is an index into it.
type Balancer interface {
	Pick(candidates []Candidate, f Flow) int
}

// Weigher is a balancer with weights of its own. The keys are targets as the
// pool's config writes them, ip:port or host:port; a target without a key
// weighs 1.
type Weigher interface {
	Weights() map[string]uint32
}

// noOptions reads a policy that has neither arguments nor options.
func noOptions(d *caddyfile.Dispenser) error {
	d.Next() // consume policy name
	if d.NextArg() {
		return d.Errf("unexpected argument %q", d.Val())
	}
	if d.NextBlock(0) {
		return d.Errf("unrecognized option %q", d.Val())
	}
	return nil
}
