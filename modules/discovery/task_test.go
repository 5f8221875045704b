package discovery

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

	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// held is a source that the test holds.
type held struct {
	Settings
	begin time.Time

	mu      sync.Mutex
	set     Set
	err     error
	panics  bool
	takes   time.Duration
	lists   []time.Duration // when List was called
	watches []time.Duration
	listing bool
	overlap bool
	watch   error // what Watch returns at once; nil: it waits
	changed func()
	closed  bool
}

func (h *held) List(ctx context.Context) (Set, error) {
	h.mu.Lock()
	h.lists = append(h.lists, time.Since(h.begin))
	h.overlap = h.overlap || h.listing
	h.listing = true
	set, err, panics, takes := h.set, h.err, h.panics, h.takes
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		h.listing = false
		h.mu.Unlock()
	}()
	if _, ok := ctx.Deadline(); !ok {
		return Set{}, errors.New("there is no deadline")
	}
	time.Sleep(takes)
	if panics {
		panic("a guest's mistake")
	}
	return set, err
}

func (h *held) Watch(ctx context.Context, changed func()) error {
	h.mu.Lock()
	h.watches = append(h.watches, time.Since(h.begin))
	h.changed = changed
	err, panics := h.watch, h.panics
	h.mu.Unlock()
	if panics {
		panic("a guest's mistake")
	}
	if err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func (h *held) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	if h.listing {
		h.overlap = true
	}
	return nil
}

func (h *held) tell(set Set, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.set, h.err = set, err
}

// change changes h while it is used.
func (h *held) change(f func(*held)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f(h)
}

// state is whether h is closed, and whether it was called when it must not be.
func (h *held) state() (closed, overlap bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.closed, h.overlap
}

// sign tells of a change.
func (h *held) sign() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.changed()
}

func (h *held) calls() []time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.lists)
}

// use starts a pool's use of the task of h.
func use(t *testing.T, k *task, pool string) (*Use, *observer.ObservedLogs) {
	t.Helper()
	core, logs := observer.New(zapcore.InfoLevel)
	u := &Use{name: "held", task: k, changed: make(chan struct{}, 1)}
	u.Start(pool, zap.New(core))
	return u, logs
}

func newHeld(t *testing.T) (*held, *task) {
	t.Helper()
	h := &held{begin: time.Now()}
	if err := h.Provision(ctxOf(t)); err != nil {
		t.Fatal(err)
	}
	return h, newTask(taskKey{"held", t.Name()}, h)
}

func set(addrs ...string) Set {
	var s Set
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, Endpoint{Addr: netip.MustParseAddrPort(a)})
	}
	return s
}

func shown(u *Use) string {
	list, _ := u.Known()
	var s []string
	for _, e := range list {
		s = append(s, e.Addr.String())
	}
	return strings.Join(s, " ")
}

func TestRhythm(t *testing.T) {
	broken := errors.New("away")
	for name, tc := range map[string]struct {
		set  Set
		err  error
		want []time.Duration // seconds between questions, at most; a sixteenth less at least
	}{
		"refresh_interval":   {set("10.0.0.1:1"), nil, []time.Duration{10, 10, 10}},
		"a TTL":              {Set{Endpoints: set("10.0.0.1:1").Endpoints, TTL: 30 * time.Second}, nil, []time.Duration{30, 30}},
		"a TTL of no time":   {Set{Endpoints: set("10.0.0.1:1").Endpoints, TTL: 1}, nil, []time.Duration{1, 1, 1}},
		"a TTL of a week":    {Set{Endpoints: set("10.0.0.1:1").Endpoints, TTL: 7 * 24 * time.Hour}, nil, []time.Duration{300, 300}},
		"failures":           {Set{}, broken, []time.Duration{1, 2, 4, 8, 16, 30, 30}},
		"in part":            {Set{Endpoints: set("10.0.0.1:1").Endpoints, Incomplete: broken}, nil, []time.Duration{1, 2, 4, 8, 10, 10}},
		"empty":              {Set{}, nil, []time.Duration{10, 10}},
		"empty, with a TTL":  {Set{TTL: time.Minute}, nil, []time.Duration{60, 60}},
		"withdrawn, a while": {Set{Withdrawn: true, TTL: 20 * time.Second}, nil, []time.Duration{20, 20}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, k := newHeld(t)
				h.tell(tc.set, tc.err)
				u, _ := use(t, k, "p")
				defer u.Stop()
				for len(h.calls()) <= len(tc.want) {
					time.Sleep(100 * time.Millisecond)
					if time.Since(h.begin) > time.Hour {
						t.Fatalf("asked after %v", h.calls())
					}
				}
				calls := h.calls()
				if calls[0] != 0 {
					t.Errorf("first asked after %v", calls[0])
				}
				for i, most := range tc.want {
					most *= time.Second
					least := max(most-most/16-1, time.Second)
					if got := calls[i+1] - calls[i]; got > most || got < least {
						t.Errorf("question %d came %v after the one before, want %v to %v", i+1, got, least, most)
					}
				}
			})
		})
	}
}

