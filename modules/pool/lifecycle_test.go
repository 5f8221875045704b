package pool

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
)

func fell(b *Backend) {
	for range 3 {
		b.Passive(relay.Refused)
	}
}

func rose(b *Backend) { b.Checked(time.Now(), nil); b.Checked(time.Now(), nil) }

// watch gives p a watcher whose clock starts now.
func watch(p *Pool) *watcher {
	w := &watcher{begin: time.Now()}
	p.SetWatcher(w)
	return w
}

func (w *watcher) want(t *testing.T, want ...event) {
	t.Helper()
	synctest.Wait()
	if got := w.events(); !slices.Equal(got, want) {
		t.Errorf("the watcher heard %v, want %v", got, want)
	}
}

const slowChecks = `"health": {"check": "none", "interval": "1h"}`

func TestBackendDown(t *testing.T) {
	for mode, want := range map[string][]event{
		`"on_backend_down": "close"`:               {{time.Second, "down 10.0.0.1:1 close"}},
		`"on_backend_down": "rehome"`:              {{time.Second, "down 10.0.0.1:1 rehome"}},
		`"on_backend_down": "hold"`:                {{31 * time.Second, "down 10.0.0.1:1 hold"}},
		`"on_backend_down": "hold", "hold": "10s"`: {{11 * time.Second, "down 10.0.0.1:1 hold"}},
	} {
		t.Run(mode, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := provision(t, `{"targets": [`+three+`], `+slowChecks+`, `+mode+`}`)
				w := watch(p)
				begin(t, p)
				time.Sleep(time.Second)
				fell(p.Backends()[0])
				time.Sleep(30 * time.Minute)
				w.want(t, want...) // once
			})
		})
	}
}

func TestRecoveryCancelsHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := provision(t, `{"targets": [`+three+`], `+slowChecks+`}`)
		w := watch(p)
		begin(t, p)
		b := p.Backends()[0]
		fell(b)
		time.Sleep(30*time.Second - 1)
		rose(b)
		time.Sleep(10 * time.Second)
		w.want(t)
		fell(b) // a new spell has a hold of its own
		time.Sleep(30 * time.Second)
		w.want(t, event{70*time.Second - 1, "down 10.0.0.1:1 hold"})
	})
}

// When a backend is moved away from, a choice made in the hook finds another.
func TestRehomeFindsAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := provision(t, `{"targets": [`+three+`], `+slowChecks+`, "on_backend_down": "rehome"}`)
		r := &rehomer{}
		p.SetWatcher(r)
		begin(t, p)
		fell(p.Backends()[0])
		synctest.Wait()
		if got := fmt.Sprint(r.chosen); r.chosen == nil || slices.Contains(r.chosen, "10.0.0.1:1") {
			t.Errorf("flows were moved to %s", got)
		}
	})
}

type rehomer struct{ chosen []string }

func (r *rehomer) BackendDown(p *Pool, _ netip.AddrPort, _ DownMode) {
	for range 6 {
		b, _ := p.Pick(balancer.Flow{}, nil)
		r.chosen = append(r.chosen, addr(b))
		b.Release()
	}
}
func (*rehomer) BackendRemoved(*Pool, netip.AddrPort, RemovedMode) {}
func (*rehomer) BackendReturned(*Pool, netip.AddrPort)             {}

// reload starts next and then ends p, as Caddy does.
func reload(t *testing.T, p, next *Pool) {
	t.Helper()
	begin(t, next)
	end(t, p)
	p.cancel = nil // its Cleanup has been
}

// started begins a pool that the test ends itself, by reload.
func started(t *testing.T, p *Pool) *Pool {
	t.Helper()
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	return p
}

