package reload

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// hashOf is the hash that docs/admin-api.md promises for the app of a config.
func hashOf(t *testing.T, config kit.M) string {
	t.Helper()
	b, err := json.Marshal(config["apps"].(kit.M)["wayhouse"]) // keys in order, nothing to escape
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])[:12]
}

// applied is the config that /readyz tells of.
func applied(t *testing.T, p *kit.Process) (hash string, since time.Time) {
	t.Helper()
	var ready struct {
		Hash  string    `json:"config_hash"`
		Since time.Time `json:"config_applied"`
	}
	p.JSON("/readyz", &ready)
	return ready.Hash, ready.Since
}

// rejected is what GET /wayhouse/config/last-rejected tells.
type rejected struct {
	Time       time.Time  `json:"time"`
	Source     string     `json:"source"`
	Hash       string     `json:"hash"`
	Error      string     `json:"error"`
	Superseded *time.Time `json:"superseded"`
}

const lastRejected = "/wayhouse/config/last-rejected"

// counted are the loads that the process has counted.
func counted(p *kit.Process) (ok, refused int) {
	m := p.Metrics()
	return int(m.Sum("config_reload_total", "result", "ok")), int(m.Sum("config_reload_total", "result", "error"))
}

// TestLastRejected brings configs that cannot run by every door, and each with
// what is wrong at another place of the way in. Each is counted once and told of
// with its source; nothing that says which config runs changes.
func TestLastRejected(t *testing.T) {
	port, web := kit.Port(t), kit.Port(t)
	b := kit.NewTCPBackend(t, 1, "127.0.0.1:0")
	good := func(n int) kit.M {
		return kit.App(kit.M{"game": kit.ToPool("p", fmt.Sprintf("tcp/127.0.0.1:%d", port))},
			kit.M{"p": kit.Pool(b.Addr), "other": kit.With(kit.Pool(b.Addr), kit.M{"max_tries": 1 + n})})
	}
	p := kit.Start(t, good(0), kit.Options{})
	taken, err := net.Listen("tcp", kit.Local(web))
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if status, body := p.Get(lastRejected); status != http.StatusNotFound {
		t.Fatalf("before any was refused: %d %s", status, body)
	}

	with := func(change func(doc kit.M)) []byte {
		var doc kit.M
		if err := json.Unmarshal(p.Document(good(0)), &doc); err != nil {
			t.Fatal(err)
		}
		change(doc)
		out, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	app := func(change func(app kit.M)) []byte {
		return with(func(doc kit.M) { change(doc["apps"].(kit.M)["wayhouse"].(kit.M)) })
	}
	site := kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{kit.Local(web)}}}}
	stages := []struct {
		name, want string
		doc        []byte
		hash       bool // the app was reached for certain
	}{
		{"no JSON", "invalid character", []byte("{}}"), false},
		{"unknown part of a config", "wayhose", with(func(d kit.M) { d["wayhose"] = 1 }), false},
		{"one ID twice", "twin", with(func(d kit.M) {
			p := d["apps"].(kit.M)["wayhouse"].(kit.M)["pools"].(kit.M)
			p["p"].(kit.M)["@id"], p["other"].(kit.M)["@id"] = "twin", "twin"
		}), false},
		{"unknown log", "bonfire", with(func(d kit.M) { d["logging"] = kit.M{"logs": kit.M{"x": kit.M{"writer": kit.M{"output": "bonfire"}}}} }), false},
		{"unknown storage", "cellar", with(func(d kit.M) { d["storage"] = kit.M{"module": "cellar"} }), false},
		{"admin endpoint that cannot be", "203.0.113.1", with(func(d kit.M) { d["admin"].(kit.M)["listen"] = "203.0.113.1:2019" }), false},
		{"unknown app", "wayhose", with(func(d kit.M) { d["apps"].(kit.M)["wayhose"] = kit.M{} }), false},
		{"another app that cannot be", "teleport", with(func(d kit.M) {
			d["apps"].(kit.M)["http"] = kit.M{"servers": kit.M{"s": kit.M{"routes": kit.A{kit.Route(kit.M{"handler": "teleport"})}}}}
		}), false},
		{"another app that cannot start", "address already in use", with(func(d kit.M) { d["apps"].(kit.M)["http"] = site }), true},
		{"unknown option", "wrokers", app(func(a kit.M) { a["wrokers"] = 2 }), true},
		{"wrong option", "workers", app(func(a kit.M) { a["workers"] = -1 }), true},
		{"address that is not ours", "203.0.113.1", app(func(a kit.M) {
			a["listeners"].(kit.M)["x"] = kit.ToPool("p", "tcp/203.0.113.1:9")
		}), true},
		{"unknown source of configs", "oracle", with(func(d kit.M) {
			d["admin"].(kit.M)["config"] = kit.M{"persist": false, "load": kit.M{"module": "oracle"}}
		}), true},
	}
	put := func(doc []byte) {
		p.WriteDocument(doc)
	}
	doors := []struct {
		source string
		early  bool // what Caddy refuses before it looks for its endpoint is heard
		bring  func(doc []byte)
	}{
		{"load", true, func(doc []byte) { p.Do("POST", "/load", doc) }},
		{"signal", true, func(doc []byte) { put(doc); p.Signal(syscall.SIGHUP) }},
		{"signal", true, func(doc []byte) { put(doc); p.Signal(syscall.SIGUSR1) }},
		{"reload", true, func(doc []byte) { put(doc); p.Do("POST", "/admin/reload", nil) }},
		{"config", false, func(doc []byte) { p.Do("POST", "/config/", doc) }},
	}
	hash, since := applied(t, p)
	if want := hashOf(t, good(0)); hash != want {
		t.Errorf("/readyz tells of the config %q, want %q", hash, want)
	}
	sockets := listening(t, p, port)
	oks, errs := counted(p)
	for _, d := range doors {
		for i, s := range stages {
			name := d.source + ": " + s.name
			if i < 5 && !d.early {
				continue // see docs/admin-api.md
			}
			begin := time.Now()
			d.bring(s.doc)
			errs++
			var last rejected
			heard := kit.Poll(kit.Long, func() bool { _, n := counted(p); return n >= errs })
			p.JSON(lastRejected, &last)
			if !heard || last.Source != d.source || !strings.Contains(last.Error, s.want) || last.Superseded != nil || last.Time.Before(begin.Add(-time.Millisecond)) {
				t.Errorf("%s: counted %v, last rejected: %+v, want %q in the error", name, heard, last, s.want)
			}
			if s.hash && len(last.Hash) != 12 {
				t.Errorf("%s: the hash is %q", name, last.Hash)
			}
			if n := p.Metric("config_last_reload_successful"); n != 0 {
				t.Errorf("%s: config_last_reload_successful is %v", name, n)
			}
			if nowHash, nowSince := applied(t, p); nowHash != hash || !nowSince.Equal(since) {
				t.Errorf("%s: /readyz tells of %s since %v, before of %s since %v", name, nowHash, nowSince, hash, since)
			}
			if ok, n := counted(p); ok != oks || n != errs {
				t.Fatalf("%s: counted %d and %d refused, want %d and %d", name, ok, n, oks, errs)
			}
		}
		// A Caddyfile is adapted first, which may fail too.
		if d.source == "load" {
			if status, body := p.DoAs("POST", "/load", "text/caddyfile", []byte("{\n\twayhouse {\n\t\tpoool\n\t}\n}\n")); status != http.StatusBadRequest || !strings.Contains(body, "poool") {
				t.Errorf("a Caddyfile that cannot be adapted: %d %s", status, body)
			}
			errs++
			var last rejected
			if p.JSON(lastRejected, &last); !strings.Contains(last.Error, "poool") {
				t.Errorf("last rejected: %+v", last)
			}
		}
	}
	if now := listening(t, p, port); now != sockets {
		t.Errorf("the listening sockets were %s and are %s", sockets, now)
	}

	// What is taken then is told of everywhere, and does not forget the mistake.
	p.MustLoad(good(1))
	var last rejected
	p.JSON(lastRejected, &last)
	if last.Superseded == nil || last.Superseded.Before(last.Time) {
		t.Errorf("a config was taken after the one that was refused: %+v", last)
	}
	want := hashOf(t, good(1))
	if got, at := applied(t, p); got != want || !at.After(since) {
		t.Errorf("/readyz tells of %s since %v, want %s after %v", got, at, want, since)
	}
	if got := p.Header("/pools", "X-Wayhouse-Config"); got != want {
		t.Errorf("/pools says in its header %q, want %q", got, want)
	}
	m := p.Metrics()
	if m.Sum("config_info", "hash", want) != 1 || m.Sum("config_info") != 1 || m.Sum("config_last_reload_successful") != 1 {
		t.Errorf("config_info is %v for %s and %v in all; config_last_reload_successful %v", m.Sum("config_info", "hash", want), want,
			m.Sum("config_info"), m.Sum("config_last_reload_successful"))
	}
	if _, body := p.Get(lastRejected + "?format=text"); !strings.Contains(body, "source=config") || !strings.Contains(body, "superseded=true") {
		t.Errorf("as text: %s", body)
	}
	if status, _ := p.Get(lastRejected + "?fromat=text"); status != http.StatusBadRequest {
		t.Errorf("an unknown parameter: %d", status)
	}
}

