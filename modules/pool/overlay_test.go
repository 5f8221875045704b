package pool

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/intent"
)

// operators forgets at the end of the test what it has had operators want.
func operators(t testing.TB) {
	t.Cleanup(func() {
		if _, err := intent.Process.Drop(t.Name()); err != nil {
			t.Error(err)
		}
	})
}

func ip(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

var alice = intent.By{Actor: "alice", At: time.Now()}

// written writes down the backends of a pool.
func written(p *Pool) string {
	var s []string
	for _, b := range p.Backends() {
		s = append(s, fmt.Sprintf("%s %s %d %v", b.Addr(), b.Origin(), b.Weight(), b.State()))
	}
	return strings.Join(s, ", ")
}

// TestPrecedence has what operators want on top of what the config says, step by
// step. Each holds when the call returns.
func TestPrecedence(t *testing.T) {
	operators(t)
	name := t.Name()
	p := quiet(t, `"10.0.0.1:1", "10.0.0.2:1"`, `"balancer": {"policy": "weighted", "weights": {"10.0.0.1:1": 5}}`)
	const config = "10.0.0.1:1 config 5 enabled, 10.0.0.2:1 config 1 enabled"
	begin(t, p)
	last := config
	step := func(what string, got, err error, want string) {
		t.Helper()
		if !errors.Is(got, err) || (got == nil) != (err == nil) {
			t.Errorf("%s: %v, want %v", what, got, err)
		}
		if want != "" {
			last = want
		}
		if now := written(p); now != last {
			t.Errorf("%s: backends are\n%s, want\n%s", what, now, last)
		}
	}
	step("nothing", nil, nil, config)
	step("add what the config has", Add(name, ip("10.0.0.1:1"), 1, alice), ErrThere, "")
	step("add", Add(name, ip("10.0.0.9:1"), 3, alice), nil, config+", 10.0.0.9:1 overlay 3 enabled")
	step("add again", Add(name, ip("10.0.0.9:1"), 3, alice), ErrThere, "")
	step("remove what is not there", Remove(name, ip("10.0.0.8:1"), alice), ErrUnknown, "")
	step("state of what is not there", SetState(name, ip("10.0.0.8:1"), Draining, alice), ErrUnknown, "")
	step("drain what was added", SetState(name, ip("10.0.0.9:1"), Draining, alice), nil, config+", 10.0.0.9:1 overlay 3 draining")
	step("remove what was added", Remove(name, ip("10.0.0.9:1"), alice), nil, config)
	step("remove it again", Remove(name, ip("10.0.0.9:1"), alice), ErrUnknown, "")
	step("add without a weight", Add(name, ip("10.0.0.9:1"), 0, alice), nil, config+", 10.0.0.9:1 overlay 1 enabled")
	step("remove that", Remove(name, ip("10.0.0.9:1"), alice), nil, config)
	step("drain what the config has", SetState(name, ip("10.0.0.1:1"), Draining, alice), nil,
		"10.0.0.1:1 config 5 draining, 10.0.0.2:1 config 1 enabled")
	step("remove what the config has", Remove(name, ip("10.0.0.1:1"), alice), nil, "10.0.0.2:1 config 1 enabled")
	step("remove it again", Remove(name, ip("10.0.0.1:1"), alice), ErrUnknown, "")
	step("state of what was removed", SetState(name, ip("10.0.0.1:1"), Enabled, alice), ErrUnknown, "")
	step("add it back", Add(name, ip("10.0.0.1:1"), 0, alice), nil, config)
	step("remove it", Remove(name, ip("10.0.0.1:1"), alice), nil, "10.0.0.2:1 config 1 enabled")
	step("add it back with a weight", Add(name, ip("10.0.0.1:1"), 7, alice), nil, "10.0.0.1:1 config 7 enabled, 10.0.0.2:1 config 1 enabled")
	step("remove it", Remove(name, ip("10.0.0.1:1"), alice), nil, "10.0.0.2:1 config 1 enabled")
	if err := Remove(name, ip("10.0.0.2:1"), alice); err != nil || written(p) != "" {
		t.Errorf("removing all: %v, there is %q", err, written(p))
	}
	if b, r := p.Pick(balancer.Flow{}, nil); b != nil || r != NoBackend {
		t.Errorf("a pool without backends gives %v, %v", addr(b), r)
	}
}

func TestPrecedenceOfDrop(t *testing.T) {
	operators(t)
	p := begin(t, quiet(t, three, ""))
	for _, err := range []error{
		Add(t.Name(), ip("10.0.0.9:1"), 3, alice), Remove(t.Name(), ip("10.0.0.1:1"), alice), SetState(t.Name(), ip("10.0.0.2:1"), Disabled, alice),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := written(p); got != "10.0.0.2:1 config 1 disabled, 10.0.0.3:1 config 1 enabled, 10.0.0.9:1 overlay 3 enabled" {
		t.Errorf("backends are %s", got)
	}
	if _, err := intent.Process.Drop(t.Name()); err != nil {
		t.Fatal(err)
	}
	if got := written(p); got != "10.0.0.1:1 config 1 enabled, 10.0.0.2:1 config 1 enabled, 10.0.0.3:1 config 1 enabled" {
		t.Errorf("backends are %s", got)
	}
}

func TestNoPool(t *testing.T) {
	for _, err := range []error{Add(t.Name(), ip("10.0.0.9:1"), 3, alice), Remove(t.Name(), ip("10.0.0.1:1"), alice), SetState(t.Name(), ip("10.0.0.2:1"), Disabled, alice)} {
		if !errors.Is(err, ErrNoPool) {
			t.Errorf("a pool that does not run: %v", err)
		}
	}
}

// A backend that is drained or disabled is given nothing, on any way.
func TestStateHoldsAtOnce(t *testing.T) {
	operators(t)
	for _, policy := range []string{"round_robin", "consistent_hash", "least_conn", "weighted", "first_available"} {
		p := quiet(t, three, `"on_all_down": "try_all", "balancer": {"policy": "`+policy+`"}`)
		begin(t, p)
		for _, s := range []State{Draining, Disabled} {
			if err := SetState(t.Name(), ip("10.0.0.1:1"), s, alice); err != nil {
				t.Fatal(err)
			}
			for i := range 300 {
				client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), uint16(1+i))
				b, r := p.Pick(balancer.Flow{Client: client}, nil)
				if r != OK || b.Addr() == ip("10.0.0.1:1") {
					t.Fatalf("%s, %v: %s, %v", policy, s, addr(b), r)
				}
				b.Release()
			}
			if b, r := p.PickAddr(ip("10.0.0.1:1")); r != NoBackend {
				t.Errorf("%v: by its address: %s, %v", s, addr(b), r)
			}
			if candidate, _ := p.Takes(p.backend(t, "10.0.0.1:1")); candidate {
				t.Errorf("%v: it is a candidate", s)
			}
		}
		if err := SetState(t.Name(), ip("10.0.0.1:1"), Enabled, alice); err != nil {
			t.Fatal(err)
		}
		b, r := p.PickAddr(ip("10.0.0.1:1"))
		if r != OK {
			t.Fatalf("enabled again: %v", r)
		}
		b.Release()
		end(t, p)
		p.cancel = nil
	}
}

