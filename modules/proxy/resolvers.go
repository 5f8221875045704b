package proxy

import (
	"fmt"
	"maps"
	"slices"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/resolver"
)

// loadResolvers makes the resolvers. The pools are there already.
func (a *App) loadResolvers() error {
	a.resolvers = make(map[string]*resolver.Host)
	known := func(name string) bool { return a.Pools[name] != nil }
	for _, name := range slices.Sorted(maps.Keys(a.ResolversRaw)) {
		h, err := resolver.Load(a.ctx, name, a.ResolversRaw[name], known)
		if err != nil {
			return fmt.Errorf("resolvers.%s.%w", name, err)
		}
		a.resolvers[name] = h
	}
	return nil
}

// Resolver is the resolver of that name.
func (a *App) Resolver(name string) (*resolver.Host, error) {
	if h := a.resolvers[name]; h != nil {
		return h, nil
	}
	return nil, fmt.Errorf("resolver: no resolver is named %q in apps.wayhouse.resolvers; %s", name, suggest.Hint(name, slices.Collect(maps.Keys(a.ResolversRaw))))
}

// NamedPools calls yield for every pool that has a name in the config.
func (a *App) NamedPools(yield func(*pool.Pool) bool) {
	for name := range a.Pools {
		if !yield(a.pools[name]) {
			return
		}
	}
}
