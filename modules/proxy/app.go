// Package proxy is the app wayhouse: it makes the listeners and pools of a
// config from their parts and owns nothing else. What survives a config is in
// the packages it wires.
package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
	"github.com/wayhouse-proxy/wayhouse/modules/filter"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/offload"
	"github.com/wayhouse-proxy/wayhouse/modules/overload"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/resolver"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

func init() { caddy.RegisterModule(new(App)) }

// App is the data plane: named listeners that take TCP connections and UDP
// sessions, and named pools of backends that these are sent to.
type App struct {
	// How many event loops there are for TCP and as many for UDP, up to 127. It
	// is fixed when the first config starts; a reload that changes it is warned
	// about and takes effect with the next start of the process. Zero is one for
	// each CPU the process may use. Default: 0.
	Workers int `json:"workers,omitempty"`

	// How long flows may go on when the process is told to stop, and those of a
	// listener or address that a reload has taken away. What is left then is
	// closed with the reason drain. Default: 30s.
	ShutdownGrace *caddy.Duration `json:"shutdown_grace,omitempty"`

	// The directory of the file intent.db, in which is kept what operators have
	// changed at run time, over restarts; "off" keeps that in memory only. One
	// that does not exist is made. Two processes cannot use the same. When a
	// reload names another, what holds is moved there. Placeholders are replaced
	// at load. Default: wayhouse in Caddy's data directory.
	StateDir string `json:"state_dir,omitempty"`

	// Bounds for the whole process. Default: none.
	Limits listener.Limits `json:"limits,omitzero"`

	// A database of countries in MaxMind's format, for the filter geo. It is read
	// again when the file changes. Placeholders are replaced at load. Default:
	// none.
	GeoDB string `json:"geo_db,omitempty"`

	// A database of autonomous systems in MaxMind's format, for the filter geo.
	// Default: none.
	GeoASNDB string `json:"geo_asn_db,omitempty"`

	// Log every connection and UDP session that ends, or a share of them. An empty
	// object is all of them. Default: off.
	ConnectionLog *flow.LogConfig `json:"connection_log,omitempty"`

	// Trace how flows are set up, by OpenTelemetry: an empty object turns it on.
	// Exporter, sampler and resource are what the standard variables OTEL_… of the
	// process say. Default: off.
	Tracing *tracing.Config `json:"tracing,omitempty"`

	// Have the kernel turn away what filters would refuse: nftables, or an object
	// with kind and options. Needs CAP_NET_ADMIN. Default: off.
	Offload *offload.Config `json:"offload,omitempty"`

	// The sources that pools may name for who says which backends there are, by
	// name.
	SourcesRaw map[string]json.RawMessage `json:"sources,omitempty" caddy:"namespace=wayhouse.sources inline_key=source"`

	// The pools, by name.
	Pools map[string]*pool.Config `json:"pools,omitempty"`

	// The resolvers that may be asked where flows go, by name.
	ResolversRaw map[string]json.RawMessage `json:"resolvers,omitempty" caddy:"namespace=wayhouse.resolvers inline_key=resolver"`

	// The hosts of sniffers: native for native ones with options, wasm for
	// modules in a directory. Native ones without options need none.
	SniffersRaw caddy.ModuleMap `json:"sniffers,omitempty" caddy:"namespace=wayhouse.sniffer_hosts"`

	// The listeners, by name. Names are letters, digits, - _ and .
	Listeners map[string]*listener.Listener `json:"listeners,omitempty"`

	ctx    caddy.Context // with the app in it, for modules loaded inside
	logger *zap.Logger
	grace  time.Duration
	binds  listener.Binds
	pools  map[string]*pool.Pool   // named and inline, by name
	inline map[string][]inlinePool // by their targets, in the order of their numbers
	fronts map[string]bool         // the names that handlers http_front give flows to

	sniffers     *sniff.Set
	snifferHosts map[string]any

	geo filter.GeoDBs

	overload *overload.Use

	stateDir string // as intent.Acquire has it

	sources *discovery.Sources

	resolvers map[string]*resolver.Host

	issuers func() error  // see ServerListens
	bound   chan struct{} // closed when the listeners are

	engines *listener.Engines // held from Start to Stop
	shields *offload.Use      // likewise, with Offload
	hash    string            // of its JSON
	since   time.Time         // when it started; guarded by instances

	endFollowing func() // the live sessions, for the session log; nil: they are not
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse",
		New: func() caddy.Module { return new(App) },
	}
}

