package doctor

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// Read says what keeps a config from running anywhere, as caddy validate does, or
// what it asks of its host.
func Read(config []byte) (*Needs, error) {
	var cfg *caddy.Config
	if err := caddy.StrictUnmarshalJSON(caddy.RemoveMetaFields(config), &cfg); err != nil {
		return nil, fmt.Errorf("decoding config: %w", err)
	}
	if err := caddy.Validate(cfg); err != nil {
		return nil, err
	}
	var doc struct {
		Apps struct {
			Wayhouse struct {
				Limits    listener.Limits
				Pools     map[string]*pool.Config
				Listeners map[string]struct {
					Bind        []string
					Prefix      string
					Transparent bool
				}
			}
		}
	}
	if err := json.Unmarshal(config, &doc); err != nil {
		return nil, err
	}
	app := &doc.Apps.Wayhouse
	n := &Needs{Sources: 1}
	repl := caddy.NewReplacer()
	for _, name := range slices.Sorted(maps.Keys(app.Listeners)) {
		l := app.Listeners[name]
		for _, s := range l.Bind {
			binds, err := listener.ParseBind(repl.ReplaceAll(s, ""))
			if err != nil {
				return nil, err
			}
			for _, b := range binds {
				n.bind(b, l.Transparent)
			}
		}
		if p, err := cidr.Parse(repl.ReplaceAll(l.Prefix, "")); err == nil {
			n.Prefixes = append(n.Prefixes, p)
		}
	}
	if m := app.Limits.MaxConnections; m != nil {
		n.Flows += 2 * *m // the client's socket and the backend's
	}
	if m := app.Limits.MaxUDPSessions; m != nil {
		n.Sessions = *m
		n.Flows += *m
	}
	for i, name := range slices.Sorted(maps.Keys(app.Pools)) {
		sources := max(len(app.Pools[name].SourceAddresses), 1)
		if i == 0 || sources < n.Sources {
			n.Sources = sources
		}
	}
	return n, nil
}

func (n *Needs) bind(b listener.Bind, transparent bool) {
	port := b.Addr.Port()
	if port > 0 && port < 1024 && !slices.Contains(n.LowPorts, port) {
		n.LowPorts = append(n.LowPorts, port)
	}
	if !transparent {
		return
	}
	for _, v6 := range []bool{false, true} {
		if of := b.Addr.Addr().Is4() == !v6; of || !v6 && b.Addr.Addr().IsUnspecified() { // [::] is both
			if r := (Redirect{v6, port}); !slices.Contains(n.Transparent, r) {
				n.Transparent = append(n.Transparent, r)
			}
		}
	}
}
