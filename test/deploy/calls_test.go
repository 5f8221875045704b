package deploy

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestCalls has what the calls about backends answer to good and bad requests.
// What is refused changes nothing.
func TestCalls(t *testing.T) {
	odd := "a b/c%é"
	p := kit.Start(t, kit.App(kit.M{"t": kit.ToPool(odd, "tcp/"+kit.Local(kit.Port(t)))}, kit.M{odd: kit.Pool("127.0.0.1:7001", "127.0.0.1:7002")}), kit.Options{})
	pool := "/pools/" + url.PathEscape(odd)
	const one, six = "/backends/127.0.0.1:7001", "/backends/127.0.0.1:7006"
	for _, tc := range []struct {
		method, path, body string
		status             int
		text               string // in the answer
	}{
		{"POST", pool + "/backends", `{"addr": "[::ffff:127.0.0.1]:7006", "weight": 4}`, 201, `"addr":"127.0.0.1:7006","weight":4,"origin":"overlay"`},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:7006"}`, 409, "has the backend 127.0.0.1:7006 already"},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:7001"}`, 409, "has the backend 127.0.0.1:7001 already"},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:7007", "weight": 0}`, 400, "weight: 0 is not from 1"},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:7007", "weight": -1}`, 400, "weight: -1 is not from 1"},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:7007", "weight": 4294967296}`, 400, "weight: 4294967296 is not from 1"},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:7007", "weight": 1.5}`, 400, "weight"},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:7007", "wieght": 1}`, 400, "wieght"},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:0"}`, 400, "addr: "},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1"}`, 400, "addr: "},
		{"POST", pool + "/backends", `{"addr": "0.0.0.0:7007"}`, 400, "addr: "},
		{"POST", pool + "/backends", `{"addr": "game.example.com:7007"}`, 400, "host names are for the config"},
		{"POST", pool + "/backends", `{}`, 400, "addr: missing"},
		{"POST", pool + "/backends", ``, 400, "the body"},
		{"POST", pool + "/backends", `[]`, 400, "the body"},
		{"POST", pool + "/backends", `{"addr": "127.0.0.1:7007"} {}`, 400, "behind the object"},
		{"POST", pool + "/backends", `{"addr": "` + strings.Repeat("1", 5000) + `"}`, 413, "4096"},
		{"POST", pool + "/backends?x=1", `{"addr": "127.0.0.1:7007"}`, 400, "x: no such parameter"},
		{"POST", "/pools/nobody/backends", `{"addr": "127.0.0.1:7007"}`, 404, `no pool is named \"nobody\"`},
		{"PUT", pool + "/backends", `{}`, 405, "PUT is not allowed"},
		{"GET", pool + one, ``, 405, "GET is not allowed"},

		{"PATCH", pool + one, `{"state": "draining"}`, 200, `"state":"draining"`},
		{"PATCH", pool + one + "?format=text", `{"state": "disabled"}`, 200, "state=disabled"},
		{"PATCH", pool + "/backends/%5B::ffff:127.0.0.1%5D:7001", `{"state": "draining"}`, 200, `"state":"draining"`},
		{"PATCH", pool + one, `{"state": "Draining"}`, 400, `state: \"Draining\" is not enabled, draining or disabled`},
		{"PATCH", pool + one, `{}`, 400, "state: missing"},
		{"PATCH", pool + one, `{"state": 1}`, 400, "state"},
		{"PATCH", pool + one, `{"state": "enabled", "weight": 2}`, 400, "weight"},
		{"PATCH", pool + "/backends/127.0.0.1:7009", `{"state": "draining"}`, 404, "has no backend 127.0.0.1:7009"},
		{"PATCH", pool + "/backends/nonsense", `{"state": "draining"}`, 400, "nonsense"},
		{"PATCH", "/pools/nobody" + one, `{"state": "draining"}`, 404, "no pool is named"},

		{"DELETE", pool + "/backends/127.0.0.1:7002", ``, 204, ""},
		{"DELETE", pool + "/backends/127.0.0.1:7002", ``, 404, "has no backend"},
		{"DELETE", "/pools/nobody" + one, ``, 404, "no pool is named"},
		{"DELETE", pool + "/backends/7002", ``, 400, "7002"},

		{"GET", "/overlay", ``, 200, `"addr":"127.0.0.1:7006","change":"added","weight":4,"actor":"admin-api"`},
		{"GET", "/overlay?format=text", ``, 200, `backend=127.0.0.1:7001 change=state state=draining actor="admin-api"`},
		{"GET", "/overlay?format=text", ``, 200, `backend=127.0.0.1:7002 change=removed actor="admin-api"`},
		{"GET", "/overlay?pool=x", ``, 400, "pool: no such parameter"},
		{"DELETE", "/overlay?pool=", ``, 400, "pool: is empty"},
		{"DELETE", "/overlay?pool=nobody", ``, 200, "[]"},
		{"POST", "/admin/drain?now=1", ``, 400, "now: no such parameter"},
		{"GET", "/admin/drain", ``, 405, "GET is not allowed"},
	} {
		status, answer := p.Do(tc.method, tc.path, []byte(tc.body))
		if status != tc.status || !strings.Contains(answer, tc.text) || status >= 400 && !strings.HasPrefix(answer, `{"error":"`) {
			t.Errorf("%s %s %.80s: %d %.300s, want %d with %q", tc.method, tc.path, tc.body, status, answer, tc.status, tc.text)
		}
	}
	if n := p.Metric("overlay_entries", "change", "added") + p.Metric("overlay_entries", "change", "removed") + p.Metric("overlay_entries", "change", "state"); n != 3 {
		t.Errorf("%v entries are counted, want 3", n)
	}

	// A config without the pool keeps what was wanted of it.
	p.MustLoad(kit.App(kit.M{"t": kit.ToPool("other", "tcp/"+kit.Local(kit.Port(t)))}, kit.M{"other": kit.Pool("127.0.0.1:7001")}))
	if _, text := p.Get("/overlay?format=text"); strings.Count(text, "unused=true") != 3 {
		t.Errorf("without the pool the overlay is\n%s", text)
	}
	dropped := call(t, p, "DELETE", "/overlay?pool="+url.QueryEscape(odd), "", 200)
	var list []any
	if err := json.Unmarshal([]byte(dropped), &list); err != nil || len(list) != 3 {
		t.Errorf("dropped %s", dropped)
	}
	if now := overlay(t, p); now != "[]" && now != "null" {
		t.Errorf("there is %s", now)
	}
}