// TestRejectedSecrets has a config refused that holds a secret.
func TestRejectedSecrets(t *testing.T) {
	const secret = "canary-6b1f0c"
	p := kit.Start(t, kit.App(kit.M{}, kit.M{}), kit.Options{})
	bad := kit.App(kit.M{}, kit.M{}, kit.M{"workers": -1, "resolvers": kit.M{"r": kit.M{
		"resolver": "http", "endpoint": "http://127.0.0.1:1/", "headers": kit.M{"Authorization": kit.A{"Bearer " + secret}},
	}}})
	if err := p.Load(bad); err == nil {
		t.Fatal("taken")
	}
	_, body := p.Get(lastRejected)
	_, series := p.Get("/metrics")
	if !strings.Contains(body, "workers") || strings.Contains(body+series+p.Log(), secret) {
		t.Errorf("the secret is told, or the mistake is not: %s", body)
	}
}

// TestFileGone reloads a file that is not there any more.
func TestFileGone(t *testing.T) {
	p := kit.Start(t, kit.App(kit.M{}, kit.M{}), kit.Options{})
	if err := os.Remove(p.Config); err != nil {
		t.Fatal(err)
	}
	p.Signal(syscall.SIGHUP)
	kit.Eventually(t, "the file is missed", func() bool { _, refused := counted(p); return refused == 1 })
	var last rejected
	if p.JSON(lastRejected, &last); last.Source != "signal" || !strings.Contains(last.Error, "no such file") {
		t.Errorf("last rejected: %+v", last)
	}
}
