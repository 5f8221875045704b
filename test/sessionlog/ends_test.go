package sessionlog

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// canary stands in everything that clients and backends send, with what would
// break a line of a log.
const canary = "canary\r\n\x00\x1b[31m\"}{\"event\":\"forged\"\u2028"

// backend is a server that sends back what it gets, over TCP and UDP on one port.
// A TCP connection that sends "bye" is closed.
func backend(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	pc, err := net.ListenPacket("udp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close(); pc.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1024)
				for {
					n, err := c.Read(b)
					if err != nil || string(b[:n]) == "bye" {
						return
					}
					c.Write(b[:n])
				}
			}()
		}
	}()
	go func() {
		b := make([]byte, 1024)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			pc.WriteTo(b[:n], from)
		}
	}()
	return ln.Addr().String()
}

// client is a connection or session that has been served once.
func client(t *testing.T, network, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(kit.Long))
	if _, err := io.WriteString(c, canary); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, len(canary))); err != nil {
		t.Fatalf("%s: no answer: %v", addr, err)
	}
	return c
}

// dial is a connection that has sent the canary and waits for no answer.
func dial(t *testing.T, addr string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	io.WriteString(c, canary)
	return c
}

// closeByAPI ends the one session of a listener by DELETE /sessions/{id}.
func closeByAPI(t *testing.T, p *kit.Process, listener string) {
	t.Helper()
	var list []struct {
		ID string `json:"id"`
	}
	kit.Eventually(t, "the session of "+listener, func() bool {
		p.JSON("/sessions?listener="+listener, &list)
		return len(list) == 1
	})
	if status, body := p.Do(http.MethodDelete, "/sessions/"+list[0].ID, nil); status != http.StatusNoContent {
		t.Errorf("closing %s: %d %s", list[0].ID, status, body)
	}
}