// The overlay is there before a pool is, and after it.
func TestOverlayOutlivesPools(t *testing.T) {
	operators(t)
	p := started(t, quiet(t, three, ""))
	if err := errors.Join(Add(t.Name(), ip("10.0.0.9:1"), 2, alice), Remove(t.Name(), ip("10.0.0.2:1"), alice), SetState(t.Name(), ip("10.0.0.3:1"), Draining, alice)); err != nil {
		t.Fatal(err)
	}
	flow, _ := p.Pick(balancer.Flow{}, nil)
	next := quiet(t, `"10.0.0.3:1", "10.0.0.2:1", "10.0.0.9:1", "10.0.0.4:1"`, "")
	reload(t, p, next)
	want := "10.0.0.3:1 config 1 draining, 10.0.0.9:1 config 2 enabled, 10.0.0.4:1 config 1 enabled"
	if got := written(next); got != want {
		t.Errorf("after a reload backends are\n%s, want\n%s", got, want)
	}
	flow.Release()
	end(t, next)
	next.cancel = nil
	again := begin(t, quiet(t, `"10.0.0.2:1", "10.0.0.3:1"`, ""))
	want = "10.0.0.3:1 config 1 draining, 10.0.0.9:1 overlay 2 enabled"
	if got := written(again); got != want {
		t.Errorf("without a pool between backends are\n%s, want\n%s", got, want)
	}
}

