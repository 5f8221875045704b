package pool

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/health"
)

// held is a check that the test answers.
type held struct {
	health.Settings
	mu   sync.Mutex
	sick map[netip.AddrPort]error
}

func (h *held) Check(_ context.Context, to netip.AddrPort) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sick[to]
}

func (h *held) set(to string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sick == nil {
		h.sick = make(map[netip.AddrPort]error)
	}
	h.sick[netip.MustParseAddrPort(to)] = err
}

var errSick = errors.New("sick")

// event is what a watcher has heard, and when.
type event struct {
	at   time.Duration
	what string
}

type watcher struct {
	begin   time.Time
	mu      sync.Mutex
	returns bool // those are heard too
	heard   []event
}

func (w *watcher) add(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.heard = append(w.heard, event{time.Since(w.begin), fmt.Sprintf(format, args...)})
}

func (w *watcher) BackendDown(_ *Pool, addr netip.AddrPort, mode DownMode) {
	w.add("down %v %s", addr, mode)
}

func (w *watcher) BackendRemoved(_ *Pool, addr netip.AddrPort, mode RemovedMode) {
	w.add("removed %v %s", addr, mode)
}

func (w *watcher) BackendReturned(_ *Pool, addr netip.AddrPort) {
	w.mu.Lock()
	hears := w.returns
	w.mu.Unlock()
	if hears {
		w.add("returned %v", addr)
	}
}

func (w *watcher) hearReturns() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.returns = true
}

func (w *watcher) events() []event {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.heard)
}

func parse(t testing.TB, config string) *Config {
	t.Helper()
	c := new(Config)
	if err := caddy.StrictUnmarshalJSON([]byte(config), c); err != nil {
		t.Fatal(err)
	}
	return c
}

// provision makes a pool with the name of the test.
func provision(t testing.TB, config string) *Pool {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	p, err := parse(t, config).Provision(ctx, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	p.log = zap.NewNop()
	return p
}

// begin starts a pool and ends it with the test.
func begin(t testing.TB, p *Pool) *Pool {
	t.Helper()
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { end(t, p) })
	return p
}

func end(t testing.TB, p *Pool) {
	p.Stop()
	if err := p.Cleanup(); err != nil {
		t.Error(err)
	}
}

const none = `"health": {"check": "none"}`

// quiet is a pool without checks.
func quiet(t testing.TB, targets, more string) *Pool {
	t.Helper()
	if more != "" {
		more = ", " + more
	}
	return provision(t, `{"targets": [`+targets+`], `+none+more+`}`)
}

const three = `"10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"`

func addr(b *Backend) string {
	if b == nil {
		return "none"
	}
	return b.Addr().String()
}

func addrs(p *Pool) string {
	var s []string
	for _, b := range p.Backends() {
		s = append(s, b.Addr().String())
	}
	return strings.Join(s, " ")
}

func (p *Pool) backend(t testing.TB, addr string) *Backend {
	t.Helper()
	for _, b := range p.Backends() {
		if b.addr == netip.MustParseAddrPort(addr) {
			return b
		}
	}
	t.Fatalf("no backend %s", addr)
	return nil
}

