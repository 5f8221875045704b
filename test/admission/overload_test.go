package admission

import (
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/internal/ticket"
)

// state is what the process says of its level.
func state(p *kit.Process) (s struct {
	Level  int
	Reason string
	Use    int `json:"use_percent"`
	Auto   bool
}) {
	p.JSON("/admin/overload", &s)
	return s
}

func becomes(t *testing.T, p *kit.Process, level int, reason string) {
	t.Helper()
	kit.Settles(t, "the level", fmt.Sprint(level, reason), func() string { s := state(p); return fmt.Sprint(s.Level, s.Reason) })
	if m := p.Metrics(); m.Sum("overload_level") != float64(level) || m.Sum("overload_reason", "reason", reason) != 1 {
		t.Errorf("the metrics say %v, and of %s %v", m.Sum("overload_level"), reason, m.Sum("overload_reason", "reason", reason))
	}
}

// TestLevelFollowsFlows fills what the limits allow and empties it again.
func TestLevelFollowsFlows(t *testing.T) {
	for network, limit := range map[string]string{"tcp": "max_connections", "udp": "max_udp_sessions"} {
		t.Run(network, func(t *testing.T) {
			reason := map[string]string{"tcp": "connections", "udp": "sessions"}[network]
			addr := kit.Local(kit.Port(t))
			p := kit.Start(t, kit.App(kit.M{"l": kit.ToPool(network, network+"/"+addr)}, game(t),
				kit.M{"limits": kit.M{limit: 10, "overload": kit.M{"level1_at": 30, "level2_at": 60, "release": 10, "hold": "0s"}}}), kit.Options{})
			var clients []*client
			open := func(n int) {
				t.Helper()
				for range n {
					c := dial(t, network, "127.0.0.1", addr)
					c.served()
					clients = append(clients, c)
				}
			}
			shut := func(n int) {
				for _, c := range clients[:n] {
					if network == "udp" {
						closeSession(t, p, c)
					}
					c.Close()
				}
				clients = clients[n:]
			}
			open(2)
			becomes(t, p, 0, "none")
			open(2)
			becomes(t, p, 1, reason)
			stranger := dial(t, network, "127.0.0.2", addr) // whom nobody can recognise here
			stranger.ask()
			kit.Settles(t, "the count of overload", 1.0, func() float64 { return refusals(p, "l", "overload") })
			stranger.silence()
			open(3)
			becomes(t, p, 2, reason)
			shut(3)
			becomes(t, p, 1, reason)
			shut(3)
			becomes(t, p, 0, "none")
			dial(t, network, "127.0.0.2", addr).served()
		})
	}
}

// TestLevelFollowsDescriptors takes the file descriptors of the process away, and
// gives them back.
func TestLevelFollowsDescriptors(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"l": kit.ToPool("tcp", "tcp/"+addr)}, game(t),
		kit.M{"limits": kit.M{"overload": kit.M{"level1_at": 50, "level2_at": 100, "hold": "0s"}}}), kit.Options{})
	becomes(t, p, 0, "none")
	n := uint64(p.Files())
	p.LimitFiles(n + n/2)
	becomes(t, p, 1, "descriptors")
	p.LimitFiles(20 * n)
	becomes(t, p, 0, "none")
}

