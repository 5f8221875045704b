package pool

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

func init() { caddy.RegisterModule(new(heldSource)) }

// heldSource is a source that a test holds by the key that its config names.
type heldSource struct {
	discovery.Settings

	Key string `json:"key,omitempty"`
}

func (*heldSource) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "wayhouse.sources.held", New: func() caddy.Module { return new(heldSource) }}
}

func (s *heldSource) List(ctx context.Context) (discovery.Set, error) { return heldBy(s.Key).list(ctx) }

func (s *heldSource) Watch(ctx context.Context, changed func()) error {
	h := heldBy(s.Key)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-h.signs:
			changed()
		}
	}
}

// hand is what a test holds of a source.
type hand struct {
	signs chan struct{}

	mu    sync.Mutex
	set   discovery.Set
	err   error
	takes time.Duration
	asked int
}

var hands sync.Map

func heldBy(key string) *hand {
	h, _ := hands.Load(key)
	return h.(*hand)
}

func (h *hand) list(context.Context) (discovery.Set, error) {
	h.mu.Lock()
	set, err, takes := h.set, h.err, h.takes
	h.asked++
	h.mu.Unlock()
	time.Sleep(takes)
	return set, err
}

// tell changes what the source says, and has it say so.
func (h *hand) tell(set discovery.Set, err error) {
	h.mu.Lock()
	h.set, h.err = set, err
	h.mu.Unlock()
	select {
	case h.signs <- struct{}{}:
	default:
	}
}

func (h *hand) questions() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked
}

// hold holds a source, and returns what a pool's config says of it.
func hold(t testing.TB, endpoints ...discovery.Endpoint) (*hand, string) {
	t.Helper()
	h := &hand{signs: make(chan struct{}, 1), set: discovery.Set{Endpoints: endpoints}}
	hands.Store(t.Name(), h)
	t.Cleanup(func() { hands.Delete(t.Name()) })
	return h, fmt.Sprintf(`"source": {"source": "held", "key": %q, "refresh_interval": "1h"}`, t.Name())
}

// ep reads "ip:port wN pN mN".
func ep(s string) discovery.Endpoint {
	words := strings.Fields(s)
	e := discovery.Endpoint{Addr: netip.MustParseAddrPort(words[0])}
	for _, w := range words[1:] {
		var n int64
		fmt.Sscan(w[1:], &n)
		switch w[0] {
		case 'w':
			e.Weight = uint32(n)
		case 'p':
			e.Priority = uint16(n)
		case 'm':
			e.MaxSessions = n
		}
	}
	return e
}

func setOf(list ...string) (s discovery.Set) {
	for _, e := range list {
		s.Endpoints = append(s.Endpoints, ep(e))
	}
	return s
}

func TestSourceConfig(t *testing.T) {
	_, source := hold(t)
	for in, want := range map[string]string{
		`{"targets": ["10.0.0.1:1"], ` + source + `}`:                                        "source: there are targets too; a pool has either",
		`{"source": null}`:                                                                   "targets: none",
		`{"source": "nowhere"}`:                                                              `source: no source is named "nowhere"`,
		`{"source": {"source": "hld"}}`:                                                      `source.source: there is no wayhouse.sources.hld; did you mean held?`,
		`{"source": {"source": "held", "kye": "x"}}`:                                         `source.kye: `,
		`{"source": {"source": "held", "refresh_interval": "1ms"}}`:                          `source.refresh_interval: 1ms is less than 1s`,
		`{` + source + `, "balancer": {"policy": "weighted", "weights": {"a.test:1": 2}}}`:   `balancer.weights: "a.test:1" is no address`,
		`{` + source + `, "balancer": {"policy": "weighted", "weights": {"10.0.0.1:1": 2}}}`: "",
	} {
		ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
		p, err := parse(t, in).Provision(ctx, t.Name())
		cancel()
		if want == "" {
			if err != nil {
				t.Errorf("%s: %v", in, err)
				continue
			}
			p.Cleanup()
		} else if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s", in, err, want)
		}
	}
}