func TestPick(t *testing.T) {
	p := begin(t, quiet(t, three, ""))
	before := selections(t)
	tried := func(s ...string) (list []netip.AddrPort) {
		for _, a := range s {
			list = append(list, netip.MustParseAddrPort(a))
		}
		return list
	}
	for _, tc := range []struct {
		name   string
		change func()
		tried  []netip.AddrPort
		want   string // the backends that may be chosen
		result Result
	}{
		{"all", func() {}, nil, "10.0.0.1:1 10.0.0.2:1 10.0.0.3:1", OK},
		{"one tried", func() {}, tried("10.0.0.1:1"), "10.0.0.2:1 10.0.0.3:1", OK},
		{"all tried", func() {}, tried("10.0.0.1:1", "10.0.0.3:1", "10.0.0.2:1"), "", NoBackend},
		{"one draining", func() { p.backend(t, "10.0.0.1:1").SetState(Draining) }, nil, "10.0.0.2:1 10.0.0.3:1", OK},
		{"one disabled", func() { p.backend(t, "10.0.0.2:1").SetState(Disabled) }, nil, "10.0.0.3:1", OK},
		{"the last tried", func() {}, tried("10.0.0.3:1"), "", NoBackend},
		{"all disabled", func() { p.backend(t, "10.0.0.3:1").SetState(Disabled) }, nil, "", NoBackend},
		{"one back", func() { p.backend(t, "10.0.0.1:1").SetState(Enabled) }, nil, "10.0.0.1:1", OK},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.change()
			got := make(map[string]bool)
			for range 12 {
				b, r := p.Pick(balancer.Flow{}, tc.tried)
				if r != tc.result || (b == nil) != (r != OK) {
					t.Fatalf("Pick = %s, %v, want %v", addr(b), r, tc.result)
				}
				if b != nil {
					got[addr(b)] = true
					b.Release()
				}
			}
			var list []string
			for a := range got {
				list = append(list, a)
			}
			slices.Sort(list)
			if s := strings.Join(list, " "); s != tc.want {
				t.Errorf("chose %q, want %q", s, tc.want)
			}
		})
	}
	for _, b := range p.Backends() {
		if b.Active() != 0 {
			t.Errorf("%v has %d flows", b.Addr(), b.Active())
		}
	}
	after := selections(t)
	for i := range after {
		after[i] -= before[i]
	}
	if after != [3]uint64{60, 36, 0} {
		t.Errorf("counted %v, want [60 36 0]", after)
	}
}

// selections are the counts of the test's pool.
func selections(t *testing.T) (results [3]uint64) {
	Selections(func(pool, policy string, n [3]uint64) {
		if pool == t.Name() && policy == "round_robin" {
			results = n
		}
	})
	return results
}

func TestPickBeforeStart(t *testing.T) {
	p := quiet(t, three, "")
	defer p.Cleanup()
	if b, r := p.Pick(balancer.Flow{}, nil); b != nil || r != NoBackend {
		t.Errorf("Pick = %s, %v", addr(b), r)
	}
}

func TestReleaseTwicePanics(t *testing.T) {
	p := begin(t, quiet(t, `"10.0.0.1:1"`, ""))
	b, _ := p.Pick(balancer.Flow{}, nil)
	b.Release()
	defer func() {
		if recover() == nil {
			t.Error("a place was released twice without a panic")
		}
		b.active.Add(1)
	}()
	b.Release()
}

func TestMaxSessionsIsExact(t *testing.T) {
	p := begin(t, quiet(t, three, `"per_backend": {"max_sessions": 5}`))
	for round := range 3 {
		var got sync.Map
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				if b, r := p.Pick(balancer.Flow{}, nil); r == OK {
					got.Store(i, b)
				} else if r != AtCapacity {
					t.Errorf("result %v", r)
				}
			})
		}
		wg.Wait()
		n := 0
		got.Range(func(_, b any) bool { n++; b.(*Backend).Release(); return true })
		if n != 15 {
			t.Fatalf("round %d: %d places given, want 15", round, n)
		}
	}
}

func TestMaxSessionsUnderChurn(t *testing.T) {
	p := begin(t, quiet(t, three, `"per_backend": {"max_sessions": 2}, "balancer": {"policy": "least_conn"}`))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 2000 {
				b, r := p.Pick(balancer.Flow{}, nil)
				if r != OK {
					continue
				}
				if n := b.Active(); n > 2 {
					t.Errorf("%v has %d flows", b.Addr(), n)
				}
				b.Release()
			}
		})
	}
	wg.Wait()
}