func TestReloadKeepsBackends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := started(t, quiet(t, three, ""))
		one := p.backend(t, "10.0.0.1:1")
		fell(one)
		p.backend(t, "10.0.0.2:1").SetState(Draining)
		flow, _ := p.Pick(balancer.Flow{}, nil)

		next := quiet(t, `"10.0.0.4:1", "10.0.0.3:1", "10.0.0.2:1", "10.0.0.1:1"`, `"balancer": {"policy": "weighted", "weights": {"10.0.0.3:1": 7}}`)
		reload(t, p, next)
		if got := addrs(next); got != "10.0.0.4:1 10.0.0.3:1 10.0.0.2:1 10.0.0.1:1" {
			t.Errorf("backends %s", got)
		}
		if one != next.backend(t, "10.0.0.1:1") || one.Healthy() {
			t.Error("a backend that was down came up by a reload")
		}
		if s := next.backend(t, "10.0.0.2:1").State(); s != Draining {
			t.Errorf("a backend that was draining is %v after a reload", s)
		}
		if b := next.backend(t, addr(flow)); b != flow || b.Active() != 1 || b.Total() != 1 || b.Weight() != 7 {
			t.Errorf("a backend with a flow has %d flows, %d in total, weight %d", b.Active(), b.Total(), b.Weight())
		}
		flow.Release()
		if n := len(one.members); n != 1 {
			t.Errorf("a backend is in %d running pools, want 1", n)
		}
		var names []string
		for q := range All() {
			if q.name == t.Name() {
				names = append(names, q.name)
				if q != next {
					t.Error("All shows an old pool")
				}
			}
		}
		if len(names) != 1 {
			t.Errorf("All shows %v", names)
		}
	})
	used(t, 0)
}

// A config that Caddy gives up after Start: its Stop leaves the old one as it
// was.
func TestFailedReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := quiet(t, three, `"on_backend_down": "close"`)
		w := watch(p)
		begin(t, p)
		next := quiet(t, `"10.0.0.1:1", "10.0.0.9:1"`, `"balancer": {"policy": "weighted", "weights": {"10.0.0.1:1": 5}}`)
		nw := watch(next)
		started(t, next)
		fell(p.Backends()[0])
		w.want(t) // the newest acts, and that is next, which holds
		end(t, next)
		if got := addrs(p); got != "10.0.0.1:1 10.0.0.2:1 10.0.0.3:1" || p.Backends()[0].Weight() != 1 {
			t.Errorf("backends %s, weight %d", got, p.Backends()[0].Weight())
		}
		w.want(t, event{0, "down 10.0.0.1:1 close"})
		nw.want(t)
	})
	used(t, 0)
}

func TestHoldGoesOnAcrossReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := provision(t, `{"targets": [`+three+`], `+slowChecks+`}`)
		w := watch(p)
		started(t, p)
		fell(p.Backends()[0])
		time.Sleep(20 * time.Second)
		next := provision(t, `{"targets": [`+three+`], `+slowChecks+`}`)
		next.SetWatcher(w)
		reload(t, p, next)
		time.Sleep(time.Minute)
		again := provision(t, `{"targets": [`+three+`], `+slowChecks+`}`)
		again.SetWatcher(w)
		reload(t, next, again)
		time.Sleep(time.Minute)
		w.want(t, event{30 * time.Second, "down 10.0.0.1:1 hold"})
	})
}

func TestRemovedByReload(t *testing.T) {
	for mode, want := range map[string][]event{
		`"on_backend_removed": "close"`: {{0, "removed 10.0.0.2:1 close"}},
		`"on_backend_removed": "drain"`: nil,
		`"drain_deadline": "10m"`:       {{10 * time.Minute, "removed 10.0.0.2:1 drain"}},
	} {
		t.Run(mode, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := started(t, quiet(t, three, ""))
				old := watch(p)
				next := quiet(t, `"10.0.0.1:1", "10.0.0.3:1"`, mode)
				w := watch(next)
				reload(t, p, next)
				time.Sleep(time.Hour)
				w.want(t, want...) // the newest config decides
				old.want(t)
			})
		})
	}
}

func TestDrainDeadlineGoesOnAcrossReload(t *testing.T) {
	for name, tc := range map[string]struct {
		again string
		want  []event
	}{
		"still gone": {`"10.0.0.1:1"`, []event{{10 * time.Minute, "removed 10.0.0.2:1 drain"}}},
		"returned":   {`"10.0.0.1:1", "10.0.0.2:1"`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const deadline = `"drain_deadline": "10m"`
				p := started(t, quiet(t, `"10.0.0.1:1", "10.0.0.2:1"`, deadline))
				w := watch(p)
				next := quiet(t, `"10.0.0.1:1"`, deadline)
				next.SetWatcher(w)
				if err := next.Start(); err != nil {
					t.Fatal(err)
				}
				end(t, p)
				time.Sleep(9 * time.Minute)
				again := quiet(t, tc.again, deadline)
				again.SetWatcher(w)
				reload(t, next, again)
				time.Sleep(time.Hour)
				w.want(t, tc.want...)
			})
		})
	}
}

