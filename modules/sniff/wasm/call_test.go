package wasm

import (
	"bytes"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func sniffBytes(s *sniffer, in string) string {
	var h sniff.Hint
	return result(s.Sniff(&sniff.Input{Bytes: []byte(in)}, &h), &h)
}

// A recursion without an end must not cost more stack than a deep one may.
func TestRecursionIsCheap(t *testing.T) {
	s := one(t, slow, "recursion")
	sniffBytes(s, "x")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if got := sniffBytes(s, "x"); got != "trap" {
		t.Errorf("%s, want a trap", got)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 16<<20 {
		t.Errorf("a call allocates %d bytes", n)
	}
}

// Whatever a call writes, the next one finds zeros.
func TestMemoryIsFresh(t *testing.T) {
	m, err := newMemory(defaultMemory)
	if err != nil {
		t.Fatal(err)
	}
	defer m.release()
	for _, size := range []uint64{0, pageSize, 17 * pageSize, clearMax, clearMax + pageSize, defaultMemory, pageSize} {
		if b := m.Reallocate(0); len(b) != 0 {
			t.Fatalf("%d bytes, want none", len(b))
		}
		b := m.Reallocate(size)
		if uint64(len(b)) != size || cap(b) != len(b) {
			t.Fatalf("%d bytes of %d, want %d", len(b), cap(b), size)
		}
		if i := slices.IndexFunc(b, func(c byte) bool { return c != 0 }); i >= 0 {
			t.Fatalf("byte %d of %d is %#x", i, size, b[i])
		}
		for i := range b {
			b[i] = 0xa5
		}
		if err := m.reset(); err != nil {
			t.Fatal(err)
		}
	}
	if b := m.Reallocate(defaultMemory + 1); b != nil {
		t.Errorf("%d bytes beyond the cap", len(b))
	}
}

// A timeout closes an instance without freeing its memory, and a trap leaves
// it in any state. Neither may be seen by the next call, of any module.
func TestNothingIsLeftOfACall(t *testing.T) {
	h := hostOf(t, caddy.Duration(20*time.Millisecond), map[string][]byte{
		"state.wasm": guest(t, "state"), "hog.wasm": guest(t, "memory-hog"), "loop.wasm": guest(t, "loop"), "trap.wasm": guest(t, "trap"), "echo.wasm": guest(t, "input-echo"),
	})
	for range 3 {
		for _, name := range []string{"hog", "loop", "trap", "echo", "state", "state"} {
			h.loaded[name].breaker = new(breaker)
			h.engine.quiet()
			var hint sniff.Hint
			v := h.loaded[name].Sniff(&sniff.Input{Bytes: []byte("abc")}, &hint)
			if name != "state" {
				continue
			}
			if v == sniff.Undecided && hint.Fault == sniff.Timeout {
				continue // a slow machine
			}
			if v != sniff.Recognised || string(hint.Key) != "1" {
				t.Errorf("state has counted %s calls (%v), want 1", hint.Key, v)
			}
		}
	}
	if n := len(h.engine.memories); n > cap(h.engine.slots) {
		t.Errorf("%d memories for %d slots", n, cap(h.engine.slots))
	}
}

func TestConcurrentCalls(t *testing.T) {
	h := hostOf(t, slow, map[string][]byte{"a.wasm": guest(t, "ok-host"), "b.wasm": guest(t, "memory-17"), "c.wasm": guest(t, "trap")})
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			var hint sniff.Hint
			for j := range 50 {
				want := fmt.Sprintf("p%d-%d.example.com", i, j)
				in := sniff.Input{Bytes: []byte("HOST:" + want)}
				if v := h.loaded["a"].Sniff(&in, &hint); v != sniff.Recognised || string(hint.Host) != want {
					t.Errorf("%v with host %s (fault %d), want %s", v, hint.Host, hint.Fault, want)
					return
				}
				hint.Reset()
				if v := h.loaded["b"].Sniff(&in, &hint); v != sniff.Recognised || string(hint.Key) != "17" {
					t.Errorf("%v with key %s (fault %d), want 17", v, hint.Key, hint.Fault)
				}
				hint.Reset()
				if v := h.loaded["c"].Sniff(&in, &hint); v != sniff.Undecided {
					t.Errorf("%v of a module that traps", v)
				}
				hint.Reset()
			}
		})
	}
	wg.Wait()
}