func TestMaxNewPerSec(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := begin(t, quiet(t, `"10.0.0.1:1"`, `"per_backend": {"max_new_per_sec": 20}`))
		count := func() (n int) {
			for range 100 {
				if b, r := p.Pick(balancer.Flow{}, nil); r == OK {
					n++
					b.Release()
				} else if r != AtCapacity {
					t.Fatalf("result %v", r)
				}
			}
			return n
		}
		for _, step := range []struct {
			wait time.Duration
			want int
		}{{0, 20}, {0, 0}, {49 * time.Millisecond, 0}, {time.Millisecond, 1}, {500 * time.Millisecond, 10}, {time.Hour, 20}} {
			time.Sleep(step.wait)
			if got := count(); got != step.want {
				t.Errorf("after %v: %d new flows, want %d", step.wait, got, step.want)
			}
		}
		if n := p.Backends()[0].Total(); n != 51 {
			t.Errorf("%d flows in total, want 51", n)
		}
	})
}

func TestPassive(t *testing.T) {
	p := begin(t, quiet(t, three, ""))
	b := p.Backends()[0]
	for range 10 {
		b.Passive(relay.Shortage)
	}
	if !b.Healthy() {
		t.Fatal("a shortage of our own counted")
	}
	for range 2 {
		b.Passive(relay.Refused)
		b.Passive(relay.Timeout)
		b.PassiveOK()
	}
	if !b.Healthy() {
		t.Fatal("failures counted across an answer")
	}
	b.Passive(relay.Refused)
	b.Passive(relay.PortClosed)
	b.Passive(relay.SendFailed)
	if b.Healthy() {
		t.Fatal("up after three failures")
	}
	if _, why := b.LastCheck(); why != "flows failed, the last one with send_error" {
		t.Errorf("the reason is %q", why)
	}
	for range 12 { // at once, also where the snapshot is not yet new
		c, _ := p.Pick(balancer.Flow{}, nil)
		if c == b {
			t.Fatal("a backend that is down was chosen")
		}
		c.Release()
	}
	if b.Failures(relay.Refused) != 3 || b.Failures(relay.Shortage) != 10 || b.Failures(relay.Timeout) != 2 {
		t.Error("failures were miscounted")
	}
}

// With check none a backend comes back after rise intervals.
func TestNoneGivesAnotherChance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := begin(t, provision(t, `{"targets": [`+three+`], "health": {"check": "none", "interval": "5s", "rise": 3, "fall": 1}}`))
		b := p.Backends()[1]
		time.Sleep(1234 * time.Millisecond)
		b.Passive(relay.EarlyReset)
		time.Sleep(15*time.Second - 1)
		synctest.Wait()
		if b.Healthy() {
			t.Error("up before three intervals have passed")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if !b.Healthy() {
			t.Error("down after three intervals")
		}
		if _, why := b.LastCheck(); why != "" {
			t.Errorf("up, and the reason why not is %q", why)
		}
	})
}

func TestChecksMoveFlows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := provision(t, `{"targets": [`+three+`]}`)
		check := new(held)
		if err := check.Provision(caddy.Context{}); err != nil {
			t.Fatal(err)
		}
		p.check = check
		begin(t, p)
		sick := p.Backends()[0]
		check.set("10.0.0.1:1", errSick)
		time.Sleep(6 * time.Second)
		synctest.Wait()
		if _, failed := sick.Checks(); failed != 3 || sick.Healthy() {
			t.Fatalf("after 6 s: %d checks failed, healthy %v", failed, sick.Healthy())
		}
		if at, text := sick.LastCheck(); text != "sick" || at.IsZero() {
			t.Errorf("last check %v %q", at, text)
		}
		for range 9 {
			b, _ := p.Pick(balancer.Flow{}, nil)
			if b == sick {
				t.Fatal("a backend that is down was chosen")
			}
			b.Release()
		}
		check.set("10.0.0.1:1", nil)
		time.Sleep(4 * time.Second) // rise × interval
		synctest.Wait()
		if !sick.Healthy() {
			t.Error("still down after rise × interval")
		}
		if passed, _ := sick.Checks(); passed != 2 {
			t.Errorf("%d checks passed, want 2", passed)
		}
	})
}

