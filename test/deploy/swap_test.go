package deploy

import (
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

const players = 20 // of each protocol

func play(t *testing.T, addr string) *kit.Load {
	t.Helper()
	load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: players, Flows: players, Rate: 400, Patience: kit.Long})
	load.Round(t)
	return load
}

func perfect(t *testing.T, who string, l *kit.Load) {
	t.Helper()
	if r := l.Stop(); !r.Perfect() {
		t.Errorf("%s noticed: %v", who, &r)
	}
}

// TestSwapBackends replaces the servers of two pools by the admin API. Players
// finish where they are, new ones land on the new servers, and what operators
// wanted is there after a reload, a restart and a crash.
func TestSwapBackends(t *testing.T) {
	blue, green := newServers(t, 1), newServers(t, 2)
	addr := kit.Local(kit.Port(t))
	config := blue.config(addr, kit.M{"drain_deadline": "1h"})
	p := kit.Start(t, config, kit.Options{})
	early := play(t, addr)

	green.add(t, p)
	blue.set(t, p, "draining")
	if n := p.Metric("pool_backends", "state", "draining"); n != 2 {
		t.Errorf("%v backends are draining, want 2", n)
	}
	were := green.flows()
	late := play(t, addr)
	if n := blue.flows(); n != 2*players {
		t.Errorf("the old servers have seen %d players, want %d", n, 2*players)
	}
	if n := green.flows() - were; n != 2*players {
		t.Errorf("the new servers have seen %d players, want %d", n, 2*players)
	}
	p.MustLoad(kit.With(config, kit.M{"storage": kit.M{"module": "file_system", "root": p.Dir + "/storage"}}))
	early.Round(t)
	late.Round(t)
	perfect(t, "who came before", early)
	perfect(t, "who came after", late)

	wanted := overlay(t, p)
	if strings.Count(wanted, `"draining"`) != 2 || strings.Count(wanted, `"added"`) != 2 {
		t.Errorf("the overlay is %s", wanted)
	}
	restart(t, p, syscall.SIGTERM)
	if now := overlay(t, p); now != wanted {
		t.Errorf("after a restart the overlay is\n%s, it was\n%s", now, wanted)
	}
	kit.Eventually(t, "the new server is healthy", func() bool { return backendOf(t, p, "tcp", green.tcp.Addr).Healthy })
	again := play(t, addr)
	perfect(t, "who came after the restart", again)
	if n := blue.flows(); n != 2*players {
		t.Errorf("after the restart the old servers have seen %d players, want %d", n, 2*players)
	}

	blue.each(func(pool, addr string) { call(t, p, "DELETE", backendPath(pool, addr), "", http.StatusNoContent) })
	restart(t, p, syscall.SIGKILL)
	blue.each(func(pool, addr string) {
		if b := backendOf(t, p, pool, addr); b.Addr != "" {
			t.Errorf("a backend that was removed is back: %+v", b)
		}
	})
	green.each(func(pool, addr string) {
		if b := backendOf(t, p, pool, addr); b.Origin != "overlay" || b.State != "enabled" {
			t.Errorf("the new backend is %+v", b)
		}
	})
	call(t, p, "DELETE", "/overlay", "", http.StatusOK)
	blue.each(func(pool, addr string) {
		if b := backendOf(t, p, pool, addr); b.Origin != "config" || b.State != "enabled" {
			t.Errorf("without the overlay the backend of the config is %+v", b)
		}
	})
}

