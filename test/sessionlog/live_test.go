package sessionlog

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestProgress has live sessions of every kind, each of which has a record in each
// interval, spread over it.
func TestProgress(t *testing.T) {
	const of = 60 // of each engine
	file, to := logFile(t), backend(t)
	listeners, kinds := kit.M{}, map[string]int{"tcp": of, "udp": of, "copied": 1, "copied-udp": 1, "server": 1}
	addrs := map[string]string{}
	for name := range kinds {
		addrs[name] = kit.Local(kit.Port(t))
	}
	pool, throttle := kit.M{"handler": "pool", "pool": "p"}, kit.M{"handler": "throttle"}
	listeners["tcp"] = kit.ToPool("p", "tcp/"+addrs["tcp"])
	listeners["udp"] = kit.ToPool("p", "udp/"+addrs["udp"])
	listeners["copied"] = kit.Listener([]string{"tcp/" + addrs["copied"]}, kit.Route(throttle, pool))
	listeners["copied-udp"] = kit.Listener([]string{"udp/" + addrs["copied-udp"]}, kit.Route(throttle, pool))
	listeners["server"] = kit.Listener([]string{"tcp/" + addrs["server"]})
	app := kit.App(listeners, kit.M{"p": kit.Pool(to)}, kit.M{"connection_log": kit.M{"progress": "1s"}})
	app["apps"].(kit.M)["layer4"] = kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{"wayhouse/server:1"}, "routes": kit.A{kit.Route(kit.M{"handler": "echo"})}}}}
	p := kit.Start(t, logged(app, file), kit.Options{})
	var clients []net.Conn
	for name, n := range kinds {
		network := "tcp"
		if name == "udp" || name == "copied-udp" {
			network = "udp"
		}
		for range n {
			clients = append(clients, client(t, network, addrs[name]))
		}
	}
	const rounds = 3
	counts := func() (byListener map[string]map[string]int, at map[int]int) {
		byListener, at = map[string]map[string]int{}, map[int]int{}
		for _, r := range records(t, file) {
			if r["event"] != "session_progress" {
				continue
			}
			name := r["listener"].(string)
			if byListener[name] == nil {
				byListener[name] = map[string]int{}
			}
			byListener[name][r["session"].(string)]++
			if ts, err := time.Parse(time.RFC3339Nano, r["ts"].(string)); err == nil {
				at[ts.Nanosecond()/int(100*time.Millisecond)]++
			}
			if r["duration_ms"] == nil || r["idle_ms"] == nil || r["close_reason"] != nil {
				t.Fatalf("a record of a live session: %v", r)
			}
		}
		return byListener, at
	}
	kit.Eventually(t, "records of every session", func() bool {
		got, _ := counts()
		for name, n := range kinds {
			if len(got[name]) != n {
				return false
			}
			for _, k := range got[name] {
				if k < rounds {
					return false
				}
			}
		}
		return true
	})
	got, at := counts()
	for name, sessions := range got {
		for id, n := range sessions {
			if n > 2*rounds+4 {
				t.Errorf("%s of %s has %d records in about %d intervals", id, name, n, rounds)
			}
		}
	}
	if len(at) < 4 {
		t.Errorf("the records are of these tenths of a second: %v", at)
	}
	if n := p.Metric("session_log_records_total", "event", "session_progress"); n < float64(rounds*len(clients)) {
		t.Errorf("%v records are counted, of %d sessions and %d intervals", n, len(clients), rounds)
	}
}

// TestRefusedAndReload has refused flows in the session log while there is one,
// and records in the log of the config that runs.
func TestRefusedAndReload(t *testing.T) {
	dir, to, addr := t.TempDir(), backend(t), kit.Local(kit.Port(t))
	down, open := kit.Local(kit.Port(t)), kit.Local(kit.Port(t))
	config := func(file string, log kit.M) kit.M {
		options := kit.M{}
		if log != nil {
			options["connection_log"] = log
		}
		denied := kit.With(kit.ToPool("p", "udp/"+addr), kit.M{"filters": kit.A{kit.M{"filter": "acl", "deny": kit.A{"127.0.0.2"}}}})
		full := kit.With(kit.Pool(to), kit.M{"per_backend": kit.M{"max_sessions": 1}})
		return logged(kit.App(kit.M{"denied": denied, "full": kit.ToPool("full", "udp/"+down), "open": kit.ToPool("p", "tcp/"+open)},
			kit.M{"p": kit.Pool(to), "full": full}, options), filepath.Join(dir, file))
	}
	from := func(ip, to string) net.Conn {
		t.Helper()
		a, err := net.ResolveUDPAddr("udp", to)
		if err != nil {
			t.Fatal(err)
		}
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.ParseIP(ip)}, a)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := c.Write([]byte(canary)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	p := kit.Start(t, config("first", kit.M{}), kit.Options{})
	for range 5 {
		from("127.0.0.2", addr)
	}
	kit.Eventually(t, "five refused", func() bool { return p.Metric("filter_blocked_total", "listener", "denied") == 5 })
	first := filepath.Join(dir, "first")
	r := find(t, first, record{"event": "refused", "listener": "denied"})
	if !r.is(record{"rule": "acl", "protocol": "udp", "local": addr, "suppressed": 0}) || r["session"] != nil {
		t.Errorf("refused: %v", r)
	}
	client(t, "udp", down)
	from("127.0.0.1", down)
	find(t, first, record{"event": "refused", "listener": "full", "rule": "no_backend"})

	c := client(t, "tcp", open)
	p.MustLoad(config("second", kit.M{}))
	c.Close()
	find(t, filepath.Join(dir, "second"), record{"event": "session_close", "listener": "open"})
	if err := p.Load(kit.M{"apps": kit.M{"wayhouse": kit.M{"connection_log": kit.M{"sample": 2}}}}); err == nil {
		t.Error("a sample of 2 is taken")
	}
	client(t, "tcp", open).Close()
	kit.Eventually(t, "the second session", func() bool { return len(records(t, filepath.Join(dir, "second"))) == 2 })

	p.MustLoad(config("third", nil))
	client(t, "tcp", open).Close()
	kit.Eventually(t, "the end of the third", func() bool {
		return p.Metric("flows_closed_total", "listener", "open", "reason", "client_close") == 3
	})
	p.MustLoad(config("fourth", kit.M{"open": true}))
	c = client(t, "tcp", open)
	find(t, filepath.Join(dir, "fourth"), record{"event": "session_open", "listener": "open"})
	c.Close()
	find(t, filepath.Join(dir, "fourth"), record{"event": "session_close", "listener": "open"})
	if got := records(t, filepath.Join(dir, "third")); len(got) > 0 {
		t.Errorf("logged without a session log: %v", got)
	}
}