// TestDrainDeadlineOfState ends the flows of a backend that an operator drains,
// the deadline after that was said.
func TestDrainDeadlineOfState(t *testing.T) {
	one := ip("10.0.0.1:1")
	for name, tc := range map[string]struct {
		config string
		do     func(t *testing.T, name string)
		want   []event
	}{
		"drained": {`"drain_deadline": "10m"`, func(*testing.T, string) {},
			[]event{{10 * time.Minute, "removed 10.0.0.1:1 drain"}}},
		"no deadline": {`"on_backend_removed": "drain"`, func(*testing.T, string) {}, nil},
		"close":       {`"on_backend_removed": "close"`, func(*testing.T, string) {}, nil},
		"said again": {`"drain_deadline": "10m"`, func(t *testing.T, name string) { SetState(name, one, Draining, intent.Now("bob")) },
			[]event{{10 * time.Minute, "removed 10.0.0.1:1 drain"}}},
		"enabled":  {`"drain_deadline": "10m"`, func(t *testing.T, name string) { SetState(name, one, Enabled, intent.Now("bob")) }, nil},
		"disabled": {`"drain_deadline": "10m"`, func(t *testing.T, name string) { SetState(name, one, Disabled, intent.Now("bob")) }, nil},
		"anew": {`"drain_deadline": "10m"`, func(t *testing.T, name string) {
			SetState(name, one, Enabled, intent.Now("bob"))
			time.Sleep(time.Minute)
			SetState(name, one, Draining, intent.Now("bob"))
		}, []event{{16 * time.Minute, "removed 10.0.0.1:1 drain"}}},
		"removed": {`"drain_deadline": "10m"`, func(t *testing.T, name string) { Remove(name, one, intent.Now("bob")) },
			[]event{{10 * time.Minute, "removed 10.0.0.1:1 drain"}}},
		"removed to close": {`"on_backend_removed": "close"`, func(t *testing.T, name string) { Remove(name, one, intent.Now("bob")) },
			[]event{{5 * time.Minute, "removed 10.0.0.1:1 close"}}},
		"removed and added": {`"drain_deadline": "10m"`, func(t *testing.T, name string) {
			Remove(name, one, intent.Now("bob"))
			time.Sleep(time.Minute)
			Add(name, one, 0, intent.Now("bob"))
		}, []event{{6 * time.Minute, "returned 10.0.0.1:1"}}},
	} {
		t.Run(name, func(t *testing.T) {
			operators(t)
			synctest.Test(t, func(t *testing.T) {
				p := quiet(t, three, tc.config)
				w := watch(p)
				begin(t, p)
				w.hearReturns() // from now on: those that come return too
				if err := SetState(t.Name(), one, Draining, intent.Now("alice")); err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Minute)
				tc.do(t, t.Name())
				time.Sleep(time.Hour)
				w.want(t, tc.want...)
			})
		})
	}
}

// A deadline goes on over reloads, and one that has begun before the process did.
func TestDrainDeadlineIsKept(t *testing.T) {
	operators(t)
	synctest.Test(t, func(t *testing.T) {
		before := intent.By{Actor: "alice", At: time.Now().Add(-4 * time.Minute).Round(0)} // as it comes from disk
		draining := intent.Backend{State: Draining, Since: before}
		err := intent.Process.Change(t.Name(), ip("10.0.0.1:1"), func(intent.Backend) (intent.Backend, error) { return draining, nil })
		if err != nil {
			t.Fatal(err)
		}
		p := started(t, quiet(t, three, `"drain_deadline": "10m"`))
		time.Sleep(time.Minute)
		next := quiet(t, three, `"drain_deadline": "8m"`)
		w := watch(next)
		reload(t, p, next)
		w.hearReturns()
		time.Sleep(time.Hour)
		w.want(t, event{3 * time.Minute, "removed 10.0.0.1:1 drain"})
	})
}

// TestReturned says of a backend whose flows are being ended that they are to be
// left.
func TestReturned(t *testing.T) {
	operators(t)
	synctest.Test(t, func(t *testing.T) {
		p := quiet(t, three, `"drain_deadline": "1m"`)
		w := watch(p)
		begin(t, p)
		w.hearReturns()
		one := ip("10.0.0.1:1")
		SetState(t.Name(), one, Draining, intent.Now("alice"))
		time.Sleep(2 * time.Minute)
		SetState(t.Name(), one, Enabled, intent.Now("alice"))
		w.want(t, event{time.Minute, "removed 10.0.0.1:1 drain"}, event{2 * time.Minute, "returned 10.0.0.1:1"})
	})
}

