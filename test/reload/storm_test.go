package reload

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// site is a config with a loaded listener of TCP and of UDP, an HTTP site and
// whatever the kinds of storm change of it.
type site struct {
	tcp, udp, http, extra int // ports
	tcpBackends           []string
	udpBackends           []string
}

func newSite(t *testing.T) *site {
	s := &site{tcp: kit.Port(t), udp: kit.Port(t), http: kit.Port(t), extra: kit.Ports(t, 20)}
	for i := range 2 {
		s.tcpBackends = append(s.tcpBackends, kit.NewTCPBackend(t, uint16(i+1), "127.0.0.1:0").Addr)
		s.udpBackends = append(s.udpBackends, kit.NewUDPBackend(t, uint16(i+1), "127.0.0.1:0").Addr)
	}
	return s
}

// config is the n-th config of a storm of the kinds named.
func (s *site) config(n int, kinds string) kit.M {
	text := "hello"
	listeners := kit.M{
		"game-tcp": kit.ToPool("tcp", fmt.Sprintf("tcp/127.0.0.1:%d", s.tcp)),
		"game-udp": kit.ToPool("udp", fmt.Sprintf("udp/127.0.0.1:%d", s.udp)),
	}
	pools := kit.M{"tcp": kit.Pool(s.tcpBackends...), "udp": kit.Pool(s.udpBackends...)}
	if strings.Contains(kinds, "site") {
		text = fmt.Sprintf("hello %d", n)
	}
	if strings.Contains(kinds, "others") {
		for i := range n % 4 {
			port := s.extra + (n+i*3)%20
			listeners[fmt.Sprintf("other-%d", i)] = kit.ToPool("tcp", fmt.Sprintf("tcp/127.0.0.1:%d", port), fmt.Sprintf("udp/127.0.0.1:%d", port))
		}
		if n%2 == 1 {
			pools["unused"] = kit.Pool(s.tcpBackends[0])
		}
	}
	if strings.Contains(kinds, "this") {
		// The routes change, and the pool loses and gains a backend.
		for i, l := range []string{"game-tcp", "game-udp"} {
			network := []string{"tcp", "udp"}[i]
			bind := []string{fmt.Sprintf("%s/127.0.0.1:%d", network, []int{s.tcp, s.udp}[i])}
			pool := kit.M{"handler": "pool", "pool": network}
			switch n % 3 {
			case 1:
				listeners[l] = kit.Listener(bind, kit.Match(kit.M{"regexp": kit.M{"pattern": "^never"}}, kit.M{"handler": "echo"}), kit.Route(pool))
			case 2:
				listeners[l] = kit.Listener(bind, kit.Route(kit.With(kit.Pool(s.tcpBackends[n%2], s.udpBackends[n%2]), kit.M{"handler": "pool"})))
			}
		}
		pools["tcp"] = kit.With(kit.Pool(s.tcpBackends[:1+n/2%2]...), kit.M{"balancer": kit.M{"policy": []string{"round_robin", "least_conn", "first_available"}[n%3]}})
		pools["udp"] = kit.With(kit.Pool(s.udpBackends[:1+n/2%2]...), kit.M{"idle_timeout": fmt.Sprintf("%ds", 90+n)})
	}
	c := kit.App(listeners, pools)
	c["apps"].(kit.M)["http"] = kit.M{"servers": kit.M{"s": kit.M{
		"listen": kit.A{fmt.Sprintf("127.0.0.1:%d", s.http)},
		"routes": kit.A{kit.M{"handle": kit.A{kit.M{"handler": "static_response", "body": text}}}},
	}}}
	return c
}

func TestStorm(t *testing.T) {
	for _, kinds := range []string{"site", "others", "this", "site others this"} {
		t.Run(kinds, func(t *testing.T) { storm(t, kinds) })
	}
}