// TestEnds ends a session in every way there is. Each has a listener of its own
// and exactly one record of its end.
func TestEnds(t *testing.T) {
	file, to := logFile(t), backend(t)
	gone := kit.Local(kit.Port(t))
	hung := make(chan struct{})
	matchmaker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hang" {
			select {
			case <-hung:
			case <-r.Context().Done():
			}
			return
		}
		fmt.Fprintf(w, `{"target": %q}`, to)
	}))
	defer matchmaker.Close()
	defer close(hung)

	pool := func(more kit.M) kit.M { return kit.With(kit.Pool(to), more) }
	pools := kit.M{
		"plain":   pool(nil),
		"v2":      pool(kit.M{"proxy_protocol": "v2"}),
		"brief":   pool(kit.M{"idle_timeout": "300ms"}),
		"short":   pool(kit.M{"max_lifetime": "300ms"}),
		"gone":    kit.Pool(gone),
		"full":    pool(kit.M{"per_backend": kit.M{"max_sessions": 1}}),
		"removed": kit.With(kit.Pool(to, gone), kit.M{"balancer": kit.M{"policy": "first_available"}, "on_backend_removed": "close"}),
		"drained": kit.With(kit.Pool(to, gone), kit.M{"balancer": kit.M{"policy": "first_available"}, "on_backend_removed": "drain", "drain_deadline": "100ms"}),
	}
	toPool := func(name string) kit.M { return kit.M{"handler": "pool", "pool": name} }
	throttle := kit.M{"handler": "throttle"}
	resolve := func(name string) kit.M { return kit.M{"handler": "resolve", "resolver": name} }
	wantsMore := kit.M{"first_bytes": kit.M{"prefix": "hex:" + strings.Repeat("63616e617279", 1), "offset": 2000}}

	const (
		established, connect = "established", "connect"
		proxy, atBackend     = "proxy", "backend"
	)
	bytes := len(canary)
	type end struct {
		network string
		route   kit.M
		do      func(t *testing.T, p *kit.Process, name, addr string)
		want    record
	}
	served := func(network string, then func(p *kit.Process, name string, c net.Conn)) func(*testing.T, *kit.Process, string, string) {
		return func(t *testing.T, p *kit.Process, name, addr string) {
			c := client(t, network, addr)
			if then != nil {
				then(p, name, c)
			}
		}
	}
	leave := served("tcp", func(_ *kit.Process, _ string, c net.Conn) { c.Close() })
	byAPI := func(t *testing.T, p *kit.Process, name, addr string) { dial(t, addr); closeByAPI(t, p, name) }
	cases := map[string]end{
		"client": {"tcp", kit.Route(toPool("plain")), leave,
			record{"close_reason": "client_close", "side": "client", "phase": established, "route": 0, "pool": "plain", "backend": to, "bytes_c2s": bytes, "bytes_s2c": bytes, "resolver": ""}},
		"header": {"tcp", kit.Route(toPool("v2")), func(t *testing.T, _ *kit.Process, _, addr string) { dial(t, addr).Close() },
			record{"phase": established, "proxy_protocol": "v2", "pool": "v2"}},
		"backend": {"tcp", kit.Route(toPool("plain")), func(t *testing.T, _ *kit.Process, _, addr string) {
			c := client(t, "tcp", addr)
			io.WriteString(c, "bye")
			io.Copy(io.Discard, c)
			c.Close()
		}, record{"close_reason": "backend_close", "side": atBackend, "phase": established, "bytes_c2s": bytes + 3}},
		"idle": {"tcp", kit.Route(toPool("brief")), served("tcp", nil),
			record{"close_reason": "idle_timeout", "side": proxy, "phase": established}},
		"idle-udp": {"udp", kit.Route(toPool("brief")), served("udp", nil),
			record{"close_reason": "idle_timeout", "side": proxy, "phase": established, "pkts_c2s": 1, "pkts_s2c": 1, "bytes_c2s": bytes, "bytes_s2c": bytes}},
		"limit": {"tcp", kit.Route(toPool("short")), served("tcp", nil),
			record{"close_reason": "limit", "side": proxy, "phase": established}},
		"limit-udp": {"udp", kit.Route(toPool("short")), served("udp", nil),
			record{"close_reason": "limit", "side": proxy, "phase": established}},
		"admin": {"tcp", kit.Route(toPool("plain")), byAPI,
			record{"close_reason": "admin", "side": proxy, "phase": established}},
		"admin-udp": {"udp", kit.Route(toPool("plain")), served("udp", func(p *kit.Process, name string, _ net.Conn) { closeByAPI(t, p, name) }),
			record{"close_reason": "admin", "side": proxy, "phase": established}},
		"refused": {"tcp", kit.Route(toPool("gone")), func(t *testing.T, _ *kit.Process, _, addr string) { io.Copy(io.Discard, dial(t, addr)) },
			record{"close_reason": "error", "side": atBackend, "phase": connect, "failure": "refused", "tries": 1, "pool": "gone", "backend": gone}},
		"full": {"tcp", kit.Route(toPool("full")), func(t *testing.T, p *kit.Process, name, addr string) {
			client(t, "tcp", addr) // which stays
			io.Copy(io.Discard, dial(t, addr))
		}, record{"close_reason": "error", "side": proxy, "phase": connect, "pool": "full", "backend": ""}},
		"peek": {"tcp", kit.Match(wantsMore, toPool("plain")), byAPI,
			record{"close_reason": "admin", "side": proxy, "phase": "peek", "route": nil, "pool": "", "backend": ""}},
		"copied": {"tcp", kit.Route(throttle, toPool("plain")), leave,
			record{"close_reason": "client_close", "side": "client", "phase": established, "pool": "plain", "backend": to, "route": 0}},
		"copied-udp": {"udp", kit.Route(throttle, toPool("brief")), served("udp", nil),
			record{"close_reason": "idle_timeout", "side": proxy, "phase": established, "pool": "brief", "backend": to, "route": 0, "pkts_c2s": 1}},
		"handler": {"tcp", kit.Route(kit.M{"handler": "echo"}), leave,
			record{"close_reason": "client_close", "side": "client", "phase": "handler", "pool": "", "backend": "", "route": 0}},
		"rejected": {"tcp", kit.Route(throttle, kit.M{"handler": "reject"}), func(t *testing.T, _ *kit.Process, _, addr string) { io.Copy(io.Discard, dial(t, addr)) },
			record{"close_reason": "reject", "side": proxy, "phase": "handler"}},
		"target": {"tcp", kit.Route(resolve("matchmaker")), leave,
			record{"close_reason": "client_close", "phase": established, "resolver": "matchmaker", "pool": "(resolver target)", "backend": to}},
		"target-udp": {"udp", kit.Route(resolve("matchmaker")), served("udp", func(p *kit.Process, name string, _ net.Conn) { closeByAPI(t, p, name) }),
			record{"close_reason": "admin", "phase": established, "resolver": "matchmaker", "pool": "(resolver target)", "backend": to}},
		"resolve": {"tcp", kit.Route(resolve("slow")), byAPI,
			record{"close_reason": "admin", "side": proxy, "phase": "resolve", "route": nil}},
		"server": {"tcp", nil, func(t *testing.T, _ *kit.Process, _, addr string) {
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			fmt.Fprintf(c, "GET / HTTP/1.0\r\n\r\n")
			io.Copy(io.Discard, c)
		}, record{"close_reason": "backend_close", "phase": "handler", "route": nil, "pool": "", "backend": ""}},
		"removed": {"tcp", kit.Route(toPool("removed")), served("tcp", nil),
			record{"close_reason": "backend_down", "side": atBackend, "phase": established}},
		"drained": {"tcp", kit.Route(toPool("drained")), served("tcp", nil),
			record{"close_reason": "drain", "side": proxy, "phase": established}},
		"process": {"tcp", kit.Route(toPool("plain")), served("tcp", nil),
			record{"close_reason": "drain", "side": proxy, "phase": established}},
		"process-udp": {"udp", kit.Route(toPool("plain")), served("udp", nil),
			record{"close_reason": "drain", "side": proxy, "phase": established}},
	}
	listeners, addrs := kit.M{}, map[string]string{}
	for name, c := range cases {
		addrs[name] = kit.Local(kit.Port(t))
		l := kit.M{"bind": kit.A{c.network + "/" + addrs[name]}, "peek": kit.M{"timeout": "20s"}}
		if c.route != nil {
			l["routes"] = kit.A{c.route}
		}
		listeners[name] = l
	}
	resolvers := kit.M{
		"matchmaker": kit.M{"resolver": "http", "endpoint": matchmaker.URL, "timeout": "5s"},
		"slow":       kit.M{"resolver": "http", "endpoint": matchmaker.URL + "/hang", "timeout": "20s"},
	}
	config := func(open bool) kit.M {
		app := kit.App(listeners, pools, kit.M{"resolvers": resolvers, "connection_log": kit.M{"open": open}, "shutdown_grace": "0s"})
		app["apps"].(kit.M)["http"] = kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{"wayhouse/server:80"}, "protocols": kit.A{"h1"}, "routes": kit.A{
			kit.M{"handle": kit.A{kit.M{"handler": "static_response", "body": "hello", "close": true}}}}}}}
		return logged(app, file)
	}
	p := kit.Start(t, config(true), kit.Options{})
	for name, c := range cases {
		c.do(t, p, name, addrs[name])
	}
	for name := range cases {
		switch name {
		case "process", "process-udp", "removed", "drained":
		default:
			find(t, file, record{"listener": name, "event": "session_close"})
		}
	}
	for _, name := range []string{"removed", "drained"} {
		pools[name].(kit.M)["targets"] = kit.A{gone}
	}
	p.MustLoad(config(true))
	for _, name := range []string{"removed", "drained"} {
		find(t, file, record{"listener": name, "event": "session_close"})
	}
	p.Signal(syscall.SIGTERM)
	p.Exit()

	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			want := kit.With(kit.M(c.want), kit.M{"listener": name, "event": "session_close", "protocol": c.network})
			r := find(t, file, record(want))
			for _, key := range []string{"ts", "src", "local", "session", "duration_ms", "setup_ms", "proxy_protocol", "bytes_c2s", "bytes_s2c"} {
				if r[key] == nil {
					t.Errorf("no %s in %v", key, r)
				}
			}
			if r["logger"] != "wayhouse.log.sessions" || r["local"] != addrs[name] {
				t.Errorf("%v is of another logger or address", r)
			}
			_, tcp := r["pkts_c2s"]
			if tcp != (c.network == "udp") {
				t.Errorf("packets of %s: %v", c.network, r)
			}
			for _, other := range records(t, file) {
				if other["session"] == r["session"] && other["event"] == "session_open" {
					if r["phase"] != established && name != "server" || other["backend"] != r["backend"] || other["src"] != r["src"] {
						t.Errorf("opened as %v", other)
					}
					return
				}
			}
			if r["phase"] == established {
				t.Errorf("no session_open of %v", r)
			}
		})
	}
	for _, r := range records(t, file) {
		for k, v := range r {
			if s, ok := v.(string); ok && strings.Contains(s, "canary") {
				t.Errorf("%s has what a client has sent: %q", k, s)
			}
		}
	}
}
