package proxy

import (
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// flows are those that a test has ended.
type flows struct {
	mu    sync.Mutex
	began time.Time
	live  map[relay.ID]*relay.Path
	ended []time.Duration
	swept int // by path
	why   []relay.Reason
}

func newFlows(paths map[*relay.Path]int) *flows {
	f := &flows{began: time.Now(), live: make(map[relay.ID]*relay.Path)}
	for p, n := range paths {
		for range n {
			f.live[relay.ID(len(f.live)+1)] = p
		}
	}
	return f
}

func (f *flows) Flows(yield func(*relay.Info) bool) {
	for id, p := range f.live {
		if !yield(&relay.Info{ID: id, Path: p}) {
			return
		}
	}
}

func (f *flows) CloseFlow(id relay.ID, why relay.Reason) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended, f.why = append(f.ended, time.Since(f.began)), append(f.why, why)
	delete(f.live, id)
	return true
}

func (f *flows) ClosePaths(match func(*relay.Path) bool, why relay.Reason) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.swept++
	for id, p := range f.live {
		if match(p) {
			delete(f.live, id)
		}
	}
}

func (f *flows) left() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.live)
}

// TestDrainIsSpread ends the flows of one backend evenly over the spread and no
// other's.
func TestDrainIsSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		addr := netip.MustParseAddrPort("10.0.0.1:1")
		ours := &relay.Path{Pool: "p", Backend: addr}
		f := newFlows(map[*relay.Path]int{
			ours:                       1000,
			{Pool: "q", Backend: addr}: 10,
			{Pool: "p", Backend: netip.MustParseAddrPort("10.0.0.2:1")}: 10,
			nil: 10,
		})
		drains.begin(f, "p", addr, 30*time.Second)
		drains.begin(f, "p", addr, 30*time.Second) // of a second config: nothing more
		time.Sleep(time.Minute)
		synctest.Wait()
		if len(f.ended) != 1000 || f.left() != 30 || f.swept != 1 {
			t.Fatalf("%d flows were ended and %d are left, the rest was swept %d times", len(f.ended), f.left(), f.swept)
		}
		if slices.ContainsFunc(f.why, func(r relay.Reason) bool { return r != relay.Drain }) {
			t.Errorf("flows ended for %v", f.why)
		}
		for s := range 30 {
			n := 0
			for _, at := range f.ended {
				if at > time.Duration(s)*time.Second && at <= time.Duration(s+1)*time.Second {
					n++
				}
			}
			if n < 30 || n > 37 {
				t.Errorf("%d flows of 1000 ended in second %d of 30", n, s+1)
			}
		}
		drains.mu.Lock()
		defer drains.mu.Unlock()
		if len(drains.running) != 0 {
			t.Errorf("%d drains go on", len(drains.running))
		}
	})
}

// TestDrainStops leaves the flows of a backend that has returned.
func TestDrainStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		addr := netip.MustParseAddrPort("10.0.0.1:1")
		f := newFlows(map[*relay.Path]int{{Pool: "p", Backend: addr}: 1000})
		drains.begin(f, "p", addr, 30*time.Second)
		time.Sleep(15 * time.Second)
		drains.end("p", addr)
		synctest.Wait()
		left := f.left()
		time.Sleep(time.Minute)
		if f.left() != left || left < 490 || left > 510 || f.swept != 0 {
			t.Errorf("%d and then %d flows are left of 1000, swept %d times", left, f.left(), f.swept)
		}
		drains.end("p", addr) // twice is no matter
		drains.begin(f, "p", addr, 0)
		synctest.Wait()
		time.Sleep(time.Second)
		if f.left() != 0 {
			t.Errorf("without a spread %d flows are left", f.left())
		}
	})
}
