// Package balancer chooses a backend for a new flow. Each policy is a module
// wayhouse.balancers.NAME in a file of its own.
package balancer

import (
	"encoding/json"
	"net/netip"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
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

// Peeker is a balancer that can tell what it will choose. Peek is Pick without
// a trace: the choice after next choices more, and no choice is counted. Who
// explains a config calls it; a balancer without it is not asked.
type Peeker interface {
	Peek(candidates []Candidate, f Flow, next int) int
}

// Preparer is a balancer that chooses faster from candidates it has looked at
// before. A pool calls Prepare whenever the candidates or their weights are
// others, from one goroutine, and from then on the answer's Pick where it would
// call the balancer's: both choose alike. What Prepare is given may be kept.
type Preparer interface {
	Prepare(candidates []Candidate) Prepared
}

// Prepared chooses from the candidates it was made for, as Balancer.Pick does.
type Prepared interface {
	Pick(f Flow) int
}

// Weigher is a balancer with weights of its own. The keys are targets as the
// pool's config writes them, ip:port or host:port; a target without a key
// weighs 1.
type Weigher interface {
	Weights() map[string]uint32
}

const namespace = "wayhouse.balancers"

// UnmarshalCaddyfile reads any policy, from a dispenser that stands at its
// name, and returns the pool's JSON for it. Syntax:
//
//	<policy> [<arguments...>] {
//		<option> <value>
//	}
func UnmarshalCaddyfile(d *caddyfile.Dispenser) (json.RawMessage, error) {
	policy := d.Val()
	if _, err := caddy.GetModule(namespace + "." + policy); err != nil {
		return nil, d.Errf("unrecognized balancer %q; %s", policy, suggest.Module(namespace, policy))
	}
	m, err := caddyfile.UnmarshalModule(d, namespace+"."+policy)
	if err != nil {
		return nil, err
	}
	return caddyconfig.JSONModuleObject(m, "policy", policy, nil), nil
}

// noOptions reads a policy that has neither arguments nor options.
func noOptions(d *caddyfile.Dispenser) error {
	d.Next() // consume policy name
	return caddyopt.None(d)
}
