package console

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// promotion is a config with an overlay in it.
type promotion struct {
	config  json.RawMessage            // whole
	pools   map[string]json.RawMessage // those of the config
	changed []string                   // which of them are other than before
	left    []string                   // what could not be done, and why
}

// leave notes something that stays in the overlay.
func (p *promotion) leave(format string, args ...any) {
	p.left = append(p.left, fmt.Sprintf(format, args...))
}

// promote writes an overlay into a config. Nothing of the config is read or
// written but the targets and weights of its pools.
func promote(config json.RawMessage, overlay []entryView) (*promotion, error) {
	var doc map[string]json.RawMessage
	if err := json.Unmarshal(config, &doc); err != nil {
		return nil, fmt.Errorf("the config: %w", err)
	}
	apps, err := object(doc, "apps")
	if err != nil {
		return nil, err
	}
	app, err := object(apps, "wayhouse")
	if err != nil {
		return nil, err
	}
	p := &promotion{config: config}
	if p.pools, err = object(app, "pools"); err != nil {
		return nil, err
	}
	byPool := map[string][]entryView{}
	var names []string
	for _, e := range overlay {
		if byPool[e.Pool] == nil {
			names = append(names, e.Pool)
		}
		byPool[e.Pool] = append(byPool[e.Pool], e)
	}
	slices.Sort(names)
	for _, name := range names {
		if err := p.promotePool(name, byPool[name]); err != nil {
			return nil, fmt.Errorf("the config: apps.wayhouse.pools.%s: %w", name, err)
		}
	}
	if len(p.changed) == 0 {
		return p, nil
	}
	if app["pools"], err = json.Marshal(p.pools); err != nil {
		return nil, err
	}
	if apps["wayhouse"], err = json.Marshal(app); err != nil {
		return nil, err
	}
	if doc["apps"], err = json.Marshal(apps); err != nil {
		return nil, err
	}
	p.config, err = json.Marshal(doc)
	return p, err
}

// object is the object that another has under a key, nil when it has none.
func object(in map[string]json.RawMessage, key string) (o map[string]json.RawMessage, err error) {
	if raw := in[key]; raw != nil {
		if err := json.Unmarshal(raw, &o); err != nil {
			return nil, fmt.Errorf("the config: %s: %w", key, err)
		}
	}
	return o, nil
}

// promotePool writes what operators want of the backends of one pool into it.
func (p *promotion) promotePool(name string, entries []entryView) error {
	raw, known := p.pools[name]
	if !known {
		why := "the config has no such pool"
		if strings.HasPrefix(name, "inline") {
			why = "the pool is written inside a route; give it a name among the pools"
		}
		for _, e := range entries {
			p.leave("%s: %s is %s: %s", name, e.Addr, e.what(), why)
		}
		return nil
	}
	var pool map[string]json.RawMessage
	if err := json.Unmarshal(raw, &pool); err != nil {
		return err
	}
	if source := pool["source"]; source != nil {
		for _, e := range entries {
			p.leave("%s: %s is %s: the pool has its backends from the source %s; tell that", name, e.Addr, e.what(), sourceName(source))
		}
		return nil
	}
	t := targets{}
	if err := t.read(pool); err != nil {
		return err
	}
	before := slices.Clone(t.list)
	changed := false
	for _, e := range entries {
		done, why := t.apply(&e)
		changed = changed || done
		if why != "" {
			p.leave("%s: %s is %s: %s", name, e.Addr, e.what(), why)
		}
	}
	switch {
	case !changed:
		return nil
	case len(t.list) == 0:
		p.leave("%s: %s would be gone, and a pool has to have a target", name, strings.Join(before, " "))
		return nil
	}
	if err := t.write(pool); err != nil {
		return err
	}
	var err error
	p.pools[name], err = json.Marshal(pool)
	p.changed = append(p.changed, name)
	return err
}

// sourceName is the name or the kind of a source.
func sourceName(raw json.RawMessage) string {
	var name string
	if json.Unmarshal(raw, &name) == nil {
		return name
	}
	var inline struct {
		Kind string `json:"source"`
	}
	json.Unmarshal(raw, &inline)
	return cmp.Or(inline.Kind, "that it names")
}

// targets are the backends that a pool of a config names.
type targets struct {
	list     []string
	balancer map[string]json.RawMessage
	weights  map[string]uint32
	weighted bool // the balancer has weights
}

func (t *targets) read(pool map[string]json.RawMessage) error {
	for key, to := range map[string]any{"targets": &t.list, "balancer": &t.balancer} {
		if raw := pool[key]; raw != nil {
			if err := json.Unmarshal(raw, to); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
		}
	}
	var policy string
	json.Unmarshal(t.balancer["policy"], &policy)
	t.weighted = policy == "weighted" || t.balancer["weights"] != nil
	if raw := t.balancer["weights"]; raw != nil {
		if err := json.Unmarshal(raw, &t.weights); err != nil {
			return fmt.Errorf("balancer.weights: %w", err)
		}
	}
	return nil
}

func (t *targets) write(pool map[string]json.RawMessage) (err error) {
	if pool["targets"], err = json.Marshal(t.list); err != nil || !t.weighted {
		return err
	}
	delete(t.balancer, "weights")
	if len(t.weights) > 0 {
		if t.balancer["weights"], err = json.Marshal(t.weights); err != nil {
			return err
		}
	}
	pool["balancer"], err = json.Marshal(t.balancer)
	return err
}

// apply does what an entry says, or says why that cannot be done.
func (t *targets) apply(e *entryView) (changed bool, why string) {
	switch e.Change {
	case "added":
		return t.add(e)
	case "removed":
		return t.remove(e.Addr)
	}
	return false, "a config does not say that"
}

func (t *targets) add(e *entryView) (changed bool, why string) {
	at := t.find(e.Addr)
	if at < 0 {
		t.list = append(t.list, e.Addr)
		at, changed = len(t.list)-1, true
	}
	name := t.list[at]
	switch weight := max(e.Weight, 1); {
	case t.weighted && max(t.weights[name], 1) != weight:
		if t.weights == nil {
			t.weights = map[string]uint32{}
		}
		t.weights[name] = weight
		changed = true
	case !t.weighted && weight != 1:
		why = "the pool's balancer has no weights"
	}
	return changed, why
}

func (t *targets) remove(addr string) (changed bool, why string) {
	if at := t.find(addr); at >= 0 {
		delete(t.weights, t.list[at])
		t.list = slices.Delete(t.list, at, at+1)
		return true, ""
	}
	for _, target := range t.list {
		if _, err := netip.ParseAddrPort(target); err != nil {
			return false, fmt.Sprintf("no target is that address, but %s is a name that may have it", target)
		}
	}
	return false, "" // the config does not have it
}

// find is where the targets have an address, however it is written; -1 for
// nowhere.
func (t *targets) find(addr string) int {
	want, err := netip.ParseAddrPort(addr)
	return slices.IndexFunc(t.list, func(s string) bool {
		a, terr := netip.ParseAddrPort(s)
		return err == nil && terr == nil && a.Port() == want.Port() && a.Addr().Unmap() == want.Addr().Unmap()
	})
}
