package pool

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
	"github.com/wayhouse-proxy/wayhouse/modules/health"
)

// Watcher deals with flows that already are at a backend. Its methods are
// called without a lock, one at a time for a backend: from a pool's own
// goroutine, from Stop, and from a timer. They must not block for long.
type Watcher interface {
	// BackendDown says that the flows of a backend that is down are to be ended
	// (DownHold, when hold has passed, or DownClose) or moved (DownRehome).
	BackendDown(p *Pool, addr netip.AddrPort, mode DownMode)

	// BackendRemoved says that the flows of a backend that is no longer in the
	// pool, or that an operator drains, are to be ended, at once (RemovedClose) or
	// because the drain_deadline has passed (RemovedDrain).
	BackendRemoved(p *Pool, addr netip.AddrPort, mode RemovedMode)

	// BackendReturned says that the flows of a backend are to be left, should
	// those that BackendRemoved has spoken of not all have ended.
	BackendReturned(p *Pool, addr netip.AddrPort)
}

// Pool is one config's view of the backends of one name. Config.Provision makes
// it, and after it come SetWatcher, Start, Stop and Cleanup, in this order and
// from one goroutine; everything else may be called from any.
//
// Start starts these goroutines, and Stop ends them and waits: run, which alone
// changes the set of backends; one for each host name, which asks for its
// addresses; and those of the health.Runner.
type Pool struct {
	name        string
	set         Settings
	targets     []hostport.Target
	feed        *discovery.Use // who names the backends instead of targets, or nil
	weights     map[hostport.Target]uint32
	policy      string
	balancer    balancer.Balancer
	check       health.Check
	healthNamed bool
	base, log   *zap.Logger // as the context has it, and with the name
	resolver    lookup.Resolver
	watcher     Watcher
	counts      *counts
	source      atomic.Uint32 // counts the use of the source addresses

	snap     atomic.Pointer[snapshot]
	wake     chan struct{}      // something about a backend has changed
	answers  chan answer        // of the host names
	overlaid chan chan struct{} // operators want something else; closed when that holds
	ended    <-chan struct{}    // closed with Stop
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	// Owned by Provision, Start, run, Stop and Cleanup, in turn.
	held   map[netip.AddrPort]*Backend // what was taken
	said   map[netip.AddrPort]member   // what was last said of each
	order  []*Backend                  // the members, replaced and never changed
	names  map[string]name             // replaced, never changed
	hidden []netip.AddrPort            // what operators have removed; replaced, never changed
	runner *health.Runner              // nil: no active checks
}

// snapshot is what flows choose from. It does not change.
type snapshot struct {
	all       []*Backend // every backend, in the order of the config
	takes     []*Backend // those that take flows, of the lowest priority
	candids   []balancer.Candidate
	index     map[netip.AddrPort]*Backend // all, by address
	prepared  balancer.Prepared           // chooses from candids, nil where the balancer does
	priority  uint32                      // of takes, unless anyHealth
	anyHealth bool                        // every backend is down, and they are tried all the same
	names     map[string]name             // for the next config
	hidden    []netip.AddrPort            // named by the config or the source, removed by operators
}

// Provision sets up the pool that c describes, under a name. It checks c,
// loads the guests and takes the backends; Cleanup gives them back. It starts
// nothing and sends nothing.
func (c *Config) Provision(ctx caddy.Context, name string) (*Pool, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	p := &Pool{
		set:      c.settings(),
		base:     ctx.Logger(),
		resolver: lookup.Host,
		wake:     make(chan struct{}, 1),
		held:     make(map[netip.AddrPort]*Backend),
		overlaid: make(chan chan struct{}),
	}
	p.targets, _ = hostport.ParseList(c.Targets) // Validate has seen them
	if err := p.loadBalancer(ctx, c); err != nil {
		return nil, err
	}
	if err := p.loadCheck(ctx, c); err != nil {
		return nil, err
	}
	p.call(name)
	if c.hasSource() {
		var err error
		if p.feed, err = discovery.Load(ctx, c.SourceRaw); err != nil {
			return nil, fmt.Errorf("source%w", err)
		}
		return p, nil
	}
	for _, t := range p.targets {
		if t.Host != "" {
			continue
		}
		b, err := take(name, member{addr: t.Addr, weight: p.weight(t)})
		if err != nil {
			p.Cleanup()
			return nil, fmt.Errorf("targets: %s: %w", t, err)
		}
		p.held[t.Addr] = b
	}
	return p, nil
}

