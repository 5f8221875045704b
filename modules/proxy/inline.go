package proxy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// inlinePool is a pool that a handler carries.
type inlinePool struct {
	config string // as JSON
	pool   *pool.Pool
}

// InlinePool makes a pool of a config that a handler carries. It is named after
// its targets or its source, so that its backends keep their health and counts
// over a reload wherever the handler moves. Pools of the same targets are numbered
// in the order of their other options: that of the handlers is not the same in
// each load, for Caddy loads apps and servers in the order of a map.
func (a *App) InlinePool(c *pool.Config) (*pool.Pool, error) {
	config, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	base := inlineBase(c)
	same := a.inline[base]
	names := a.inlineNames(base, len(same)+1)
	if err := a.addPool(names[len(same)], c); err != nil {
		return nil, err
	}
	p := inlinePool{string(config), a.pools[names[len(same)]]}
	at, _ := slices.BinarySearchFunc(same, p, func(x, y inlinePool) int { return cmp.Compare(x.config, y.config) })
	same = slices.Insert(same, at, p)
	if a.inline == nil {
		a.inline = make(map[string][]inlinePool)
	}
	a.inline[base] = same
	for i, other := range same {
		a.pools[names[i]] = other.pool
		if err := other.pool.Rename(names[i]); err != nil {
			return nil, err
		}
	}
	return p.pool, nil
}

const maxInlineName = 64

// inlineBase names what the backends of a pool are.
func inlineBase(c *pool.Config) string {
	hash := func(s string) string {
		sum := fnv.New32a()
		sum.Write([]byte(s))
		return fmt.Sprintf("…%08x", sum.Sum32())
	}
	if len(c.Targets) > 0 {
		if base := strings.Join(c.Targets, ","); len(base) <= maxInlineName {
			return base
		}
		return c.Targets[0] + "," + hash(strings.Join(c.Targets, ","))
	}
	name, options := discovery.Name(c.SourceRaw)
	if options != "" {
		name += "," + hash(options)
	}
	return "source " + name
}

// inlineNames are the names of n pools of the same targets, without those that
// the config gives to others.
func (a *App) inlineNames(base string, n int) (names []string) {
	for k := 1; len(names) < n; k++ {
		name := "inline:" + base
		if k > 1 {
			name = fmt.Sprintf("inline%d:%s", k, base)
		}
		if _, taken := a.Pools[name]; !taken {
			names = append(names, name)
		}
	}
	return names
}