// UnmarshalJSON decodes the app with errors that name the path.
func (a *App) UnmarshalJSON(b []byte) error {
	type plain App
	a.hash = hashOf(b)
	err := strictjson.Unmarshal(b, (*plain)(a))
	if err != nil {
		configs.undecoded(a.hash, err)
	}
	return err
}

// appKey finds the app in the context of the modules it loads.
const appKey caddy.CtxKey = "wayhouse_app"

// From is the app of the config that ctx belongs to, loaded if need be.
func From(ctx caddy.Context) (*App, error) {
	if app, ok := ctx.Value(appKey).(*App); ok {
		return app, nil
	}
	v, err := ctx.App("wayhouse")
	if err != nil {
		return nil, err
	}
	return v.(*App), nil
}

const defaultGrace = 30 * time.Second

// Provision sets up pools and listeners and starts nothing.
func (a *App) Provision(ctx caddy.Context) (err error) {
	configs.follow(ctx, a.hash)
	a.logger = ctx.Logger()
	a.pools = make(map[string]*pool.Pool)
	a.bound, a.issuers = make(chan struct{}), sync.OnceValue(a.prepareIssuers)
	a.binds = make(listener.Binds)
	if a.Workers < 0 || a.Workers > maxWorkers {
		return fmt.Errorf("workers: %d is not from 0 to %d", a.Workers, maxWorkers)
	}
	a.grace = defaultGrace
	if a.ShutdownGrace != nil {
		a.grace = time.Duration(*a.ShutdownGrace)
	}
	if a.grace < 0 {
		return fmt.Errorf("shutdown_grace: %v is negative; 0s closes everything at once", a.grace)
	}
	if err := a.findStateDir(); err != nil {
		return err
	}
	if err := a.Limits.Validate(); err != nil {
		return fmt.Errorf("limits.%w", err)
	}
	if a.ConnectionLog != nil {
		if err := a.ConnectionLog.Validate(); err != nil {
			return fmt.Errorf("connection_log.%w", err)
		}
	}
	if a.Offload != nil {
		if err := a.Offload.Validate(); err != nil {
			return fmt.Errorf("offload.%w", err)
		}
	}
	if err := metrics.Register(ctx.GetMetricsRegistry()); err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	inside := ctx.WithValue(appKey, a)
	if err := a.loadSniffers(inside); err != nil {
		return err
	}
	inside = a.sniffers.In(inside)
	if err := a.openGeoDBs(); err != nil {
		return err
	}
	inside = a.geo.In(inside)
	if a.sources, err = discovery.NewSources(inside, a.SourcesRaw); err != nil {
		return fmt.Errorf("sources.%w", err)
	}
	inside = a.sources.In(inside)
	a.ctx = inside
	for _, name := range slices.Sorted(maps.Keys(a.Pools)) {
		if err := a.addPool(name, a.Pools[name]); err != nil {
			return fmt.Errorf("pools.%s.%w", name, err)
		}
	}
	if err := a.loadResolvers(); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(a.Listeners)) {
		l := a.Listeners[name]
		if l == nil {
			return fmt.Errorf("listeners.%s: is null", name)
		}
		if err := l.Provision(inside, name, a.binds, &a.Limits, a.grace); err != nil {
			return err
		}
		if err := l.Validate(); err != nil {
			return err
		}
		l.Declare(a)
	}
	if err := listener.CheckPrefixes(a.Listeners); err != nil {
		return err
	}
	if err := a.checkHeaders(); err != nil {
		return err
	}
	return a.checkHealthNamed()
}

const maxWorkers = 127

func (a *App) loadSniffers(ctx caddy.Context) (err error) {
	if len(a.SniffersRaw) > 0 {
		mods, err := ctx.LoadModule(a, "SniffersRaw")
		if err != nil {
			return fmt.Errorf("sniffers: %w", err)
		}
		a.snifferHosts = mods.(map[string]any)
	}
	if a.sniffers, err = sniff.NewSet(ctx, a.snifferHosts); err != nil {
		return fmt.Errorf("sniffers.%w", err)
	}
	return nil
}

