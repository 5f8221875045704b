package serve

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

type session struct {
	ID, Proto, Listener, Peer, Pool, Backend string
	Bytes                                    uint64 `json:"bytes_c2s"`
	Packets                                  uint64 `json:"packets_c2s"`
}

// TestSessions lists 2,000 sessions, by every filter, and closes some.
func TestSessions(t *testing.T) {
	b := newBackends(t)
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr), "u": kit.ToPool("udp", "udp/"+addr)}, b.pools()), kit.Options{})
	const n = 1000
	load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: n, Flows: n, Rate: 1000})
	count := func(query string) int {
		var list []session
		p.JSON("/sessions"+query, &list)
		return len(list)
	}
	for query, want := range map[string]int{
		"":                           2 * n,
		"?proto=tcp":                 n,
		"?proto=udp":                 n,
		"?listener=t":                n,
		"?pool=udp":                  n,
		"?backend=" + b.tcp.Addr:     n,
		"?listener=t&proto=udp":      0,
		"?listener=nobody":           0,
		"?src=127.0.0.1":             2 * n,
		"?src=127.0.0.0/8&proto=tcp": n,
		"?src=10.0.0.0/8":            0,
		"?src=::ffff:127.0.0.1":      2 * n,
		"?src=::ffff:127.0.0.0/104":  2 * n,
		"?backend=[::ffff:127.0.0.1]" + b.tcp.Addr[strings.LastIndexByte(b.tcp.Addr, ':'):]: n,
		"?limit=7":                          7,
		"?listener=u&pool=udp&limit=100000": n,
	} {
		if got := count(query); got != want {
			t.Errorf("GET /sessions%s has %d, want %d", query, got, want)
		}
	}
	for _, query := range []string{"?proto=sctp", "?backend=here", "?src=there", "?limit=0", "?limit=many", "?lisener=t", "?format=xml", "?proto=tcp&proto=udp", "?src=127.0.0.1/8"} {
		if status, body := p.Get("/sessions" + query); status != http.StatusBadRequest || !strings.Contains(body, `"error"`) {
			t.Errorf("GET /sessions%s: %d %s, want 400", query, status, body)
		}
	}
	if _, body := p.Get("/sessions?format=text&limit=3"); strings.Count(body, "\n") != 3 || !strings.HasPrefix(body, "id=") {
		t.Errorf("GET /sessions as text: %s", body)
	}
	load.Round(t)
	perfect(t, load)
}

// TestCloseSession ends one connection and one session by the API; their
// clients see it.
func TestCloseSession(t *testing.T) {
	b := newBackends(t)
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr), "u": kit.ToPool("udp", "udp/"+addr)}, b.pools()), kit.Options{})
	others := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: 10, Flows: 10, Rate: 200})
	for _, network := range []string{"tcp", "udp"} {
		c, err := net.Dial(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		q := kit.Frame{Flow: 1 << 28, Seq: 1}
		ask := func() kit.Frame {
			c.SetDeadline(time.Now().Add(kit.Long))
			if _, err := c.Write(q.Append(nil)); err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, 200)
			n, err := c.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			a, _, err := kit.ParseFrame(buf[:n])
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		before := ask()
		var list []session
		p.JSON("/sessions?proto="+network, &list)
		var id string
		for _, s := range list {
			if s.Peer == c.LocalAddr().String() {
				id = s.ID
			}
		}
		var one session
		p.JSON("/sessions/"+id, &one)
		if one.Peer != c.LocalAddr().String() || one.Bytes == 0 || network == "udp" && one.Packets != 1 {
			t.Errorf("GET /sessions/%s: %+v", id, one)
		}
		if status, body := p.Do(http.MethodDelete, "/sessions/"+id, nil); status != http.StatusNoContent {
			t.Errorf("DELETE /sessions/%s: %d %s", id, status, body)
		}
		if network == "tcp" {
			if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
				t.Errorf("the client of a closed connection read %d bytes, %v", n, err)
			}
		} else if after := ask(); after.From == before.From {
			t.Errorf("the client of a closed session is still seen at %s", after.From)
		}
		for _, method := range []string{http.MethodGet, http.MethodDelete} {
			if status, _ := p.Do(method, "/sessions/"+id, nil); status != http.StatusNotFound {
				t.Errorf("%s of a closed session: %d, want 404", method, status)
			}
		}
		if got := p.Metric("flows_closed_total", "proto", network, "reason", "admin"); got != 1 {
			t.Errorf("flows_closed_total of admin over %s is %v, want 1", network, got)
		}
	}
	for path, want := range map[string]int{"/sessions/x": 400, "/sessions/t-ffffffff": 404, "/pools/nobody": 404, "/pools/tcp": 200, "/healthz": 200, "/readyz": 200} {
		if status, body := p.Get(path); status != want {
			t.Errorf("GET %s: %d %s, want %d", path, status, body, want)
		}
	}
	if status, _ := p.Do(http.MethodPost, "/sessions", nil); status != http.StatusMethodNotAllowed {
		t.Errorf("POST /sessions: %d, want 405", status)
	}
	others.Round(t)
	perfect(t, others)
}