// TestResolve finds the client behind the address that a backend sees.
func TestResolve(t *testing.T) {
	blue := newServers(t, 1)
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, blue.config(addr, nil), kit.Options{})
	for i, network := range []string{"tcp", "udp"} {
		c, err := net.Dial(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		q := kit.Frame{Flow: 1<<29 + uint32(i), Seq: 1}
		if _, err := c.Write(q.Append(nil)); err != nil {
			t.Fatal(err)
		}
		to, seen := blue.tcp.Addr, blue.tcp.Flow
		if network == "udp" {
			to, seen = blue.udp.Addr, blue.udp.Flow
		}
		kit.Eventually(t, "the backend has heard of it", func() bool { return seen(q.Flow).Messages > 0 })
		ask := fmt.Sprintf("/sessions/resolve?backend=%s&local=%s", to, seen(q.Flow).From)
		var s struct{ ID, Proto, Peer, Backend string }
		p.JSON(ask, &s)
		if s.Peer != c.LocalAddr().String() || s.Proto != network || s.Backend != to {
			t.Errorf("%s is %+v, want the peer %s", ask, s, c.LocalAddr())
		}
		if _, text := p.Get(ask + "&format=text&proto=" + network); !strings.Contains(text, "peer="+s.Peer) {
			t.Errorf("as text: %s", text)
		}
		other := map[string]string{"tcp": "udp", "udp": "tcp"}[network]
		call(t, p, "GET", ask+"&proto="+other, "", 404)
	}
	for path, want := range map[string]int{
		"/sessions/resolve": 400, "/sessions/resolve?backend=127.0.0.1:1": 400, "/sessions/resolve?backend=127.0.0.1:1&local=x": 400,
		"/sessions/resolve?backend=127.0.0.1:1&local=127.0.0.1:2": 404, "/sessions/resolve?backend=127.0.0.1:1&local=127.0.0.1:2&proto=icmp": 400,
	} {
		call(t, p, "GET", path, "", want)
	}
}