// A pool that a new config no longer has.
func TestPoolRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := quiet(t, `"10.0.0.1:1", "10.0.0.2:1"`, `"on_backend_removed": "close"`)
		w := watch(p)
		started(t, p)
		end(t, p)
		w.want(t, event{0, "removed 10.0.0.1:1 close"}, event{0, "removed 10.0.0.2:1 close"})
	})
}

// A backend whose flows outlive the config is the same one when it returns, and
// is forgotten with its last flow.
func TestFlowsKeepTheirBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := started(t, quiet(t, `"10.0.0.1:1"`, ""))
		flow, _ := p.Pick(balancer.Flow{}, nil)
		next := started(t, quiet(t, `"10.0.0.2:1"`, ""))
		end(t, p)
		used(t, 2)
		again := started(t, quiet(t, `"10.0.0.1:1"`, ""))
		end(t, next)
		if b := again.Backends()[0]; b != flow || b.Active() != 1 {
			t.Error("a backend with a flow returned as another")
		}
		end(t, again)
		used(t, 1)
		flow.Release()
		used(t, 0)
	})
}

func TestReleaseRacesGive(t *testing.T) {
	for range 500 {
		p := started(t, quiet(t, `"10.0.0.1:1"`, ""))
		flow, _ := p.Pick(balancer.Flow{}, nil)
		var wg sync.WaitGroup
		wg.Go(flow.Release)
		wg.Go(func() { end(t, p) })
		wg.Wait()
		used(t, 0)
	}
}

func TestProvisionAndCleanupOnly(t *testing.T) {
	p := quiet(t, three, "")
	p.Stop() // Caddy may stop what it has not started
	used(t, 3)
	p.Cleanup()
	used(t, 0)
}

// names is a resolver that the test holds.
type names struct {
	mu    sync.Mutex
	ttl   time.Duration
	addrs map[string][]string
	err   error
	takes time.Duration
	asked []time.Duration
	begin time.Time
}

func (n *names) Lookup(ctx context.Context, host string) ([]netip.Addr, time.Duration, error) {
	n.mu.Lock()
	n.asked = append(n.asked, time.Since(n.begin))
	takes := n.takes
	n.mu.Unlock()
	select {
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	case <-time.After(takes):
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	var list []netip.Addr
	for _, s := range n.addrs[host] {
		list = append(list, netip.MustParseAddr(s))
	}
	return list, n.ttl, n.err
}

func (n *names) set(err error, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err = err
	n.addrs = map[string][]string{"game.test": addrs}
}

func (n *names) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.asked)
}

func named(t *testing.T, n *names, targets, more string) *Pool {
	p := quiet(t, targets, more)
	p.resolver = n
	return p
}

func TestNamesAreResolved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{ttl: 10 * time.Second, begin: time.Now()}
		n.set(nil, "10.0.0.2", "10.0.0.1", "::ffff:10.0.0.1")
		p := named(t, n, `"game.test:7", "10.0.0.9:9"`, `"on_backend_removed": "close"`)
		w := watch(p)
		begin(t, p)
		want := func(want string) {
			t.Helper()
			synctest.Wait()
			if got := addrs(p); got != want {
				t.Errorf("after %v backends are %s, want %s", time.Since(n.begin), got, want)
			}
		}
		want("10.0.0.1:7 10.0.0.2:7 10.0.0.9:9") // at once
		n.set(nil, "10.0.0.3", "10.0.0.2")
		time.Sleep(10*time.Second - 1)
		want("10.0.0.1:7 10.0.0.2:7 10.0.0.9:9")
		time.Sleep(time.Nanosecond)
		want("10.0.0.2:7 10.0.0.3:7 10.0.0.9:9")
		w.want(t, event{10 * time.Second, "removed 10.0.0.1:7 close"})

		n.set(errors.New("servers are on strike"), "10.0.0.4")
		time.Sleep(10 * time.Second)
		want("10.0.0.2:7 10.0.0.3:7 10.0.0.4:7 10.0.0.9:9") // in part: nothing goes
		n.set(nil)
		time.Sleep(time.Minute)
		want("10.0.0.2:7 10.0.0.3:7 10.0.0.4:7 10.0.0.9:9") // no such name: nothing goes
		n.set(nil, "0.0.0.0", "::ffff:0.0.0.0", "255.255.255.255", "ff02::1")
		time.Sleep(30 * time.Second)
		want("10.0.0.2:7 10.0.0.3:7 10.0.0.4:7 10.0.0.9:9") // no address of a host: the same
		n.set(nil, "10.0.0.5", "fd00::5")
		time.Sleep(30 * time.Second)
		want("10.0.0.5:7 [fd00::5]:7 10.0.0.9:9")
		n.set(&lookup.HalfError{Six: true, Err: errors.New("no answer about AAAA")}, "10.0.0.6")
		time.Sleep(10 * time.Second)
		want("10.0.0.6:7 [fd00::5]:7 10.0.0.9:9") // one family failed: nothing of it goes
	})
	used(t, 0)
}