func TestSignsAreCoalesced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, k := newHeld(t)
		h.tell(Set{Endpoints: set("10.0.0.1:1").Endpoints, TTL: 5 * time.Minute}, nil)
		u, _ := use(t, k, "p")
		defer u.Stop()
		synctest.Wait()
		time.Sleep(10 * time.Second)
		h.sign()
		time.Sleep(300 * time.Millisecond)
		h.sign() // 300 ms later: quiet at 10.8 s
		time.Sleep(10 * time.Second)
		base := time.Since(h.begin)
		for range 90 { // 9 s without quiet: at 5 s, and 5 s after the next sign
			h.sign()
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(10 * time.Second)
		want := []time.Duration{0, 10*time.Second + 800*time.Millisecond, base + 5*time.Second, base + 9*time.Second + 400*time.Millisecond}
		got := h.calls()
		if len(got) != len(want) {
			t.Fatalf("asked after %v, want %v", got, want)
		}
		for i := range got {
			if d := (got[i] - want[i]).Abs(); d > 100*time.Millisecond {
				t.Errorf("asked after %v, want %v", got, want)
			}
		}
	})
}

// A sign that comes while the source is asked is about something that the
// answer may lack.
func TestSignWhileAsking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, k := newHeld(t)
		h.takes = 3 * time.Second
		h.tell(Set{Endpoints: set("10.0.0.1:1").Endpoints, TTL: 5 * time.Minute}, nil)
		u, _ := use(t, k, "p")
		defer u.Stop()
		time.Sleep(2 * time.Second)
		h.tell(Set{Endpoints: set("10.0.0.2:1").Endpoints, TTL: 5 * time.Minute}, nil)
		h.sign()
		time.Sleep(1100 * time.Millisecond)
		if got := shown(u); got != "10.0.0.1:1" {
			t.Errorf("after the first answer: %s", got)
		}
		time.Sleep(5 * time.Second)
		if got := shown(u); got != "10.0.0.2:1" || len(h.calls()) != 2 {
			t.Errorf("%s after %v: the older answer stayed", got, h.calls())
		}
		if _, overlap := h.state(); overlap {
			t.Error("List was called twice at once")
		}
	})
}

