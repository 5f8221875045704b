package serve

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

type listenerView struct {
	Name               string
	Configured         bool
	Bind, Bound        []string
	Connections        int
	Sessions           int
	ConnectionsTotal   int `json:"connections_total"`
	SessionsTotal      int `json:"sessions_total"`
	BytesC2S, BytesS2C int
	PacketsC2S         int `json:"packets_c2s"`
	Dropped            int `json:"datagrams_dropped"`
}

// TestListeners has one of the config, and one whose flows outlive the config
// that had it.
func TestListeners(t *testing.T) {
	b := newBackends(t)
	port := kit.Ports(t, 4)
	addr := kit.Local(port)
	several := fmt.Sprintf("tcp/127.0.0.1:%d-%d", port+1, port+2)
	both := kit.ToPool("udp", "udp/"+addr)
	p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr, several, "tcp/[::1]:0"), "u": both}, b.pools()), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: 3, Flows: 5, Rate: 100})
	of := func(name string) *listenerView {
		var list []listenerView
		p.JSON("/listeners", &list)
		if i := slices.IndexFunc(list, func(v listenerView) bool { return v.Name == name }); i >= 0 {
			return &list[i]
		}
		return nil
	}
	tcp, udp := of("t"), of("u")
	switch {
	case tcp == nil || udp == nil:
		t.Fatalf("of the listeners there are %v and %v", tcp, udp)
	case !tcp.Configured || tcp.Connections != 3 || tcp.Sessions != 0 || tcp.ConnectionsTotal != 3:
		t.Errorf("t is %+v", tcp)
	case udp.Sessions != 5 || udp.SessionsTotal != 5 || udp.Connections != 0 || udp.PacketsC2S < 5 || udp.Dropped != 0:
		t.Errorf("u is %+v", udp)
	}
	// The two binds that follow one another are one range.
	want := fmt.Sprintf("tcp/127.0.0.1:%d-%d", port, port+2)
	if len(tcp.Bound) != 2 || tcp.Bound[0] != want || !strings.HasPrefix(tcp.Bound[1], "tcp/[::1]:") || strings.HasSuffix(tcp.Bound[1], ":0") {
		t.Errorf("t is bound to %q, want %s and a port of ::1", tcp.Bound, want)
	}
	if !slices.Equal(tcp.Bind, []string{"tcp/" + addr, several, "tcp/[::1]:0"}) {
		t.Errorf("the binds of t are %q", tcp.Bind)
	}
	if _, body := p.Get("/listeners?format=text"); strings.Count(body, "\n") != 2 || !strings.HasPrefix(body, "listener=t configured=true bound="+want+",") {
		t.Errorf("as text: %s", body)
	}
	if status, body := p.Get("/listeners?name=t"); status != http.StatusBadRequest {
		t.Errorf("a parameter that does not exist: %d %s", status, body)
	}

	p.MustLoad(kit.With(kit.App(kit.M{"u": both}, b.pools(), kit.M{"shutdown_grace": "2m"}), nil))
	if gone := of("t"); gone == nil || gone.Configured || gone.Connections != 3 || len(gone.Bound) != 0 {
		t.Errorf("without a listener in the config, but with its connections, t is %+v", gone)
	}
	load.Stop()
	kit.Eventually(t, "a listener that is not in the config and has no flows is not told of", func() bool { return of("t") == nil })
	if udp := of("u"); udp == nil || udp.SessionsTotal != 5 {
		t.Errorf("u is %+v", udp)
	}
}