// TestAddedAwaitsChecks has backends that operators add, or bring back, get flows
// when they have passed their checks, and not before. A config that takes over
// knows them.
func TestAddedAwaitsChecks(t *testing.T) {
	operators(t)
	synctest.Test(t, func(t *testing.T) {
		check := new(held)
		if err := check.Provision(caddy.Context{}); err != nil {
			t.Fatal(err)
		}
		next := func() *Pool {
			p := provision(t, `{"targets": ["10.0.0.1:1", "10.0.0.2:1"]}`)
			p.check = check
			return p
		}
		p := next()
		w := watch(p)
		started(t, p)
		takes := func(addr string, want bool) {
			t.Helper()
			synctest.Wait()
			if got := p.backend(t, addr).Healthy(); got != want {
				t.Errorf("%s is healthy: %v, want %v", addr, got, want)
			}
			found := false
			for range 6 {
				b, _ := p.Pick(balancer.Flow{}, nil)
				found = found || b.Addr() == ip(addr)
				b.Release()
			}
			if found != want {
				t.Errorf("%s is chosen: %v, want %v", addr, found, want)
			}
		}
		const rise = 4 * time.Second // rise × interval
		name := t.Name()
		check.set("10.0.0.9:1", errSick)
		if err := Add(name, ip("10.0.0.9:1"), 1, alice); err != nil {
			t.Fatal(err)
		}
		takes("10.0.0.9:1", false)
		time.Sleep(10 * rise)
		takes("10.0.0.9:1", false)
		check.set("10.0.0.9:1", nil)
		time.Sleep(rise)
		takes("10.0.0.9:1", true)

		flow, _ := p.PickAddr(ip("10.0.0.2:1"))
		for _, err := range []error{Remove(name, ip("10.0.0.2:1"), alice), Add(name, ip("10.0.0.2:1"), 0, alice)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		takes("10.0.0.2:1", false)
		time.Sleep(rise)
		takes("10.0.0.2:1", true)
		flow.Release()
		w.want(t) // it was never down for its flows

		if err := Add(name, ip("10.0.0.8:1"), 1, alice); err != nil {
			t.Fatal(err)
		}
		q := next()
		reload(t, p, q)
		p = q
		takes("10.0.0.9:1", true)
		takes("10.0.0.8:1", false)
		time.Sleep(rise)
		takes("10.0.0.8:1", true)
	})
}

// TestNewAwaitsChecks has backends that a source or a new config names beside
// some that take flows get them when they have passed their checks. Where there
// are no others, as at the start, they get them at once.
func TestNewAwaitsChecks(t *testing.T) {
	operators(t)
	synctest.Test(t, func(t *testing.T) {
		const rise = 4 * time.Second // rise × interval
		check := new(held)
		if err := check.Provision(caddy.Context{}); err != nil {
			t.Fatal(err)
		}
		h, source := hold(t, ep("10.0.0.1:1"), ep("10.0.0.2:1"))
		config := `{` + source + `}`
		next := func(config string) *Pool {
			p := provision(t, config)
			p.check = check
			return p
		}
		var p *Pool
		is := func(want string) {
			t.Helper()
			synctest.Wait()
			var up []string
			for _, b := range p.Taking() {
				up = append(up, b.addr.String())
			}
			if got := strings.Join(up, " "); got != want {
				t.Errorf("flows go to %q, want %q", got, want)
			}
		}
		say := func(list ...string) {
			h.tell(setOf(list...), nil)
			time.Sleep(time.Second)
		}
		check.set("10.0.0.9:1", errSick)
		p = started(t, next(config))
		is("10.0.0.1:1 10.0.0.2:1")

		say("10.0.0.1:1", "10.0.0.3:1", "10.0.0.9:1")
		is("10.0.0.1:1")
		time.Sleep(rise)
		is("10.0.0.1:1 10.0.0.3:1") // and the one that is sick never
		time.Sleep(10 * rise)
		is("10.0.0.1:1 10.0.0.3:1")

		q := next(config)
		reload(t, p, q) // which changes nothing
		p = q
		is("10.0.0.1:1 10.0.0.3:1")

		say("10.0.0.5:1", "10.0.0.6:1") // all are others
		is("10.0.0.5:1 10.0.0.6:1")

		q = next(`{"targets": ["10.0.0.5:1", "10.0.0.7:1"]}`)
		reload(t, p, q)
		p = q
		is("10.0.0.5:1")
		time.Sleep(rise)
		is("10.0.0.5:1 10.0.0.7:1")

		q = next(`{"targets": ["10.0.0.8:1"]}`)
		reload(t, p, q)
		p = q
		is("10.0.0.8:1")

		q = provision(t, `{"targets": ["10.0.0.8:1", "10.0.0.4:1"], "health": {"check": "none"}}`)
		reload(t, p, q)
		p = q
		is("10.0.0.8:1 10.0.0.4:1")
	})
}
