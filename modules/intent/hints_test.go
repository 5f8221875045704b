package intent

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var (
	v4     = netip.MustParseAddr("203.0.113.7")
	mapped = netip.MustParseAddr("::ffff:203.0.113.7")
	v6     = netip.MustParseAddr("2001:db8::7")
)

func get(t *Hints, a netip.Addr) string {
	pool, _ := t.Get(a)
	return pool
}

func TestHints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHints(2)
		if !h.Set(mapped, "a", 10*time.Second) || !h.Set(v6, "b", 5*time.Second) {
			t.Fatal("there is no room")
		}
		if get(h, v4) != "a" || get(h, mapped) != "a" || get(h, v6) != "b" || h.Len() != 2 {
			t.Errorf("%q %q %q, %d", get(h, v4), get(h, mapped), get(h, v6), h.Len())
		}
		if h.Set(netip.MustParseAddr("203.0.113.8"), "c", time.Hour) {
			t.Error("a third hint in a table of two")
		}
		if !h.Set(v4, "c", 10*time.Second) || get(h, v4) != "c" {
			t.Error("a full table takes no other pool for a client it knows")
		}
		time.Sleep(5*time.Second - 1)
		if get(h, v6) != "b" {
			t.Error("the hint has ended before its time")
		}
		time.Sleep(time.Nanosecond)
		if get(h, v6) != "" {
			t.Error("the hint has not ended")
		}
		if !h.Set(netip.MustParseAddr("203.0.113.8"), "c", time.Hour) {
			t.Error("a hint that has ended takes up room")
		}
		if !h.Delete(mapped) || h.Delete(mapped) || get(h, v4) != "" {
			t.Error("deleting a hint")
		}
		var all []string
		for v := range h.All {
			all = append(all, fmt.Sprint(v.Client, v.Pool, v.Left))
		}
		if got := fmt.Sprint(all); got != "[203.0.113.8c1h0m0s]" {
			t.Errorf("the table has %s", got)
		}
	})
}

// TestModel does what a map with the times written beside it does.
func TestModel(t *testing.T) {
	const seed = 7
	t.Logf("seed %d", seed)
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(seed, seed))
		h := NewHints(50)
		type entry struct {
			pool string
			ends time.Time
		}
		model := map[netip.Addr]entry{}
		for range 20000 {
			time.Sleep(time.Duration(r.Int64N(int64(200 * time.Millisecond))))
			for a, e := range model {
				if !time.Now().Before(e.ends) {
					delete(model, a)
				}
			}
			a := netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(100))})
			old, known := model[a]
			switch r.IntN(4) {
			case 0:
				if h.Delete(a) != known {
					t.Fatalf("deleting %v", a)
				}
				delete(model, a)
			case 1:
				if got := get(h, a); got != old.pool {
					t.Fatalf("%v has %q, want %q", a, got, old.pool)
				}
			default:
				pool, ttl := fmt.Sprint(r.IntN(9)), time.Duration(1+r.IntN(30))*time.Second
				ok := known || len(model) < 50
				if h.Set(a, pool, ttl) != ok {
					t.Fatalf("setting %v with %d in the table", a, len(model))
				}
				if ok {
					model[a] = entry{pool, time.Now().Add(ttl)}
				}
			}
			if h.Len() != len(model) || len(h.queue) != len(model) {
				t.Fatalf("%d hints, %d in the queue, want %d", h.Len(), len(h.queue), len(model))
			}
		}
	})
}

func TestConcurrently(t *testing.T) {
	h := NewHints(100)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 2000 {
				a := netip.AddrFrom4([4]byte{10, 0, byte(g), byte(i)})
				h.Set(a, "a", time.Minute)
				h.Get(a)
				if i%100 == 0 {
					for range h.All {
					}
				}
				h.Delete(a)
			}
		})
	}
	wg.Wait()
	if n := h.Len(); n != 0 {
		t.Errorf("%d are left", n)
	}
}

func TestGetDoesNotAllocate(t *testing.T) {
	h := NewHints(10)
	h.Set(v4, "a", time.Hour)
	if n := testing.AllocsPerRun(100, func() { h.Get(mapped) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestFull fills a table as large as that of the process: hints that are there
// stay, their clients may be sent elsewhere, and each that ends or is taken back
// makes room for one.
func TestFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHints(MaxHints)
		client := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}) }
		for i := range MaxHints {
			ttl := time.Hour
			if i < 10 {
				ttl = time.Second
			}
			if !h.Set(client(i), "a", ttl) {
				t.Fatalf("no room for hint %d", i)
			}
		}
		next := MaxHints
		adds := func(want bool) {
			t.Helper()
			if got := h.Set(client(next), "b", time.Hour); got != want {
				t.Fatalf("hint %d was taken: %v, with %d in the table", next, got, h.Len())
			}
			next++
		}
		adds(false)
		if !h.Set(client(5000), "b", time.Hour) || get(h, client(5000)) != "b" || get(h, client(4999)) != "a" {
			t.Error("a client with a hint cannot be sent elsewhere")
		}
		h.Delete(client(6000))
		adds(true)
		adds(false)
		time.Sleep(time.Second)
		for range 10 {
			adds(true)
		}
		adds(false)
		if n := h.Len(); n != MaxHints {
			t.Errorf("%d hints, want %d", n, MaxHints)
		}
	})
}