// TestDrainDeadline ends the players of a backend that is drained when the
// deadline has passed, for that reason, and no others.
func TestDrainDeadline(t *testing.T) {
	blue, green := newServers(t, 1), newServers(t, 2)
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, blue.config(addr, kit.M{"drain_deadline": "1s"}), kit.Options{})
	early := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: players, Flows: players, Rate: 400, Patience: time.Second})
	early.Round(t)
	green.add(t, p)
	blue.set(t, p, "draining")
	late := play(t, addr)
	kit.Settles(t, "flows that have ended by a drain", 2*players, func() float64 { return p.Metric("flows_closed_total", "reason", "drain") })
	blue.each(func(pool, addr string) {
		kit.Settles(t, "flows of the old backend", 0, func() float64 { return p.Metric("backend_active_sessions", "pool", pool, "backend", addr) })
	})
	perfect(t, "who came after", late)
	kit.Eventually(t, "all who came before have noticed", func() bool { r := early.Report(); return r.Reset == players && r.Moved == players })
	r := early.Stop()
	if r.Reset != players || r.Moved != players {
		t.Errorf("%d connections were closed and %d sessions went elsewhere, want %d each: %v", r.Reset, r.Moved, players, &r)
	}
	if n := p.Metric("flows_closed_total", "reason", "drain"); n != 2*players {
		t.Errorf("%v flows have ended by a drain", n)
	}
}

// TestDrainInstance takes an instance out of rotation: it says so and goes on
// serving, over a reload and a restart.
func TestDrainInstance(t *testing.T) {
	blue := newServers(t, 1)
	addr := kit.Local(kit.Port(t))
	config := blue.config(addr, nil)
	p := kit.Start(t, config, kit.Options{})
	early := play(t, addr)
	call(t, p, "POST", "/admin/drain", "", http.StatusNoContent)
	drained := func(when string) {
		t.Helper()
		status, body := p.Get("/readyz")
		if status != http.StatusServiceUnavailable || !strings.Contains(body, `"draining"`) || !strings.Contains(body, "drained by admin-api at ") {
			t.Errorf("%s: /readyz says %d %s", when, status, body)
		}
		if n := p.Metric("instance_drained"); n != 1 {
			t.Errorf("%s: wayhouse_instance_drained is %v", when, n)
		}
	}
	drained("at once")
	perfect(t, "who comes all the same", play(t, addr))
	p.MustLoad(kit.With(config, kit.M{"storage": kit.M{"module": "file_system", "root": p.Dir + "/storage"}}))
	drained("after a reload")
	early.Round(t)
	perfect(t, "who was there", early)
	restart(t, p, syscall.SIGTERM)
	drained("after a restart")
	call(t, p, "POST", "/admin/undrain", "", http.StatusNoContent)
	if n := p.Metric("instance_drained"); n != 0 {
		t.Errorf("wayhouse_instance_drained is %v", n)
	}
	restart(t, p, syscall.SIGTERM)
	if status, body := p.Get("/readyz"); status != http.StatusOK {
		t.Errorf("no longer drained: %d %s", status, body)
	}
}

// TestStopWithAThousand ends a process that has a thousand flows: they get the
// grace, and it exits well.
func TestStopWithAThousand(t *testing.T) {
	const grace = 3 * time.Second
	blue := newServers(t, 1)
	addr := kit.Local(kit.Port(t))
	config := blue.config(addr, nil)
	config["apps"].(kit.M)["wayhouse"].(kit.M)["shutdown_grace"] = grace.String()
	p := kit.Start(t, config, kit.Options{Plain: true})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: 500, Flows: 500, Rate: 1000, Patience: time.Second})
	kit.Settles(t, "flows", 1000, func() float64 {
		return p.Metric("active_connections") + p.Metric("active_udp_sessions")
	})
	began := time.Now()
	p.Signal(syscall.SIGTERM)
	code := p.Exit()
	took := time.Since(began)
	if code != 0 || took < grace {
		t.Errorf("it has ended after %v with %d, want 0 after %v", took, code, grace)
	}
	t.Logf("it has ended after %v", took)
	if log := p.Log(); !strings.Contains(log, `"msg":"the grace has passed; closing what is left","flows":1000`) {
		t.Errorf("the log does not tell of the flows that were left")
	}
	load.Stop()
}
