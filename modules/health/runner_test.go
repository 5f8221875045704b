package health

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
)

// slow is a check that takes what it is told, by backend.
type slow struct {
	Settings
	takes  func(netip.AddrPort) time.Duration
	result func(netip.AddrPort) error

	mu      sync.Mutex
	running map[netip.AddrPort]int
	now     int
	most    int
	twice   bool
}

func newSlow(t *testing.T) *slow {
	s := &slow{running: make(map[netip.AddrPort]int)}
	if err := s.Provision(caddy.Context{}); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *slow) Check(ctx context.Context, to netip.AddrPort) error {
	s.mu.Lock()
	s.running[to]++
	s.now++
	s.twice = s.twice || s.running[to] > 1
	s.most = max(s.most, s.now)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.running[to]--
		s.now--
		s.mu.Unlock()
	}()
	if s.takes != nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(s.takes(to)):
		}
	}
	if s.result != nil {
		return s.result(to)
	}
	return nil
}

type target struct {
	addr   netip.AddrPort
	rhythm Rhythm

	mu    sync.Mutex
	times []time.Time
	errs  []error
}

func (b *target) Addr() netip.AddrPort { return b.addr }
func (b *target) Rhythm() *Rhythm      { return &b.rhythm }
func (b *target) Checked(at time.Time, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.times = append(b.times, at)
	b.errs = append(b.errs, err)
}

func (b *target) heard() []time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]time.Time(nil), b.times...)
}

func newTargets(n int) (targets []Target) {
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})
		targets = append(targets, &target{addr: netip.AddrPortFrom(a, 7777)})
	}
	return targets
}

func start(t *testing.T, r *Runner, targets []Target) {
	if r.Limit == nil {
		r.Limit = NewLimit(256)
	}
	r.Start(targets)
}

func TestFirstChecksAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		list := newTargets(10)
		r := &Runner{Name: "a", Check: newSlow(t)}
		start(t, r, list)
		defer r.Stop()
		time.Sleep(DefaultInterval)
		synctest.Wait()
		for i, b := range list {
			heard := b.(*target).heard()
			if len(heard) != 1 {
				t.Fatalf("backend %d was checked %d times in the first interval, want once", i, len(heard))
			}
			slot := DefaultInterval / 10
			if at := heard[0].Sub(begin); at < time.Duration(i)*slot || at > time.Duration(i+1)*slot {
				t.Errorf("backend %d was checked after %v, want in slot %d of %v", i, at, i, slot)
			}
		}
	})
}

func TestPoolsOfOneBackendAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		first := make(map[time.Duration]bool)
		for _, name := range []string{"a", "b", "c", "d"} {
			list := newTargets(1)
			r := &Runner{Name: name, Check: newSlow(t)}
			start(t, r, list)
			defer r.Stop()
			defer func() { first[list[0].(*target).heard()[0].Sub(begin)] = true }()
		}
		time.Sleep(DefaultInterval)
		synctest.Wait()
		t.Cleanup(func() {
			if len(first) != 4 {
				t.Errorf("first checks at %v, want four times", first)
			}
		})
	})
}

func TestChecksKeepTheirInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTargets(1)
		s := newSlow(t)
		s.takes = func(netip.AddrPort) time.Duration { return 100 * time.Millisecond }
		r := &Runner{Check: s}
		start(t, r, list)
		defer r.Stop()
		time.Sleep(10*DefaultInterval + 100*time.Millisecond)
		synctest.Wait()
		heard := list[0].(*target).heard()
		if len(heard) != 10 {
			t.Fatalf("%d checks in ten intervals", len(heard))
		}
		for i := 1; i < len(heard); i++ {
			if d := heard[i].Sub(heard[i-1]); d != DefaultInterval {
				t.Errorf("checks %d and %d are %v apart", i-1, i, d)
			}
		}
	})
}

func TestSlowCheckDelaysNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTargets(4)
		s := newSlow(t)
		s.Timeout = new(caddy.Duration(7 * time.Second)) // longer than the interval
		s.takes = func(a netip.AddrPort) time.Duration {
			if a == list[0].Addr() {
				return time.Hour
			}
			return time.Millisecond
		}
		r := &Runner{Check: s}
		start(t, r, list)
		defer r.Stop()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		for _, b := range list[1:] {
			if n := len(b.(*target).heard()); n != 10 {
				t.Errorf("%v was checked %d times, want 10", b.Addr(), n)
			}
		}
		if s.twice {
			t.Error("two checks of one backend at once")
		}
		// A check takes seven seconds, and the next follows on its heels.
		if n := len(list[0].(*target).heard()); n != 2 {
			t.Errorf("the slow one was checked %d times, want 2", n)
		}
		if err := list[0].(*target).errs[0]; NoVerdict(err) {
			t.Errorf("a check that took too long gives no verdict: %v", err)
		}
	})
}

func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTargets(600)
		s := newSlow(t)
		s.Timeout = new(caddy.Duration(10 * time.Second))
		s.takes = func(netip.AddrPort) time.Duration { return 1900 * time.Millisecond }
		r := &Runner{Check: s, Limit: NewLimit(256)}
		start(t, r, list)
		defer r.Stop()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if s.most != 256 {
			t.Errorf("at most %d checks at once, want 256", s.most)
		}
		for _, b := range list {
			if len(b.(*target).heard()) == 0 {
				t.Fatalf("%v was never checked", b.Addr())
			}
		}
	})
}

// Two configs with the same backends, one taking over from the other.
func TestReloadKeepsTheRhythm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTargets(3)
		s := newSlow(t)
		s.takes = func(netip.AddrPort) time.Duration { return 400 * time.Millisecond }
		old := &Runner{Name: "p", Check: s}
		start(t, old, list)
		for range 7 {
			time.Sleep(1300 * time.Millisecond)
			r := &Runner{Name: "p", Check: s}
			start(t, r, list)
			time.Sleep(200 * time.Millisecond) // both run
			old.Stop()
			old = r
		}
		defer old.Stop()
		time.Sleep(4 * time.Second)
		synctest.Wait()
		if s.twice {
			t.Error("two checks of one backend at once")
		}
		for _, b := range list {
			heard := b.(*target).heard()
			for i := 1; i < len(heard); i++ {
				// A check that a config's end has cut short is made again.
				if d := heard[i].Sub(heard[i-1]); d < DefaultInterval || d > DefaultInterval*3/2 {
					t.Errorf("%v: checks %v apart", b.Addr(), d)
				}
			}
			if len(heard) < 5 {
				t.Errorf("%v was checked %d times in 14 s", b.Addr(), len(heard))
			}
		}
	})
}

func TestSetChangesTheTargets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTargets(3)
		r := &Runner{Check: newSlow(t)}
		start(t, r, list[:2])
		defer r.Stop()
		time.Sleep(10 * time.Second)
		r.Set(list[1:])
		time.Sleep(10 * time.Second)
		synctest.Wait()
		for i, want := range []int{5, 10, 5} {
			if n := len(list[i].(*target).heard()); n != want {
				t.Errorf("backend %d was checked %d times, want %d", i, n, want)
			}
		}
	})
}

func TestPanicIsNoVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTargets(1)
		s := newSlow(t)
		s.result = func(netip.AddrPort) error { panic("no such luck") }
		r := &Runner{Check: s}
		start(t, r, list)
		defer r.Stop()
		time.Sleep(2 * DefaultInterval)
		synctest.Wait()
		errs := list[0].(*target).errs
		if len(errs) != 2 || !NoVerdict(errs[0]) {
			t.Errorf("results %v, want two without a verdict", errs)
		}
	})
}

func TestStopEndsChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTargets(5)
		s := newSlow(t)
		s.Timeout = new(caddy.Duration(time.Hour))
		s.takes = func(netip.AddrPort) time.Duration { return 2 * time.Hour }
		s.result = func(netip.AddrPort) error { return errors.New("late") }
		r := &Runner{Check: s, Limit: NewLimit(2)}
		start(t, r, list)
		time.Sleep(10 * time.Second)
		before := time.Now()
		r.Stop()
		if d := time.Since(before); d != 0 {
			t.Errorf("Stop took %v", d)
		}
		for _, b := range list {
			if n := len(b.(*target).heard()); n != 0 {
				t.Errorf("%v has %d results of checks that were stopped", b.Addr(), n)
			}
		}
	})
}