// storm reloads a config under load and then looks for anything that it cost.
func storm(t *testing.T, kinds string) {
	flows, reloads, rate := 1000, kit.Scaled(25, 300), 10000 // 300: five a second for a minute
	if strings.Count(kinds, " ") == 2 {                      // all at once: the whole promise in every run
		reloads = max(reloads, 100)
	}
	if kit.Race {
		rate = 2500
	}
	s := newSite(t)
	p := kit.Start(t, s.config(0, kinds), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{
		TCP: kit.Local(s.tcp), UDP: kit.Local(s.udp), Conns: flows, Flows: flows, Rate: rate, Body: 40,
	})
	loads, running := 0, s.config(0, kinds)
	reload := func(n int) {
		c := s.config(n, kinds)
		p.MustLoad(c)
		if !reflect.DeepEqual(c, running) { // Caddy does nothing for the config it has
			loads, running = loads+1, c
		}
	}
	before := upstreams(p)
	if len(before) != 2*flows {
		t.Errorf("GET /sessions has %d flows before the storm, want %d", len(before), 2*flows)
	}
	for n := range 5 { // what a process keeps after its first reloads is no leak
		reload(n)
		load.Go(t, rate/20)
	}
	reload(0)
	load.Round(t)
	first := resting(p)
	for n := range reloads {
		reload(n + 1)
		load.Go(t, rate/20)
	}
	reload(0)
	load.Round(t)
	for client, upstream := range upstreams(p) {
		if before[client] != upstream {
			t.Fatalf("the backend sees %s at %s, before the storm at %s", client, upstream, before[client])
		}
	}
	// What a reload leaves behind may take a while to go.
	last := resting(p)
	flat := kit.Poll(kit.Long, func() bool {
		last = resting(p)
		return last.Files <= first.Files+2 && last.Goroutines <= first.Goroutines+2
	})
	t.Logf("%d reloads; before %+v, after %+v", reloads, first, last)
	if !flat {
		t.Errorf("the process held %+v before %d reloads and %+v after", first, reloads, last)
	}
	if grown := last.RSS - first.RSS; grown > memorySlack(first.RSS) {
		t.Errorf("the process has grown by %d KiB from %d KiB", grown>>10, first.RSS>>10)
	}
	if r := load.Stop(); !r.Perfect() {
		t.Errorf("the load noticed: %v", &r)
	}
	if got := p.Metric("config_reload_total", "result", "ok"); got != float64(loads) {
		t.Errorf("config_reload_total is %v, want %v", got, loads)
	}
	if got := p.Metric("config_reload_total", "result", "error"); got != 0 {
		t.Errorf("config_reload_total of errors is %v", got)
	}
	if got := p.Metric("datagrams_dropped_total"); got != 0 {
		t.Errorf("datagrams_dropped_total is %v", got)
	}
}

// memorySlack is how much the resident memory may differ between two moments
// with the same flows: heaps breathe, and the race detector's shadow grows.
func memorySlack(rss int) int {
	if kit.Race {
		return rss
	}
	return max(rss/4, 16<<20)
}

// resting is the least that the process holds in a number of looks: between
// two of its own moments of work.
func resting(p *kit.Process) kit.Usage {
	p.Collect()
	least := p.Usage()
	for range 20 {
		u := p.Usage()
		least.Files, least.Goroutines, least.RSS = min(least.Files, u.Files), min(least.Goroutines, u.Goroutines), min(least.RSS, u.RSS)
	}
	return least
}

// session is a flow as GET /sessions tells it.
type session struct {
	ID            string         `json:"id"`
	Proto         string         `json:"proto"`
	Listener      string         `json:"listener"`
	Peer          string         `json:"peer"`
	Pool          string         `json:"pool"`
	Backend       string         `json:"backend"`
	UpstreamLocal netip.AddrPort `json:"upstream_local"`
}

// upstreams are the addresses that backends see clients at, by protocol and
// client.
func upstreams(p *kit.Process) map[string]string {
	var list []session
	p.JSON("/sessions", &list)
	m := make(map[string]string)
	for _, s := range list {
		m[s.Proto+" "+s.Peer] = s.UpstreamLocal.String() + " to " + s.Backend
	}
	return m
}