// However many want to spin, a core stays free.
func TestSlots(t *testing.T) {
	s := one(t, caddy.Duration(20*time.Millisecond), "loop")
	if n := cap(s.engine.slots); n != max(1, runtime.GOMAXPROCS(0)-1) {
		t.Errorf("%d slots", n)
	}
	results := make(chan string)
	for range 16 {
		go func() { results <- sniffBytes(s, "x") }()
	}
	count := make(map[string]int)
	for range 16 {
		count[<-results]++
	}
	if count["timeout"] == 0 || count["timeout"]+count["busy"]+count["broken"] != 16 {
		t.Errorf("16 calls ended with %v", count)
	}
	for range cap(s.engine.slots) {
		s.engine.slots <- struct{}{}
	}
	if got := sniffBytes(&sniffer{name: s.name, limits: limits{time.Nanosecond, s.limits.memory}, engine: s.engine, module: s.module, breaker: new(breaker), logger: s.logger}, "x"); got != "busy" {
		t.Errorf("without a slot: %s, want busy", got)
	}
	for range cap(s.engine.slots) {
		<-s.engine.slots
	}
}

func TestBreaker(t *testing.T) {
	now := time.Unix(1000, 0)
	b := new(breaker)
	call := func(weight int) (made, changed bool) {
		ok, probe := b.allow(now)
		if !ok {
			return false, false
		}
		return true, b.done(now, probe, weight)
	}
	for range 4 {
		call(weightTimeout)
	}
	call(0) // a good one: the count begins anew
	for i := range 5 {
		if made, changed := call(weightTimeout); !made || changed != (i == 4) {
			t.Fatalf("timeout %d: made %v, changed %v", i, made, changed)
		}
	}
	for _, wait := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		now = now.Add(wait*time.Second - 1)
		if made, _ := call(0); made {
			t.Fatalf("a call %v after the one before", wait*time.Second-1)
		}
		now = now.Add(1)
		ok, probe := b.allow(now)
		if !ok || !probe {
			t.Fatalf("no probe after %ds", wait)
		}
		if ok, _ := b.allow(now); ok {
			t.Fatal("two probes at once")
		}
		b.cancel(probe)
		if made, changed := call(weightTrap); !made || changed || !b.open() {
			t.Fatalf("a bad probe: made %v, changed %v, open %v", made, changed, b.open())
		}
	}
	now = now.Add(maxBreak)
	if made, changed := call(0); !made || !changed || b.open() {
		t.Fatalf("a good probe: made %v, changed %v, open %v", made, changed, b.open())
	}
	for i := range breakAt {
		if _, changed := call(weightTrap); changed != (i == breakAt-1) {
			t.Fatalf("trap %d: changed %v", i, changed)
		}
	}
}

// A call that began before the breaker opened does not close it.
func TestBreakerIgnoresLateCalls(t *testing.T) {
	now := time.Unix(1000, 0)
	b := new(breaker)
	b.allow(now)
	for range 5 {
		b.allow(now)
		b.done(now, false, weightTimeout)
	}
	if b.done(now, false, 0) || !b.open() {
		t.Error("the late call closed it")
	}
}