func TestSourceNamesBackends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, source := hold(t, ep("10.0.0.2:1 w3"), ep("10.0.0.1:1"))
		p := provision(t, `{`+source+`, `+none+`, "on_backend_removed": "close", "balancer": {"policy": "weighted", "weights": {"10.0.0.3:1": 9}}}`)
		w := watch(p)
		begin(t, p)
		if got := addrs(p); got != "10.0.0.1:1 10.0.0.2:1" || p.backend(t, "10.0.0.2:1").Weight() != 3 {
			t.Errorf("after Start: %s", got)
		}
		if o := p.Backends()[0].Origin(); p.Discovery() != "held" || o != FromSource {
			t.Errorf("from %s, %v", p.Discovery(), o)
		}
		one := p.backend(t, "10.0.0.1:1")
		h.tell(setOf("10.0.0.1:1 w7 m2", "10.0.0.3:1 w4"), nil)
		time.Sleep(time.Second)
		if got := addrs(p); got != "10.0.0.1:1 10.0.0.3:1" {
			t.Errorf("after a change: %s", got)
		}
		if p.backend(t, "10.0.0.1:1") != one || one.Weight() != 7 || one.capacity.Load() != 2 {
			t.Errorf("a backend that stays weighs %d, and may have %d flows", one.Weight(), one.capacity.Load())
		}
		if n := p.backend(t, "10.0.0.3:1").Weight(); n != 9 {
			t.Errorf("a weight of the config is %d, want 9", n)
		}
		w.want(t, event{time.Second / 2, "removed 10.0.0.2:1 close"})

		for _, bad := range []error{errors.New("away"), nil} { // a failure, and an empty answer
			h.tell(discovery.Set{}, bad)
			time.Sleep(time.Second)
			if got := addrs(p); got != "10.0.0.1:1 10.0.0.3:1" {
				t.Errorf("after %v: %s", bad, got)
			}
		}
		h.tell(discovery.Set{Withdrawn: true}, nil)
		time.Sleep(time.Second)
		if _, r := p.Pick(balancer.Flow{}, nil); r != NoBackend || addrs(p) != "" {
			t.Errorf("withdrawn: %s, and a choice is %v", addrs(p), r)
		}
		h.tell(setOf("10.0.0.1:1"), nil)
		time.Sleep(time.Second)
		if got := addrs(p); got != "10.0.0.1:1" {
			t.Errorf("back again: %s", got)
		}
	})
	used(t, 0)
}

// Higher priorities wait for all lower ones to be down, disabled or tried.
func TestSourcePriorities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, source := hold(t, ep("10.0.0.1:1 p10"), ep("10.0.0.2:1 p10"), ep("10.0.0.3:1 p20"), ep("10.0.0.4:1 p0 m1"))
		p := begin(t, provision(t, `{`+source+`, "health": {"check": "none", "interval": "1h"}, "balancer": {"policy": "first_available"}}`))
		pick := func(want string, tried ...netip.AddrPort) *Backend {
			t.Helper()
			synctest.Wait()
			if b, _, known := p.Peek(balancer.Flow{}); len(tried) == 0 && (!known || addr(b) != want) {
				t.Errorf("Peek says %s, want %s", addr(b), want)
			}
			b, _ := p.Pick(balancer.Flow{}, tried)
			if addr(b) != want {
				t.Errorf("got %s, want %s", addr(b), want)
			}
			return b
		}
		four := p.backend(t, "10.0.0.4:1")
		flow := pick("10.0.0.4:1")
		if candidate, room := p.Takes(four); !candidate || room {
			t.Errorf("Takes of one that is full: %v, %v", candidate, room)
		}
		if candidate, _ := p.Takes(p.backend(t, "10.0.0.1:1")); candidate {
			t.Error("one that waits is a candidate")
		}
		if b, r := p.Pick(balancer.Flow{}, nil); r != AtCapacity {
			t.Errorf("while the best is full: %s, %v", addr(b), r)
		}
		flow.Release()
		pick("10.0.0.1:1", four.addr).Release() // tried, and not reached
		fell(four)
		pick("10.0.0.1:1").Release()
		p.backend(t, "10.0.0.1:1").SetState(Disabled)
		pick("10.0.0.2:1").Release()
		fell(p.backend(t, "10.0.0.2:1"))
		pick("10.0.0.3:1").Release()
		rose(four)
		pick("10.0.0.4:1").Release()
	})
}