func TestNamesWaitAndRetry(t *testing.T) {
	for name, tc := range map[string]struct {
		ttl  time.Duration
		err  error
		want []time.Duration // seconds
	}{
		"ttl of zero":   {0, nil, []time.Duration{0, 1, 2, 3}},
		"ttl of a week": {7 * 24 * time.Hour, nil, []time.Duration{0, 300, 600}},
		"failures":      {0, errors.New("no"), []time.Duration{0, 1, 3, 7, 15, 31, 61, 91}},
		"of one family": {6 * time.Second, &lookup.HalfError{Err: errors.New("no")}, []time.Duration{0, 1, 3, 7, 13, 19}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &names{ttl: tc.ttl, begin: time.Now()}
				n.set(tc.err, "10.0.0.1")
				begin(t, named(t, n, `"game.test:7"`, ""))
				last := tc.want[len(tc.want)-1] * time.Second
				time.Sleep(last + time.Second/2)
				synctest.Wait()
				for i := range tc.want {
					tc.want[i] *= time.Second
				}
				n.mu.Lock()
				defer n.mu.Unlock()
				if !slices.Equal(n.asked, tc.want) {
					t.Errorf("asked after %v, want %v", n.asked, tc.want)
				}
			})
		})
	}
}

func TestSlowNamesDoNotHoldStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{ttl: time.Minute, begin: time.Now(), takes: 3 * time.Second}
		n.set(nil, "10.0.0.1")
		p := begin(t, named(t, n, `"game.test:7", "game.test:8", "10.0.0.9:9"`, ""))
		if d := time.Since(n.begin); d != time.Second {
			t.Errorf("Start took %v, want 1s", d)
		}
		if got := addrs(p); got != "10.0.0.9:9" {
			t.Errorf("backends %s", got)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if got := addrs(p); got != "10.0.0.1:7 10.0.0.1:8 10.0.0.9:9" {
			t.Errorf("backends %s", got)
		}
		if n.count() != 1 {
			t.Errorf("one name was asked for %d times", n.count())
		}
	})
}

// A reload knows what the config before knew, even while DNS is away.
func TestReloadKeepsNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{ttl: 10 * time.Second, begin: time.Now()}
		n.set(nil, "10.0.0.1", "10.0.0.2")
		p := started(t, named(t, n, `"game.test:7"`, ""))
		n.set(errors.New("away"))
		time.Sleep(5 * time.Second)
		fell(p.Backends()[0])
		next := named(t, n, `"game.test:7"`, `"on_backend_removed": "close"`)
		w := watch(next)
		reload(t, p, next)
		if d := time.Since(n.begin); d != 5*time.Second || n.count() != 1 {
			t.Errorf("the reload ended after %v with %d look-ups", d, n.count())
		}
		if got := addrs(next); got != "10.0.0.1:7 10.0.0.2:7" || next.Backends()[0].Healthy() {
			t.Errorf("backends %s, the first healthy: %v", got, next.Backends()[0].Healthy())
		}
		time.Sleep(time.Minute)
		w.want(t)
	})
	used(t, 0)
}

func TestRemovedByDNSWhileInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &names{ttl: 10 * time.Second, begin: time.Now()}
		n.set(nil, "10.0.0.1")
		p := begin(t, named(t, n, `"game.test:7"`, `"drain_deadline": "1m"`))
		w := watch(p)
		flow, _ := p.Pick(balancer.Flow{}, nil)
		n.set(nil, "10.0.0.2")
		time.Sleep(10 * time.Second)
		synctest.Wait()
		used(t, 2)
		n.set(nil, "10.0.0.1") // back before the deadline
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if p.Backends()[0] != flow {
			t.Error("a backend with a flow returned as another")
		}
		used(t, 1)
		time.Sleep(10 * time.Minute)
		w.want(t, event{70*time.Second + 10*time.Second, "removed 10.0.0.2:7 drain"})
		flow.Release()
	})
	used(t, 0)
}