func (p *Pool) loadBalancer(ctx caddy.Context, c *Config) (err error) {
	if c.BalancerRaw, _, err = kind(c.BalancerRaw, "wayhouse.balancers", "policy", "round_robin"); err != nil {
		return fmt.Errorf("balancer%w", err)
	}
	m, err := ctx.LoadModule(c, "BalancerRaw")
	if err != nil {
		return fmt.Errorf("balancer: %w", err)
	}
	b, ok := m.(balancer.Balancer)
	if !ok {
		return fmt.Errorf("balancer: %T is not a balancer", m)
	}
	p.balancer = b
	p.policy = m.(caddy.Module).CaddyModule().ID.Name()
	w, ok := b.(balancer.Weigher)
	if !ok {
		return nil
	}
	p.weights = make(map[hostport.Target]uint32)
	for s, n := range w.Weights() {
		t, err := hostport.Parse(s)
		switch {
		case err != nil:
			return fmt.Errorf("balancer.weights: %w", err)
		case c.hasSource() && t.Host != "":
			return fmt.Errorf("balancer.weights: %q is no address; backends of a source are named by ip:port", s)
		case !c.hasSource() && !slices.Contains(p.targets, t):
			return fmt.Errorf("balancer.weights: %q is not one of the targets", s)
		case n < 1:
			return fmt.Errorf("balancer.weights: %q: 0 is less than 1", s)
		}
		if _, ok := p.weights[t]; ok {
			return fmt.Errorf("balancer.weights: %q has a weight already", s)
		}
		p.weights[t] = n
	}
	return nil
}

func (p *Pool) loadCheck(ctx caddy.Context, c *Config) (err error) {
	if c.HealthRaw, p.healthNamed, err = kind(c.HealthRaw, "wayhouse.health_checks", "check", "tcp_connect"); err != nil {
		return fmt.Errorf("health%w", err)
	}
	m, err := ctx.LoadModule(c, "HealthRaw")
	if err != nil {
		return fmt.Errorf("health: %w", err)
	}
	check, ok := m.(health.Check)
	if !ok {
		return fmt.Errorf("health: %T is not a health check", m)
	}
	// A kind with a Provision of its own may have left this out.
	s := check.Common()
	if err := errors.Join(s.Provision(ctx), s.Validate()); err != nil {
		return fmt.Errorf("health: %w", err)
	}
	s.Sources = p.set.SourceAddresses
	p.check = check
	return nil
}