func TestSourceCapacityIsBelowThePools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, source := hold(t, ep("10.0.0.1:1 m1"), ep("10.0.0.2:1 m9"), ep("10.0.0.3:1"))
		p := begin(t, provision(t, `{`+source+`, `+none+`, "per_backend": {"max_sessions": 3}}`))
		n := make(map[string]int)
		for {
			b, r := p.Pick(balancer.Flow{}, nil)
			if r != OK {
				break
			}
			n[addr(b)]++
			defer b.Release()
		}
		if got := fmt.Sprint(n); got != "map[10.0.0.1:1:1 10.0.0.2:1:3 10.0.0.3:1:3]" {
			t.Errorf("flows %s", got)
		}
	})
}

// Start waits a second for a source that has never answered, and not for one
// that has.
func TestSourceAndStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, source := hold(t, ep("10.0.0.1:1"))
		h.takes = 3 * time.Second
		began := time.Now()
		p := provision(t, `{`+source+`, `+none+`}`)
		started(t, p)
		if d := time.Since(began); d != time.Second || addrs(p) != "" {
			t.Errorf("Start took %v, and has %s", d, addrs(p))
		}
		time.Sleep(3 * time.Second)
		if got := addrs(p); got != "10.0.0.1:1" {
			t.Errorf("later: %s", got)
		}
		down := p.backend(t, "10.0.0.1:1")
		fell(down)

		began = time.Now()
		next := provision(t, `{`+source+`, `+none+`, "max_tries": 3}`)
		reload(t, p, next)
		if d := time.Since(began); d != 0 || addrs(next) != "10.0.0.1:1" || next.Backends()[0] != down || down.Healthy() {
			t.Errorf("a reload took %v, and has %s", d, addrs(next))
		}
		time.Sleep(10 * time.Second)
		if n := h.questions(); n != 1 {
			t.Errorf("asked %d times, want once", n)
		}

		// Other options are another source: it is asked.
		other := provision(t, `{"source": {"source": "held", "key": "`+t.Name()+`"}, `+none+`}`)
		reload(t, next, other)
		time.Sleep(5 * time.Second)
		if n := h.questions(); n != 2 || addrs(other) != "10.0.0.1:1" {
			t.Errorf("asked %d times, want twice; backends %s", n, addrs(other))
		}
	})
	used(t, 0)
}

// A failing source does not hold Start for longer than its first answer.
func TestSourceThatFailsAtStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, source := hold(t)
		h.err = errors.New("away")
		began := time.Now()
		p := begin(t, provision(t, `{`+source+`, `+none+`}`))
		if d := time.Since(began); d != 0 || addrs(p) != "" {
			t.Errorf("Start took %v, and has %s", d, addrs(p))
		}
		h.tell(setOf("10.0.0.1:1"), nil)
		time.Sleep(2 * time.Second)
		if got := addrs(p); got != "10.0.0.1:1" {
			t.Errorf("when it works: %s", got)
		}
	})
}

// BenchmarkReset is one change of a set of ten thousand.
func BenchmarkReset(b *testing.B) {
	var lists [2][]hostport.Target
	var first []string
	for i := range 10_000 {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}), 7)
		first = append(first, fmt.Sprintf("%q", a))
		lists[0] = append(lists[0], hostport.Target{Addr: a, Port: 7})
		if i == 5000 {
			a = netip.MustParseAddrPort("10.8.0.1:7")
		}
		lists[1] = append(lists[1], hostport.Target{Addr: a, Port: 7})
	}
	p := provision(b, `{"targets": [`+strings.Join(first, ",")+`], `+none+`, "balancer": {"policy": "weighted"}}`)
	if err := p.Start(); err != nil {
		b.Fatal(err)
	}
	p.cancel() // from here on the set is changed by hand
	p.wg.Wait()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		p.targets = lists[(i+1)%2]
		p.reset()
		p.act(false)
	}
	end(b, p)
}
