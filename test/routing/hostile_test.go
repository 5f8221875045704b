package routing

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// hostile is a WebAssembly module that means harm.
func hostile(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "modules", "sniff", "wasm", "testdata", "hostile", name+".wasm"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestSpinners has sixteen clients at a time send what makes a sniffer run for
// ever (W09). The breaker opens: the sniffer is called no more but for a probe
// now and then, nobody gets past it to a laxer route, and other listeners go on
// as ever. When clients send something else, a probe finds the sniffer well.
func TestSpinners(t *testing.T) {
	town := newTown(t, "known", "lax", "free")
	spun, btcp, budp := bind(t)
	free, ftcp, fudp := bind(t)
	dir := t.TempDir()
	drop(t, dir, "moody", hostile(t, "moody"))
	ok := kit.M{"sniffer": kit.M{"name": "moody", "key": kit.A{"ok"}}}
	p := kit.Start(t, kit.App(kit.M{
		"tcp":      kit.Listener([]string{btcp}, kit.Match(ok, tcp("known")), kit.Route(tcp("lax"))),
		"udp":      kit.Listener([]string{budp}, kit.Match(ok, udp("known")), kit.Route(udp("lax"))),
		"free-tcp": kit.Listener([]string{ftcp}, kit.Route(tcp("free"))),
		"free-udp": kit.Listener([]string{fudp}, kit.Route(udp("free"))),
	}, town.pools(), kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": dir, "call_timeout": fmt.Sprintf("%dms", kit.Scaled(50, 20))}}}), kit.Options{})
	calls := func(result string) float64 {
		return p.Metric("sniffer_calls_total", "name", "moody", "result", result)
	}
	broken := func() float64 { return p.Metric("sniffer_breaker_open", "name", "moody") }
	settled := func(what string) { // on a busy machine the time of a call is short
		t.Helper()
		kit.Eventually(t, what, func() bool {
			c := dial(t, spun)
			c.send([]byte("hello"))
			name, err := c.where()
			if err != nil || name != "known" && name != nowhere {
				t.Fatalf("%s: went to %s, %v", what, name, err)
			}
			return name == "known"
		})
	}
	settled("before them")
	before, early := p.Usage(), calls("timeout")
	var sent atomic.Int64
	times := 0
	newOthers(t, free, "free", nil).notice(t, kit.Scaled(100, 2500), "sixteen spinners", 2*time.Millisecond, func(ask func()) {
		times++
		stop := make(chan struct{})
		pace := time.NewTicker(2 * time.Millisecond)
		defer pace.Stop()
		var wg sync.WaitGroup
		for i := range 32 { // a half of them at each listener
			wg.Go(func() {
				for {
					c := call(t, spun)
					if i%2 == 0 {
						c.send(t, []byte("Loop"))
					} else {
						goes(t, "a spinner", spun, nowhere, []byte("Loop"))
					}
					if err := c.silent(); err != nil {
						t.Errorf("a spinner has heard something: %v", err)
					}
					c.c.Close()
					sent.Add(1)
					select {
					case <-stop:
						return
					case <-pace.C:
					}
				}
			})
		}
		kit.Settles(t, "wayhouse_sniffer_breaker_open", 1.0, broken)
		ask()
		close(stop)
		wg.Wait()
	})
	usage := p.Usage()
	late, refused := calls("timeout")-early, calls("broken")+calls("busy")
	said := fmt.Sprintf("%d flows that spin: %v calls ran out of time, %v were not made; %d KiB more than before", sent.Load(), late, refused, (usage.RSS-before.RSS)>>10)
	t.Log(said)
	// Five open the breaker, as many may be under way as there are slots, and the
	// probes are a second apart at least and then ever more.
	if most := float64(times * (5 + runtime.NumCPU() + 8)); late < 5 || late > most || refused == 0 {
		t.Errorf("%s; want from 5 to %v and the rest not made", said, most)
	}
	if !kit.Race && usage.RSS-before.RSS > 256<<20 {
		t.Error(said)
	}
	settled("after them")
	kit.Settles(t, "wayhouse_sniffer_breaker_open", 0.0, broken)
	for _, line := range []string{"sniffer fails too often and is not called for a while", "sniffer works again"} {
		if !strings.Contains(p.Log(), line) {
			t.Errorf("the log does not say: %s", line)
		}
	}
	if n := town["lax"].heard(); n != 0 {
		t.Errorf("%d flows got past the sniffer", n)
	}
}

// TestClaimedHost has a sniffer name a host that is another's: the routes by
// which that one is reached ask their own sniffer, or read the name themselves.
func TestClaimedHost(t *testing.T) {
	town := newTown(t, "mine", "theirs", "rest")
	addr, btcp, budp := bind(t)
	dir := t.TempDir()
	drop(t, dir, "theirs", guest(t, "ok-host")) // recognises what begins with HOST:
	drop(t, dir, "mine", hostile(t, "echo-hint"))
	by := func(sniffer, host string) kit.M { return kit.M{"sniffer": kit.M{"name": sniffer, "host": kit.A{host}}} }
	routes := func(to func(string) kit.M) []kit.M {
		return []kit.M{
			kit.Match(by("theirs", ".theirs.example"), to("theirs")),
			kit.Match(kit.M{"sni": kit.M{"host": kit.A{".theirs.example"}}}, to("theirs")),
			kit.Match(by("mine", ".mine.example"), to("mine")),
			kit.Route(to("rest")),
		}
	}
	kit.Start(t, kit.App(kit.M{"tcp": kit.Listener([]string{btcp}, routes(tcp)...), "udp": kit.Listener([]string{budp}, routes(udp)...)},
		town.pools(), kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": dir, "call_timeout": "20s"}}}), kit.Options{})
	claim := func(host string) []byte { return append([]byte{2, byte(len(host)), 0}, host...) }
	for what, tc := range map[string]struct {
		first []byte
		want  string
	}{
		"their own client":             {[]byte("HOST:play.theirs.example"), "theirs"},
		"a host of mine":               {claim("play.mine.example"), "mine"},
		"a host of mine, in capitals":  {claim("PLAY.MINE.EXAMPLE."), "mine"},
		"a host of theirs":             {claim("play.theirs.example"), "rest"},
		"a pattern of theirs":          {claim("*.theirs.example"), "rest"},
		"theirs behind a NUL":          {claim("play.mine.example\x00.theirs.example"), "rest"},
		"theirs on another line":       {claim("play.mine.example\r\nplay.theirs.example"), "rest"},
		"a host of mine before theirs": {claim("play.mine.example.theirs.example"), "rest"},
	} {
		goes(t, what, addr, tc.want, tc.first)
		reaches(t, what, addr, tc.want, tc.first)
	}
}

// TestNothingIsRemembered has a sniffer count its calls (W08): each connection
// and each session is the first that it sees.
func TestNothingIsRemembered(t *testing.T) {
	town := newTown(t, "first", "again")
	addr, btcp, budp := bind(t)
	dir := t.TempDir()
	drop(t, dir, "state", guest(t, "state"))
	first := kit.M{"sniffer": kit.M{"name": "state", "key": kit.A{"1"}}}
	kit.Start(t, kit.App(kit.M{
		"tcp": kit.Listener([]string{btcp}, kit.Match(first, tcp("first")), kit.Route(tcp("again"))),
		"udp": kit.Listener([]string{budp}, kit.Match(first, udp("first")), kit.Route(udp("again"))),
	}, town.pools(), kit.M{"sniffers": kit.M{"wasm": kit.M{"dir": dir, "call_timeout": "20s"}}}), kit.Options{})
	for i := range kit.Scaled(20, 2000) {
		goes(t, fmt.Sprint("connection ", i), addr, "first", []byte("x"))
		reaches(t, fmt.Sprint("session ", i), addr, "first", []byte("x"))
	}
}