func TestAllDown(t *testing.T) {
	for mode, want := range map[string]Result{"refuse": NoBackend, "try_all": OK} {
		t.Run(mode, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := begin(t, quiet(t, three, `"on_all_down": "`+mode+`"`))
				p.Backends()[2].SetState(Disabled)
				for _, b := range p.Backends() {
					for range 3 {
						b.Passive(relay.Refused)
					}
				}
				for _, settle := range []bool{false, true} {
					if settle {
						synctest.Wait()
					}
					for range 6 {
						b, r := p.Pick(balancer.Flow{}, nil)
						if r != want {
							t.Fatalf("result %v, want %v", r, want)
						}
						if b != nil {
							if b.State() == Disabled {
								t.Error("a disabled backend was chosen")
							}
							b.Release()
						}
					}
				}
			})
		})
	}
}

// A choice between the moment one backend goes down and another comes up finds
// the one that is up.
func TestNeverEmptyWhileOneIsHealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := begin(t, quiet(t, `"10.0.0.1:1", "10.0.0.2:1"`, ""))
		one, two := p.Backends()[0], p.Backends()[1]
		for range 3 {
			one.Passive(relay.Refused)
		}
		synctest.Wait() // the snapshot holds two alone
		one.readmit(time.Now().Add(time.Hour), 0)
		for range 3 {
			two.Passive(relay.Refused)
		}
		b, r := p.Pick(balancer.Flow{}, nil)
		if b != one || r != OK {
			t.Fatalf("Pick = %s, %v", addr(b), r)
		}
		b.Release()
	})
}

func TestPickDoesNotAllocate(t *testing.T) {
	for _, policy := range []string{"round_robin", "least_conn", "weighted", "consistent_hash", "first_available"} {
		p := quiet(t, three, `"balancer": {"policy": "`+policy+`"}, "per_backend": {"max_sessions": 1, "max_new_per_sec": 1000000}`)
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		f := balancer.Flow{Client: netip.MustParseAddrPort("203.0.113.7:51343")}
		tried := []netip.AddrPort{p.Backends()[0].Addr()}
		full := p.Backends()[1]
		full.active.Add(1)
		for name, list := range map[string][]netip.AddrPort{"first": nil, "tried": tried} {
			n := testing.AllocsPerRun(200, func() {
				if b, _ := p.Pick(f, list); b != nil {
					b.Release()
				}
			})
			if n != 0 && !testkit.Race {
				t.Errorf("%s, %s: %v allocations", policy, name, n)
			}
		}
		full.active.Add(-1)
		end(t, p)
	}
}

func TestSource(t *testing.T) {
	p := quiet(t, three, `"source_addresses": ["192.0.2.1", "192.0.2.2", "2001:db8::1"]`)
	defer p.Cleanup()
	got := make(map[string]int)
	for range 30 {
		got[p.Source(netip.MustParseAddr("10.0.0.1")).String()]++
	}
	if len(got) != 2 || got["192.0.2.1"] == 0 || got["192.0.2.2"] == 0 {
		t.Errorf("sources %v, want both of IPv4", got)
	}
	if s := p.Source(netip.MustParseAddr("2001:db8::9")); s.String() != "2001:db8::1" {
		t.Errorf("source %v for IPv6", s)
	}
}

func BenchmarkPick(b *testing.B) {
	for _, policy := range []string{"round_robin", "least_conn", "consistent_hash"} {
		b.Run(policy, func(b *testing.B) {
			p := begin(b, quiet(b, three, `"balancer": {"policy": "`+policy+`"}`))
			f := balancer.Flow{Client: netip.MustParseAddrPort("203.0.113.7:51343")}
			for b.Loop() {
				c, _ := p.Pick(f, nil)
				c.Release()
			}
		})
	}
}
