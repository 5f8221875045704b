package discovery

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// cpu is the time that a process has had, in user and kernel mode.
func cpu(t *testing.T, p *kit.Process) time.Duration {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(after)
	user, err1 := strconv.Atoi(f[11])
	kernel, err2 := strconv.Atoi(f[12])
	if err1 != nil || err2 != nil {
		t.Fatalf("no times in %s", b)
	}
	return time.Duration(user+kernel) * time.Second / 100
}

// TestManyBackends changes one of ten thousand backends ten times a second,
// while sessions run and new ones come. What that costs is told, not tested.
func TestManyBackends(t *testing.T) {
	const many = 10_000
	echo := kit.NewTCPBackend(t, 1, "0.0.0.0:0")
	port := portOf(echo.Addr)
	path := filepath.Join(t.TempDir(), "backends.json")
	list := make([]string, many)
	for i := range list {
		list[i] = fmt.Sprintf("127.9.%d.%d:%s", i>>8, i&255, port)
	}
	write := func(n int) {
		list[n%many] = fmt.Sprintf("127.10.%d.%d:%s", n>>8&255, n&255, port)
		b, err := json.Marshal(list)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+".new", b, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	for name, check := range map[string]kit.M{
		"none":        {"check": "none"},
		"tcp_connect": {"check": "tcp_connect", "interval": "2s"},
	} {
		t.Run(name, func(t *testing.T) {
			write(0)
			listen := kit.Local(kit.Port(t))
			p := kit.Start(t, kit.App(kit.M{"game": kit.ToPool("match", "tcp/"+listen)}, kit.M{"match": kit.M{
				"source": kit.M{"source": "file", "path": path}, "health": check, "balancer": kit.M{"policy": "weighted"},
			}}), kit.Options{})
			size := func() int { return int(p.Metric("discovery_backends", "pool", "match")) }
			kit.Settles(t, "the number of backends", many, size)
			load := kit.StartLoad(t, kit.LoadOptions{TCP: listen, Conns: 10, Rate: 100})
			seconds := kit.Scaled(2, 30)
			used, began := cpu(t, p), time.Now()
			tick := time.NewTicker(100 * time.Millisecond)
			defer tick.Stop()
			for n := 1; n <= 10*seconds; n++ {
				<-tick.C
				write(n)
				if n%10 == 0 { // and somebody new
					fresh := kit.StartLoad(t, kit.LoadOptions{TCP: listen, Conns: 1})
					fresh.Round(t)
					if r := fresh.Stop(); !r.Perfect() {
						t.Errorf("a new connection noticed: %v", &r)
					}
				}
			}
			used, took := cpu(t, p)-used, time.Since(began)
			t.Logf("%v of CPU in %v: %.0f %% of a core", used, took.Round(time.Second), 100*used.Seconds()/took.Seconds())
			last := strings.TrimSuffix(list[10*seconds], ":"+port)
			kit.Eventually(t, "the last change is in the pool", func() bool {
				_, body := p.Get("/pools/match?format=text")
				return strings.Contains(body, last+":")
			})
			if r := load.Stop(); !r.Perfect() {
				t.Errorf("a connection noticed: %v", &r)
			}
		})
	}
}
