package doctor

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/offload"
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
				Offload   *offload.Config
				Listeners map[string]struct {
					Bind                  []string
					Prefix                string
					FreeBind, Transparent bool
				}
			}
		}
	}
	if err := json.Unmarshal(config, &doc); err != nil {
		return nil, err
	}
	app := &doc.Apps.Wayhouse
	n := &Needs{Sources: 1, Offload: app.Offload != nil}
	repl := caddy.NewReplacer()
	for _, name := range slices.Sorted(maps.Keys(app.Listeners)) {
		l := app.Listeners[name]
		for _, s := range l.Bind {
			binds, err := listener.ParseBind(repl.ReplaceAll(s, ""))
			if err != nil {
				return nil, err
			}
			for _, b := range binds {
				n.bind(b, l.Transparent, l.FreeBind)
			}
		}
		if p, err := cidr.Parse(repl.ReplaceAll(l.Prefix, "")); err == nil {
			n.Prefixes = append(n.Prefixes, p)
		}
	}
	slices.Sort(n.UDPPorts)
	n.UDPPorts = slices.Compact(n.UDPPorts)
	if m := app.Limits.MaxConnections; m != nil {
		n.Conns = *m
	}
	if m := app.Limits.MaxUDPSessions; m != nil {
		n.Sessions = *m
	}
	for i, name := range slices.Sorted(maps.Keys(app.Pools)) {
		from := app.Pools[name].SourceAddresses
		for _, a := range from {
			if addr, err := netip.ParseAddr(repl.ReplaceAll(a, "")); err == nil {
				n.From = add(n.From, addr.WithZone(""))
			}
		}
		sources := max(len(from), 1)
		if i == 0 || sources < n.Sources {
			n.Sources = sources
		}
	}
	return n, nil
}

func (n *Needs) bind(b listener.Bind, transparent, freeBind bool) {
	port, addr, proto := b.Addr.Port(), b.Addr.Addr(), TCP
	if b.Network == "udp" {
		proto = UDP
		n.UDPPorts = append(n.UDPPorts, port)
	}
	if port > 0 && port < 1024 {
		n.LowPorts = add(n.LowPorts, port)
	}
	if !addr.IsUnspecified() && !transparent && !freeBind {
		n.Binds = add(n.Binds, addr.WithZone(""))
	}
	if !transparent {
		return
	}
	for _, v6 := range []bool{false, true} {
		if addr.Is4() == v6 && (v6 || !addr.IsUnspecified()) { // [::] is both
			continue
		}
		i := slices.IndexFunc(n.Transparent, func(r Redirect) bool { return r.V6 == v6 && r.Port == port })
		if i < 0 {
			i = len(n.Transparent)
			n.Transparent = append(n.Transparent, Redirect{V6: v6, Port: port})
		}
		n.Transparent[i].Protos |= proto
	}
}

func add[T comparable](all []T, one T) []T {
	if slices.Contains(all, one) {
		return all
	}
	return append(all, one)
}