// TestLevelFollowsMemory runs the process in a control group whose limit it
// nears.
func TestLevelFollowsMemory(t *testing.T) {
	dir, limit := controlGroup(t)
	config := kit.App(kit.M{"l": kit.ToPool("tcp", "tcp/"+kit.Local(kit.Port(t)))}, game(t),
		kit.M{"limits": kit.M{"overload": kit.M{"level1_at": 3, "level2_at": 100, "release": 1, "hold": "0s"}}})
	if err := os.WriteFile(filepath.Join(dir, limit), []byte("1073741824"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := kit.Start(t, config, kit.Options{Wrap: []string{"sh", "-c", `echo $$ > ` + dir + `/cgroup.procs && exec "$@"`, "sh"}})
	becomes(t, p, 1, "memory")
	if s := state(p); s.Use < p.RSS()*100/(1<<30)-2 {
		t.Errorf("%d %% are in use, of 1 GiB %d bytes", s.Use, p.RSS())
	}
}

// controlGroup makes one for memory, of either version.
func controlGroup(t *testing.T) (dir, limit string) {
	t.Helper()
	var err error
	for _, v := range []struct{ mount, limit string }{{"/sys/fs/cgroup", "memory.max"}, {"/sys/fs/cgroup/memory", "memory.limit_in_bytes"}} {
		dir = filepath.Join(v.mount, fmt.Sprintf("wh-test-%d", os.Getpid()))
		if err = os.Mkdir(dir, 0o700); err != nil {
			continue
		}
		t.Cleanup(func() { os.Remove(dir) })
		if _, err = os.Stat(filepath.Join(dir, v.limit)); err == nil {
			return dir, v.limit
		}
	}
	t.Skipf("no right to make a control group with a memory limit: %v", err)
	return "", ""
}

// TestTicketsUnderOverload: at level 1 a ticket lets a stranger in, at level 2
// nothing does. Who says nothing is nobody that anyone knows, even where a
// matcher takes flows of few bytes.
func TestTicketsUnderOverload(t *testing.T) {
	key := []byte("0123456789abcdef0123456789abcdef")
	good, err := ticket.Mint(key, "p", time.Now().Add(time.Hour), netip.Addr{})
	if err != nil {
		t.Fatal(err)
	}
	bad := append([]byte(nil), good...)
	bad[len(bad)-1]++
	for _, network := range networks {
		t.Run(network, func(t *testing.T) {
			addr, short := kit.Local(kit.Port(t)), kit.Local(kit.Port(t))
			toPool := kit.M{"handler": "pool", "pool": network}
			peek := kit.M{"peek": kit.M{"timeout": "100ms"}}
			p := kit.Start(t, kit.App(kit.M{
				"tickets": kit.With(kit.Listener([]string{network + "/" + addr}, kit.Match(kit.M{"ticket": kit.M{
					"keys": kit.A{"hex:" + hex.EncodeToString(key)}, "pool": "p", "offset": ticketAt}}, toPool), kit.Route(toPool)), peek),
				"short": kit.With(kit.Listener([]string{network + "/" + short}, kit.Match(kit.M{"first_bytes": kit.M{"length": kit.M{"min": 0, "max": 1000}}}, toPool)), peek),
			}, game(t)), kit.Options{})
			set("1")(t, p)
			shows := func(b []byte, from string) *client {
				c := dial(t, network, from, addr)
				c.ticket = b
				return c
			}
			shows(good, "127.0.0.2").served()
			refused := func(listener string, c *client, want float64) {
				t.Helper()
				kit.Settles(t, "the count of overload", want, func() float64 { return refusals(p, listener, "overload") })
				c.silence()
			}
			c := shows(bad, "127.0.0.3")
			c.ask()
			refused("tickets", c, 1)
			c = shows(nil, "127.0.0.3")
			c.ask()
			refused("tickets", c, 2)
			if network == "tcp" {
				refused("tickets", shows(nil, "127.0.0.3"), 3)
				refused("short", dial(t, network, "127.0.0.4", short), 1)
				explains(t, p, "short", "127.0.0.4:9", `[]`, `"what":"limit"`)
			}
			dial(t, network, "127.0.0.5", short).served()
			set("2")(t, p)
			before := refusals(p, "tickets", "overload")
			c = shows(good, "127.0.0.6")
			c.ask()
			refused("tickets", c, before+1)
			shows(nil, "127.0.0.2").served() // who comes back needs none
		})
	}
}

// TestFiltersInOrder: the list of a config is the order in which filters are
// asked, and the first that refuses is the last.
func TestFiltersInOrder(t *testing.T) {
	acl := kit.M{"filter": "acl", "deny": kit.A{"127.0.0.3"}}
	rate := kit.M{"filter": "rate_limit", "per_ip": kit.M{"rate": 1, "burst": 1}}
	for want, list := range map[string]kit.A{"acl": {acl, rate}, "rate_ip": {rate, acl}} {
		t.Run(want, func(t *testing.T) {
			addr := kit.Local(kit.Port(t))
			p := kit.Start(t, kit.App(kit.M{"l": kit.With(kit.ToPool("udp", "udp/"+addr), kit.M{"filters": list})}, game(t)), kit.Options{})
			c := dial(t, "udp", "127.0.0.3", addr)
			for range 20 { // the first takes a token where the bucket comes first
				c.ask()
			}
			kit.Settles(t, "all that was refused", 20.0, func() float64 { return refusals(p, "l", "acl") + refusals(p, "l", "rate_ip") })
			if n := refusals(p, "l", want); n < 15 {
				t.Errorf("%v of 20 were refused by %s", n, want)
			}
		})
	}
}

// TestListOverRestart: what a URL has said holds when the process starts again
// and nobody answers there.
func TestListOverRestart(t *testing.T) {
	feed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("127.0.0.3\n")) }))
	defer feed.Close()
	addr := kit.Local(kit.Port(t))
	config := kit.App(kit.M{"l": kit.With(kit.ToPool("tcp", "tcp/"+addr), kit.M{"filters": kit.A{kit.M{"filter": "acl", "urls": kit.A{feed.URL + "/list"}}}})}, game(t))
	p := kit.Start(t, config, kit.Options{})
	holds := func(count float64) {
		t.Helper()
		c := dial(t, "tcp", "127.0.0.3", addr)
		kit.Settles(t, "the count of acl", count, func() float64 { return refusals(p, "l", "acl") })
		c.silence()
		dial(t, "tcp", "127.0.0.2", addr).served()
	}
	holds(1)
	p.Signal(syscall.SIGTERM)
	if code := p.Exit(); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	feed.Close()
	p.Begin()
	p.WaitReady()
	holds(1)
	if !strings.Contains(p.Log(), "list of networks as it was last known") || !strings.Contains(p.Log(), "list of networks cannot be fetched; the one before stays") {
		t.Error("the log tells neither that the list is an old one nor why")
	}
	// Another list, of which nothing is known, is not taken for an empty one.
	config["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"].(kit.M)["l"].(kit.M)["filters"] = kit.A{kit.M{"filter": "acl", "urls": kit.A{feed.URL + "/other"}}}
	if err := p.Load(config); err == nil || !strings.Contains(err.Error(), "listeners.l.filters[0]: urls[0]: "+feed.URL+"/other cannot be fetched, and no earlier answer is kept") {
		t.Errorf("the load of another list: %v", err)
	}
	holds(2)
}