// TestMetrics compares the counters with what was sent.
func TestMetrics(t *testing.T) {
	b := newBackends(t)
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr), "u": kit.ToPool("udp", "udp/"+addr)}, b.pools()), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: 10, Flows: 30, Rate: 400, Body: 51})
	load.Go(t, 400)
	r := load.Stop()
	if !r.Perfect() {
		t.Fatalf("the load noticed: %v", &r)
	}
	kit.Settles(t, "active_connections", 0.0, func() float64 { return p.Metric("active_connections", "listener", "t") })
	f := kit.Frame{Body: make([]byte, 51)}
	size := float64(len(f.Append(nil)))
	tcp, _ := b.tcp.Total()
	udp, _ := b.udp.Total()
	m := p.Metrics()
	for _, tc := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"listener_connections_total", []string{"listener", "t", "result", "accepted"}, 10},
		{"active_udp_sessions", []string{"listener", "u"}, 30},
		{"bytes_total", []string{"listener", "t", "dir", "c2s"}, size * float64(tcp.Messages)},
		{"bytes_total", []string{"listener", "t", "dir", "s2c"}, size * float64(tcp.Messages)},
		{"bytes_total", []string{"listener", "u", "dir", "c2s"}, size * float64(udp.Messages)},
		{"bytes_total", []string{"listener", "u", "dir", "s2c"}, size * float64(udp.Messages)},
		{"packets_total", []string{"listener", "u", "dir", "c2s"}, float64(udp.Messages)},
		{"packets_total", []string{"listener", "u", "dir", "s2c"}, float64(udp.Messages)},
		{"datagrams_dropped_total", nil, 0},
		{"connection_duration_seconds_count", []string{"listener", "t"}, 10},
		{"lb_selections_total", []string{"pool", "tcp", "result", "ok"}, 10},
		{"lb_selections_total", []string{"pool", "udp", "result", "ok"}, 30},
		{"backend_active_sessions", []string{"pool", "udp", "backend", b.udp.Addr}, 30},
		{"backend_active_sessions", []string{"pool", "tcp", "backend", b.tcp.Addr}, 0},
		{"flows_closed_total", []string{"proto", "tcp"}, 10},
	} {
		if got := m.Sum(tc.name, tc.labels...); got != tc.want {
			t.Errorf("%s%v is %v, want %v", tc.name, tc.labels, got, tc.want)
		}
	}
	if r.Sent != int64(tcp.Messages+udp.Messages) {
		t.Errorf("%d messages were sent, the backends saw %d", r.Sent, tcp.Messages+udp.Messages)
	}
	if got, want := m.Sum("fd_open"), float64(p.Files()); got > want+3 || got < want-3 {
		t.Errorf("fd_open is %v, want about %v", got, fmt.Sprint(want))
	}
}