// kind returns a guest's config with the key that names it, and whether it had
// the key. Its errors go on from the guest's path.
func kind(raw json.RawMessage, namespace, name, def string) (_ json.RawMessage, named bool, _ error) {
	if raw = bytes.TrimSpace(raw); len(raw) == 0 || string(raw) == "null" {
		raw = json.RawMessage("{}")
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(raw, &m) != nil {
		return nil, false, fmt.Errorf(`: %s is not an object, as in {%q: %q}`, raw, name, def)
	}
	key, named := m[name]
	if !named {
		key, _ = json.Marshal(def) // a string
	}
	var id string
	if json.Unmarshal(key, &id) != nil || id == "" {
		return nil, false, fmt.Errorf(".%s: %s is not a name; leave it out for %s", name, key, def)
	}
	if err := checkGuest(m, namespace, name, id); err != nil {
		return nil, false, fmt.Errorf(".%w", err)
	}
	m[name] = key
	raw, err := json.Marshal(m)
	return raw, named, err
}

// checkGuest says, better than decoding the guest would, which key is wrong.
func checkGuest(m map[string]json.RawMessage, namespace, name, id string) error {
	info, err := caddy.GetModule(namespace + "." + id)
	if err != nil {
		return fmt.Errorf("%s: there is no %s.%s; %s", name, namespace, id, suggest.Module(namespace, id))
	}
	options := maps.Clone(m)
	delete(options, name)
	raw, err := json.Marshal(options)
	if err != nil {
		return err
	}
	if err := strictjson.Check(raw, info.New()); err != nil {
		return fmt.Errorf("%w (%s is %s)", err, name, id)
	}
	return nil
}

// call sets the name and what goes with it.
func (p *Pool) call(name string) {
	p.name = name
	p.log = p.base.With(zap.String("pool", name))
	p.counts = countsOf(name, p.policy)
}

// Rename gives another name, and with it other backends, to a pool that has not
// been started.
func (p *Pool) Rename(name string) error {
	if name == p.name {
		return nil
	}
	held := make(map[netip.AddrPort]*Backend, len(p.held))
	for addr, b := range p.held {
		other, err := take(name, member{addr: addr, weight: b.Weight()})
		if err != nil {
			for _, b := range held {
				b.give()
			}
			return err
		}
		held[addr] = other
	}
	for _, b := range p.held {
		b.give()
	}
	p.held = held
	p.call(name)
	return nil
}

// weight of the addresses of a target.
func (p *Pool) weight(t hostport.Target) uint32 {
	if n, ok := p.weights[t]; ok {
		return n
	}
	return 1
}

// Cleanup gives back the backends and the source.
func (p *Pool) Cleanup() error {
	for _, b := range p.held {
		b.give()
	}
	p.held = nil
	if p.feed != nil {
		p.feed.Close()
		p.feed = nil
	}
	return nil
}

// Name is the pool's name.
func (p *Pool) Name() string { return p.name }

// Policy is the name of the balancer.
func (p *Pool) Policy() string { return p.policy }

// Settings are the pool's options, with the defaults. They must not be changed.
func (p *Pool) Settings() *Settings { return &p.set }

// HealthNamed reports whether the config names a check.
func (p *Pool) HealthNamed() bool { return p.healthNamed }

// ErrHealthUnnamed says what is wrong with a pool for which HealthNamed is
// false and that only UDP listeners use.
var ErrHealthUnnamed = errors.New("health.check: missing, and the default, tcp_connect, cannot succeed at a backend that speaks UDP only; " +
	"name udp_probe with what to send, http with a port, or none")

// SetWatcher sets who deals with the flows of backends that go away. Without
// one they are left.
func (p *Pool) SetWatcher(w Watcher) { p.watcher = w }

func (p *Pool) tellRemoved(addr netip.AddrPort, mode RemovedMode) {
	if p.watcher != nil {
		p.watcher.BackendRemoved(p, addr, mode)
	}
}

func (p *Pool) tellReturned(addr netip.AddrPort) {
	if p.watcher != nil {
		p.watcher.BackendReturned(p, addr)
	}
}

// Source returns the address to reach a backend from, the next in turn of its
// family; an invalid one leaves it to the kernel.
func (p *Pool) Source(to netip.Addr) netip.Addr {
	list := p.set.SourceAddresses
	if len(list) == 0 {
		return netip.Addr{}
	}
	start := int(p.source.Add(1) % uint32(len(list)))
	for i := range list {
		if a := list[(start+i)%len(list)]; a.Is4() == to.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// Backends returns every backend in the order of the config. It must not be
// changed.
func (p *Pool) Backends() []*Backend {
	if s := p.snap.Load(); s != nil {
		return s.all
	}
	return nil
}

// Discovery is who names the backends: the source's name in the config, or its
// kind; static for targets.
func (p *Pool) Discovery() string {
	if p.feed != nil {
		return p.feed.Name()
	}
	return "static"
}

// String names the pool and its targets or its source, for errors.
func (p *Pool) String() string {
	if p.feed != nil {
		return p.name + " (" + p.feed.Name() + ")"
	}
	s := make([]string, len(p.targets))
	for i, t := range p.targets {
		s[i] = t.String()
	}
	return p.name + " (" + strings.Join(s, " ") + ")"
}

// poke has run look at the backends again.
func (p *Pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// firstAnswer bounds how long Start waits for host names.
const firstAnswer = time.Second