// TestFaults is what becomes of a set, answer by answer.
func TestFaults(t *testing.T) {
	many := Set{}
	for i := range 10_000 {
		many.Endpoints = append(many.Endpoints, Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}), 7)})
	}
	tooMany := Set{}
	for i := range maxEndpoints + 3 {
		tooMany.Endpoints = append(tooMany.Endpoints, Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}), 7)})
	}
	type step struct {
		set     Set
		err     error
		want    string
		size    int
		result  string
		skipped string
	}
	for name, steps := range map[string][]step{
		"empty keeps": {
			{set("10.0.0.1:1", "10.0.0.2:1"), nil, "10.0.0.1:1 10.0.0.2:1", 2, "ok", ""},
			{Set{}, nil, "10.0.0.1:1 10.0.0.2:1", 2, "empty", ""},
		},
		"error keeps": {
			{set("10.0.0.1:1"), nil, "10.0.0.1:1", 1, "ok", ""},
			{set("10.0.0.9:1"), errors.New("away"), "10.0.0.1:1", 1, "error", ""},
		},
		"only bad addresses keep": {
			{set("10.0.0.1:1"), nil, "10.0.0.1:1", 1, "ok", ""},
			{set("0.0.0.0:1", "224.0.0.1:1", "10.0.0.2:0", "[ff02::1]:1", "[::]:1", "255.255.255.255:1", "[::ffff:0.0.0.0]:1", "[fe80::1%eth0]:1"), nil, "10.0.0.1:1", 1, "empty", "invalid"},
		},
		"withdrawn clears": {
			{set("10.0.0.1:1"), nil, "10.0.0.1:1", 1, "ok", ""},
			{Set{Withdrawn: true}, nil, "", 0, "withdrawn", ""},
		},
		"withdrawn with backends clears": {
			{set("10.0.0.1:1"), nil, "10.0.0.1:1", 1, "ok", ""},
			{Set{Withdrawn: true, Endpoints: set("10.0.0.1:1").Endpoints}, nil, "", 0, "withdrawn", ""},
		},
		"withdrawn by a failure keeps": {
			{set("10.0.0.1:1"), nil, "10.0.0.1:1", 1, "ok", ""},
			{Set{Withdrawn: true}, errors.New("away"), "10.0.0.1:1", 1, "error", ""},
		},
		"duplicate":     {{set("10.0.0.2:1", "10.0.0.1:1", "10.0.0.2:1"), nil, "10.0.0.1:1 10.0.0.2:1", 2, "ok", "duplicate"}},
		"v4-mapped":     {{set("[::ffff:10.0.0.1]:1"), nil, "10.0.0.1:1", 1, "ok", ""}},
		"v4 and mapped": {{set("[::ffff:10.0.0.1]:1", "10.0.0.1:1"), nil, "10.0.0.1:1", 1, "ok", "duplicate"}},
		"10k":           {{many, nil, "-", 10_000, "ok", ""}, {set("10.0.0.1:1"), nil, "10.0.0.1:1", 1, "ok", ""}},
		"too many":      {{tooMany, nil, "-", maxEndpoints, "ok", "too_many"}},
		"in order":      {{Set{Ordered: true, Endpoints: set("10.0.0.2:1", "10.0.0.1:1").Endpoints}, nil, "10.0.0.2:1 10.0.0.1:1", 2, "ok", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, k := newHeld(t)
				pool := t.Name()
				left := func(reason string) float64 {
					return testutil.ToFloat64(skippedTotal.WithLabelValues(pool, "held", reason))
				}
				var u *Use
				for i, s := range steps {
					counted := func() float64 { return testutil.ToFloat64(refreshTotal.WithLabelValues(pool, "held", s.result)) }
					before, leftBefore := counted(), make(map[string]float64)
					for _, r := range []string{"invalid", "duplicate", "too_many"} {
						leftBefore[r] = left(r)
					}
					h.tell(s.set, s.err)
					if u == nil {
						u, _ = use(t, k, pool)
						defer u.Stop()
					} else {
						h.sign()
						time.Sleep(quiet)
					}
					synctest.Wait()
					if got, _ := u.Known(); s.want != "-" && shown(u) != s.want || len(got) != s.size {
						t.Errorf("step %d: %d backends, %.100s, want %d, %s", i, len(got), shown(u), s.size, s.want)
					}
					if got := counted() - before; got != 1 {
						t.Errorf("step %d: %v counted as %s, want 1", i, got, s.result)
					}
					for _, r := range []string{"invalid", "duplicate", "too_many"} {
						if n := left(r) - leftBefore[r]; (n > 0) != (r == s.skipped) {
							t.Errorf("step %d: %v skipped as %s", i, n, r)
						}
					}
				}
			})
		})
	}
}

func TestGuestPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, k := newHeld(t)
		h.tell(set("10.0.0.1:1"), nil)
		u, logs := use(t, k, "p")
		defer u.Stop()
		synctest.Wait()
		h.change(func(h *held) { h.panics = true })
		time.Sleep(11 * time.Second)
		if got := shown(u); got != "10.0.0.1:1" {
			t.Errorf("backends %q", got)
		}
		if n := logs.FilterMessage("discovery source panicked").Len(); n == 0 {
			t.Error("nothing is logged")
		}
		h.change(func(h *held) { h.panics = false })
		h.tell(set("10.0.0.2:1"), nil)
		time.Sleep(31 * time.Second)
		if got := shown(u); got != "10.0.0.2:1" {
			t.Errorf("afterwards: backends %q", got)
		}
		if n := logs.FilterMessage("discovery source works again").Len(); n != 1 {
			t.Errorf("%d lines that it works again", n)
		}
	})
}