func (a *App) openGeoDBs() (err error) {
	repl := caddy.NewReplacer()
	if a.GeoDB != "" {
		if a.geo.Country, err = filter.OpenGeoDB(filter.Countries, repl.ReplaceAll(a.GeoDB, "")); err != nil {
			return fmt.Errorf("geo_db: %w", err)
		}
	}
	if a.GeoASNDB != "" {
		if a.geo.ASN, err = filter.OpenGeoDB(filter.Systems, repl.ReplaceAll(a.GeoASNDB, "")); err != nil {
			return fmt.Errorf("geo_asn_db: %w", err)
		}
	}
	return nil
}

// Sniffers are the sniffers of the config.
func (a *App) Sniffers() *sniff.Set { return a.sniffers }

// SnifferHosts are the hosts of sniffers of the config, by the names of their
// modules.
func (a *App) SnifferHosts() map[string]any { return a.snifferHosts }

func (a *App) addPool(name string, c *pool.Config) error {
	if c == nil {
		return errors.New("targets: none; give at least one, ip:port or host:port, or a source")
	}
	p, err := c.Provision(a.ctx, name)
	if err != nil {
		return err
	}
	p.SetWatcher(watcher{})
	a.pools[name] = p
	return nil
}

// Pool is the pool of that name.
func (a *App) Pool(name string) (*pool.Pool, error) {
	if p := a.pools[name]; p != nil && a.Pools[name] != nil {
		return p, nil
	}
	known := slices.Collect(maps.Keys(a.Pools))
	return nil, fmt.Errorf("pool: no pool is named %q in apps.wayhouse.pools; %s", name, suggest.Hint(name, known))
}

// CheckListener refuses a name that no listener has, or one without TCP.
func (a *App) CheckListener(name string) error {
	l := a.Listeners[name]
	if l == nil {
		known := "there are none"
		if len(a.Listeners) > 0 {
			known = "there are " + strings.Join(slices.Sorted(maps.Keys(a.Listeners)), ", ")
		}
		return fmt.Errorf("no listener is named %q; %s", name, known)
	}
	if !slices.ContainsFunc(l.Bind, func(s string) bool { return strings.HasPrefix(s, "tcp/") }) {
		return fmt.Errorf("%q has no TCP address: it is connections that are followed", name)
	}
	return nil
}

// checkHealthNamed refuses pools that the default check would take down: only
// UDP listeners use them, where nothing need answer a TCP connect.
func (a *App) checkHealthNamed() error {
	type use struct{ tcp, udp bool }
	uses := make(map[*pool.Pool]*use)
	for _, l := range a.Listeners {
		for h := range l.Handlers {
			user, ok := h.(interface{ UsedPool() *pool.Pool })
			if !ok {
				continue
			}
			u := uses[user.UsedPool()]
			if u == nil {
				u = new(use)
				uses[user.UsedPool()] = u
			}
			tcp, udp := l.Networks()
			u.tcp, u.udp = u.tcp || tcp, u.udp || udp
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.pools)) {
		p := a.pools[name]
		if u := uses[p]; u != nil && u.udp && !u.tcp && !p.HealthNamed() {
			return fmt.Errorf("pools.%s.%w", name, pool.ErrHealthUnnamed)
		}
	}
	return nil
}

// Cleanup gives back what Provision took; Provision may have failed half-way.
func (a *App) Cleanup() error {
	// Caddy does not stop the apps of a config that it refuses after they have
	// started, such as for an admin endpoint that cannot be had.
	stopped := a.Stop()
	for _, l := range a.Listeners {
		if l != nil {
			l.Withdraw()
		}
	}
	for _, h := range a.resolvers {
		h.Cleanup()
	}
	for _, p := range a.pools {
		p.Cleanup()
	}
	a.sources.Close()
	return errors.Join(stopped, a.geo.Close())
}

// Listening is where the listener of that name listens.
func (a *App) Listening(name string) []listener.Bind {
	if l := a.Listeners[name]; l != nil {
		return l.Bound()
	}
	return nil
}

// Unbound names a listener that is bound nowhere, if there is one.
func (a *App) Unbound() (name string, ok bool) {
	for _, name := range slices.Sorted(maps.Keys(a.Listeners)) {
		if len(a.Listeners[name].Bound()) == 0 {
			return name, true
		}
	}
	return "", false
}

// Interface guards
var (
	_ caddy.App          = (*App)(nil)
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)
