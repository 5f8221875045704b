package adminapi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// listenerJSON is a listener as operators see it.
type listenerJSON struct {
	Name             string   `json:"name"`
	Configured       bool     `json:"configured"` // the running config has it
	Bind             []string `json:"bind"`       // as the config says it
	Bound            []string `json:"bound"`      // with the ports that the kernel has chosen
	Connections      int64    `json:"connections"`
	Sessions         int64    `json:"sessions"`
	ConnectionsTotal uint64   `json:"connections_total"`
	SessionsTotal    uint64   `json:"sessions_total"`
	BytesC2S         uint64   `json:"bytes_c2s"`
	BytesS2C         uint64   `json:"bytes_s2c"`
	PacketsC2S       uint64   `json:"packets_c2s"`
	PacketsS2C       uint64   `json:"packets_s2c"`
	Dropped          uint64   `json:"datagrams_dropped"`
}

func viewListener(stats *flow.Listener, l *listener.Listener) listenerJSON {
	t := stats.Totals()
	v := listenerJSON{
		Name: stats.Name, Configured: l != nil, Bind: []string{}, Bound: []string{},
		Connections: t.Conns, Sessions: t.Sessions,
		ConnectionsTotal: t.ConnsEnded + uint64(max(t.Conns, 0)), SessionsTotal: t.SessionsEnded + uint64(max(t.Sessions, 0)),
		BytesC2S: t.BytesC2S, BytesS2C: t.BytesS2C, PacketsC2S: t.PacketsC2S, PacketsS2C: t.PacketsS2C, Dropped: t.Dropped,
	}
	if l != nil {
		v.Bind = append(v.Bind, l.Bind...)
		v.Bound = ranges(l.Bound())
	}
	return v
}

// ranges writes addresses as binds are written, ports that follow one another
// as a range: a listener may have thousands.
func ranges(binds []listener.Bind) []string {
	binds = slices.Clone(binds)
	slices.SortFunc(binds, func(a, b listener.Bind) int {
		return cmp.Or(cmp.Compare(a.Network, b.Network), a.Addr.Compare(b.Addr))
	})
	list := []string{}
	for i := 0; i < len(binds); {
		first, n := binds[i], 1
		for i+n < len(binds) && binds[i+n].Network == first.Network && binds[i+n].Addr.Addr() == first.Addr.Addr() &&
			int(binds[i+n].Addr.Port()) == int(first.Addr.Port())+n {
			n++
		}
		s := first.String()
		if n > 1 {
			s = fmt.Sprintf("%s-%d", s, binds[i+n-1].Addr.Port())
		}
		list = append(list, s)
		i += n
	}
	return list
}

// listeners tells of those of the running config, and of others that still have
// flows: of a config before, or of servers of other apps.
func (a *API) listeners(w http.ResponseWriter, r *http.Request) error {
	if err := knownParams(r.URL.Query()); err != nil {
		return err
	}
	var configured map[string]*listener.Listener
	if app := proxy.Running(); app != nil {
		configured = app.Listeners
	}
	views := []listenerJSON{}
	for _, stats := range flow.Listeners() {
		l := configured[stats.Name]
		if v := viewListener(stats, l); l != nil || v.Connections+v.Sessions > 0 {
			views = append(views, v)
		}
	}
	if text(r) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		for _, v := range views {
			fmt.Fprintf(w, "listener=%s configured=%t bound=%s connections=%d sessions=%d connections_total=%d sessions_total=%d bytes_c2s=%d bytes_s2c=%d packets_c2s=%d packets_s2c=%d datagrams_dropped=%d\n",
				v.Name, v.Configured, strings.Join(v.Bound, ","), v.Connections, v.Sessions, v.ConnectionsTotal, v.SessionsTotal, v.BytesC2S, v.BytesS2C, v.PacketsC2S, v.PacketsS2C, v.Dropped)
		}
		return nil
	}
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(views)
}