// The breaker belongs to the file: a reload keeps it, another file under the
// name begins anew.
func TestBreakerOverReloads(t *testing.T) {
	dir := fill(t, map[string][]byte{"x.wasm": guest(t, "trap")})
	load := func() *Host {
		h := &Host{Dir: dir, CallTimeout: new(slow)}
		if err := provision(t, h); err != nil {
			t.Fatal(err)
		}
		return h
	}
	h := load()
	for range breakAt {
		if got := sniffBytes(h.loaded["x"].sniffer, "x"); got != "trap" {
			t.Fatalf("%s, want trap", got)
		}
	}
	gauge := func() float64 {
		for _, c := range metrics.All() {
			if f, ok := c.(metrics.Func); ok && f.Descs[0] == breakerOpen {
				ch := make(chan prometheus.Metric, 10)
				f.Send(ch)
				close(ch)
				var v dto.Metric
				if m := <-ch; m == nil || m.Write(&v) != nil {
					t.Fatalf("the gauge is %v", m)
				}
				return v.GetGauge().GetValue()
			}
		}
		return -1
	}
	again := load()
	if got := sniffBytes(again.loaded["x"].sniffer, "x"); got != "broken" {
		t.Errorf("after a reload: %s, want broken", got)
	}
	if v := gauge(); v != 1 {
		t.Errorf("wayhouse_sniffer_breaker_open is %v, want 1", v)
	}
	if err := again.Put("x", guest(t, "key-only")); err != nil {
		t.Fatal(err)
	}
	if got := sniffBytes(load().loaded["x"].sniffer, "x"); got != "ok" {
		t.Errorf("with another file: %s, want ok", got)
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{"\x01", "\x04\x03\x00a2s", "\x06\x0b\x00example.com\x04\x00quic", "\x02\xff\xffa", "\x07\x00\x00\x00\x00", "\x02\x02\x00A.", "\x02\x01\x00\xff", ""} {
		f.Add([]byte(s))
	}
	var h sniff.Hint
	f.Fuzz(func(t *testing.T, b []byte) {
		in := bytes.Clone(b)
		h.Reset()
		ok := decode(b, &h)
		if !bytes.Equal(in, b) {
			t.Error("the guest's memory was changed")
		}
		if !ok {
			return
		}
		if len(b) == 0 || h.Reject != (b[0]&1 != 0) || h.HasHost != (b[0]&2 != 0) || h.HasKey != (b[0]&4 != 0) {
			t.Errorf("decode(% x) = %+v", b, h)
		}
		if !h.HasHost && len(h.Host) > 0 || !h.HasKey && len(h.Key) > 0 || len(h.Host)+len(h.Key) > len(b) {
			t.Errorf("decode(% x) = host %q, key %q", b, h.Host, h.Key)
		}
		if host := string(h.Host); strings.ContainsFunc(host, func(r rune) bool { return 'A' <= r && r <= 'Z' }) {
			t.Errorf("host %q", host)
		}
		if h.HasKey && !strings.Contains(string(b), string(h.Key)) {
			t.Errorf("key %q is not in % x", h.Key, b)
		}
	})
}

func BenchmarkCall(b *testing.B) {
	for _, name := range []string{"key-only", "ok-host", "memory-17"} {
		b.Run(name, func(b *testing.B) {
			s := one(b, slow, name)
			in := sniff.Input{Bytes: []byte("HOST:play.example.com")}
			var h sniff.Hint
			took := make([]time.Duration, 0, 1<<20)
			b.ReportAllocs()
			for b.Loop() {
				h.Reset()
				start := time.Now()
				if s.Sniff(&in, &h) != sniff.Recognised {
					b.Fatal("not recognised")
				}
				took = append(took, time.Since(start))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
			b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
		})
	}
}

// BenchmarkBesideTraffic makes 1,000 calls a second, as a listener of 1,000 new
// flows a second does, while 16,000 datagrams a second go to and fro over
// loopback in the same process.
func BenchmarkBesideTraffic(b *testing.B) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(stop)
	for range 2 {
		near, far := loopback(b), loopback(b)
		wg.Go(func() {
			defer far.Close()
			buf := make([]byte, 2048)
			for {
				n, from, err := far.ReadFrom(buf)
				if err != nil || n == 0 {
					return
				}
				far.WriteTo(buf[:n], from)
			}
		})
		wg.Go(func() {
			defer near.Close()
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			buf := make([]byte, 200)
			for {
				select {
				case <-stop:
					near.WriteTo(nil, far.LocalAddr())
					return
				case <-tick.C:
				}
				for range 4 {
					near.WriteTo(buf, far.LocalAddr())
				}
				for range 4 {
					near.ReadFrom(buf)
				}
			}
		})
	}
	s := one(b, caddy.Duration(defaultTimeout), "memory-17")
	in := sniff.Input{Bytes: []byte("HOST:play.example.com")}
	var h sniff.Hint
	var took []time.Duration
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for b.Loop() {
		<-tick.C
		h.Reset()
		start := time.Now()
		if s.Sniff(&in, &h) != sniff.Recognised {
			b.Fatal("not recognised")
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
}

func loopback(b *testing.B) net.PacketConn {
	b.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	return c
}