func TestWatchIsTriedAgain(t *testing.T) {
	for name, broken := range map[string]func(*held){
		"fails":  func(h *held) { h.watch = errors.New("not allowed") },
		"panics": func(h *held) { h.panics = true },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, k := newHeld(t)
				broken(h)
				u, logs := use(t, k, "p")
				defer u.Stop()
				time.Sleep(200 * time.Second)
				want := "[0s 5s 15s 35s 1m15s 2m15s 3m15s]"
				h.mu.Lock()
				got := fmt.Sprint(h.watches)
				h.mu.Unlock()
				if got != want {
					t.Errorf("watched after %s, want %s", got, want)
				}
				if n := logs.FilterMessage("discovery source does not tell of changes").Len(); n != 1 {
					t.Errorf("%d warnings in one outage", n)
				}
			})
		})
	}
}

func TestOneWarningForAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, k := newHeld(t)
		h.tell(Set{}, errors.New("away"))
		u, logs := use(t, k, "p")
		defer u.Stop()
		time.Sleep(10 * time.Minute)
		h.tell(set("10.0.0.1:1"), nil)
		time.Sleep(time.Minute)
		h.tell(Set{}, errors.New("away"))
		time.Sleep(time.Minute)
		if n := logs.FilterMessage("discovery source failed").Len(); n != 2 {
			t.Errorf("%d warnings in two outages", n)
		}
	})
}

// Pools share a task, a reload keeps it, and it ends with its last user.
func TestTaskOutlivesConfigs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, k := newHeld(t)
		h.tell(Set{Endpoints: set("10.0.0.1:1").Endpoints, TTL: time.Minute}, nil)
		counted := func() float64 { return testutil.ToFloat64(refreshTotal.WithLabelValues("a", "held", "ok")) }
		before := counted()
		a, _ := use(t, k, "a")
		b, _ := use(t, k, "b")
		synctest.Wait()
		next, _ := use(t, k, "a") // a reload: the new config starts, the old one stops
		if _, asked := next.Known(); !asked || shown(next) != "10.0.0.1:1" {
			t.Error("a new config does not know what the old one does")
		}
		a.Stop()
		a.Stop() // as after a Start that has failed
		b.Stop()
		time.Sleep(10 * time.Second)
		if got := h.calls(); len(got) != 1 {
			t.Errorf("asked %d times, want once", len(got))
		}
		if n := counted() - before; n != 1 {
			t.Errorf("pool a counts %v questions, want 1", n)
		}
		h.change(func(h *held) { h.takes = 5 * time.Second })
		h.sign()
		time.Sleep(time.Second) // it is being asked
		next.Stop()
		k.Destruct()
		if closed, _ := h.state(); closed {
			t.Error("the source is closed while it is asked")
		}
		time.Sleep(10 * time.Second)
		if closed, overlap := h.state(); !closed || overlap {
			t.Errorf("the source is closed: %v, called when it must not be: %v", closed, overlap)
		}
		if got := h.calls(); len(got) != 2 {
			t.Errorf("asked %d times, the last after its end", len(got))
		}
	})
}

// A task that nobody uses for a moment does not ask twice at once.
func TestTaskBeginsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, k := newHeld(t)
		h.takes = 5 * time.Second
		h.tell(set("10.0.0.1:1"), nil)
		a, _ := use(t, k, "a")
		time.Sleep(time.Second)
		a.Stop()
		b, _ := use(t, k, "a")
		time.Sleep(10 * time.Second)
		if got := fmt.Sprint(h.calls()); got != "[0s 5s]" || shown(b) != "10.0.0.1:1" {
			t.Errorf("asked after %s, backends %s", got, shown(b))
		}
		b.Stop()
		k.Destruct()
		synctest.Wait()
		if closed, overlap := h.state(); !closed || overlap {
			t.Errorf("the source is closed: %v, called when it must not be: %v", closed, overlap)
		}
	})
}

func TestTaskThatNeverRan(t *testing.T) {
	h, k := newHeld(t)
	k.Destruct()
	if !h.closed {
		t.Error("the source is not closed")
	}
}

// While two configs have a pool of one name, a question counts once for it.
func TestPoolOfTwoConfigsCountsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, k := newHeld(t)
		h.tell(set("10.0.0.1:1"), nil)
		old, _ := use(t, k, t.Name())
		defer old.Stop()
		next, _ := use(t, k, t.Name())
		defer next.Stop()
		counted := func() float64 { return testutil.ToFloat64(refreshTotal.WithLabelValues(t.Name(), "held", "ok")) }
		synctest.Wait()
		before := counted()
		h.sign()
		time.Sleep(time.Second)
		if n := counted() - before; n != 1 {
			t.Errorf("one question counts as %v", n)
		}
	})
}
