package reload

import (
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestDoors changes the config by each way there is, and not by one that cannot
// run.
func TestDoors(t *testing.T) {
	b := newBoth(t)
	port, extra := kit.Port(t), kit.Ports(t, 4)
	config := func(n int) kit.M {
		return b.config(map[string][]string{"a": {kit.Local(port)}, "b": {kit.Local(extra + n)}})
	}
	p := kit.Prepare(t, config(0), kit.Options{})
	start(p)
	load := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(port), UDP: kit.Local(port), Conns: 20, Flows: 20, Rate: 400})
	answers := func(n int) {
		t.Helper()
		kit.Eventually(t, fmt.Sprintf("config %d runs", n), func() bool { return listening(t, p, extra+n) != "" })
		refusesTCP(t, extra+(n+3)%4)
	}
	answers(0)

	p.WriteConfig(config(1))
	p.Signal(syscall.SIGHUP)
	answers(1)

	p.WriteConfig(kit.App(kit.M{"a": kit.ToPool("nobody", "tcp/"+kit.Local(port))}, kit.M{}))
	p.Signal(syscall.SIGHUP)
	kit.Settles(t, "the count of refused loads", 1.0, func() float64 { return p.Metric("config_reload_total", "result", "error") })
	answers(1)
	if out, err := exec.Command(kit.Binary(t, ""), "reload", "--config", p.Config, "--address", p.Admin).CombinedOutput(); err == nil || !strings.Contains(string(out), "nobody") {
		t.Errorf("reload of a config that cannot run: %v: %s", err, out)
	}
	answers(1)

	p.WriteConfig(config(2))
	out, err := exec.Command(kit.Binary(t, ""), "reload", "--config", p.Config, "--address", p.Admin).CombinedOutput()
	if err != nil {
		t.Fatalf("reload: %v: %s", err, out)
	}
	answers(2)

	if status, body := p.Do("PATCH", "/config/apps/wayhouse/listeners/b-tcp/bind/0", fmt.Appendf(nil, "%q", "tcp/"+kit.Local(extra+3))); status != 200 {
		t.Fatalf("PATCH of a part of the config: %d %s", status, body)
	}
	answers(3)

	p.WriteConfig(config(0)) // although another config was pushed since
	p.Signal(syscall.SIGHUP)
	answers(0)
	if r := load.Stop(); !r.Perfect() {
		t.Errorf("the load noticed: %v", &r)
	}
}

// TestWatch changes the config file of a process that watches it, also to one
// that cannot run.
func TestWatch(t *testing.T) {
	b := newBoth(t)
	port, extra := kit.Port(t), kit.Ports(t, 3)
	config := func(n int) kit.M {
		return b.config(map[string][]string{"a": {kit.Local(port)}, "b": {kit.Local(extra + n)}})
	}
	p := kit.Prepare(t, config(0), kit.Options{})
	start(p, "--watch")
	load := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(port), UDP: kit.Local(port), Conns: 20, Flows: 20, Rate: 400})
	p.WriteConfig(config(1))
	kit.Eventually(t, "the changed file is loaded", func() bool { return listening(t, p, extra+1) != "" })
	p.WriteConfig(kit.App(kit.M{"a": kit.ToPool("nobody", "tcp/"+kit.Local(port))}, kit.M{}))
	kit.Settles(t, "the count of refused loads", 1.0, func() float64 { return p.Metric("config_reload_total", "result", "error") })
	p.WriteConfig(config(2))
	kit.Eventually(t, "the file that is right again is loaded", func() bool { return listening(t, p, extra+2) != "" })
	if r := load.Stop(); !r.Perfect() {
		t.Errorf("the load noticed: %v", &r)
	}
}

func start(p *kit.Process, more ...string) {
	p.Begin(append([]string{"run", "--config", p.Config}, more...)...)
	p.WaitReady()
}

// TestConcurrentLoads has many writers through three doors. The last load that
// was taken is the one that runs.
func TestConcurrentLoads(t *testing.T) {
	b := newBoth(t)
	port := kit.Port(t)
	config := func(writer, n int) kit.M {
		pools := kit.M{"tcp": kit.Pool(b.tcp.Addr), "udp": kit.Pool(b.udp.Addr), fmt.Sprintf("of-%d-%d", writer, n): kit.Pool(b.tcp.Addr)}
		return kit.App(kit.M{
			"a-tcp": kit.ToPool("tcp", "tcp/"+kit.Local(port)), "a-udp": kit.ToPool("udp", "udp/"+kit.Local(port)),
		}, pools)
	}
	p := kit.Start(t, config(0, 0), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: kit.Local(port), UDP: kit.Local(port), Conns: 20, Flows: 20, Rate: 400})
	writers, each := kit.Scaled(6, 10), kit.Scaled(10, 100)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for n := range each {
				switch w {
				case 0: // the file: what it holds is config 0-0
					p.Signal(syscall.SIGHUP)
				case 1: // a part of the config
					p.Do("PATCH", "/config/apps/wayhouse/shutdown_grace", fmt.Appendf(nil, `"%ds"`, 1+n%3))
				default: // an endpoint that moves may drop a request unanswered
					p.Load(config(w, n))
				}
			}
		})
	}
	wg.Wait()
	p.MustLoad(config(9, 9))
	kit.Settles(t, "the pool of the last load is there", true, func() bool {
		status, _ := p.Get("/pools/of-9-9")
		if status != 200 { // a SIGHUP may have been served last
			p.Load(config(9, 9))
		}
		return status == 200
	})
	if _, body := p.Get("/config/apps/wayhouse/pools"); !strings.Contains(body, "of-9-9") || strings.Count(body, "of-") != 1 {
		t.Errorf("the config that Caddy has is not the one loaded last: %s", body)
	}
	if _, body := p.Get("/pools"); strings.Count(body, `"name":"of-`) != 1 {
		t.Errorf("pools of other configs still run: %s", body)
	}
	if now, _ := applied(t, p); now != hashOf(t, config(9, 9)) {
		t.Errorf("the hash of the running config is %s", now)
	}
	if _, refused := counted(p); refused != 0 {
		t.Errorf("%d loads were counted as refused", refused)
	}
	load.Round(t)
	if r := load.Stop(); !r.Perfect() {
		t.Errorf("the load noticed: %v", &r)
	}
}
