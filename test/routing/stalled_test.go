package routing

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestStalledClients has many clients at once that say nothing or too little
// (D10): each costs one descriptor and little memory, none reaches a backend,
// and who says what it wants is served meanwhile as ever. In a soak there are
// 5,000.
func TestStalledClients(t *testing.T) {
	n := kit.Scaled(300, 5000)
	budget := time.Duration(kit.Scaled(3, 20)) * time.Second // enough for all to be there at once
	town := newTown(t, "strict")
	addr, btcp, _ := bind(t)
	strict := kit.Match(kit.M{"sni": kit.M{"host": kit.A{"strict.example.com"}}}, tcp("strict"))
	p := kit.Start(t, kit.App(kit.M{"t": kit.With(kit.Listener([]string{btcp}, strict), kit.M{"peek": kit.M{"timeout": budget.String()}})}, town.pools()), kit.Options{})
	hello := tlsHello(t, "strict.example.com")
	honest := newOthers(t, addr, "strict", hello)
	active := func() float64 { return p.Metric("active_connections") }

	var wg sync.WaitGroup
	var early, late atomic.Int64 // the most that one was off its time
	var before, during kit.Usage
	honest.notice(t, kit.Scaled(50, 1000), fmt.Sprintf("%d stalled clients", n), 5*time.Millisecond, func(ask func()) {
		kit.Settles(t, "connections that are there", 1.0, active)
		p.Collect()
		before = p.Usage()
		clients := make([]*client, n)
		for i := range clients {
			clients[i] = dial(t, addr)
			began := time.Now()
			clients[i].send(hello[:[]int{0, 1, 5}[i%3]])
			wg.Go(func() {
				if got, err := clients[i].where(); got != nowhere || err != nil {
					t.Errorf("client %d went to %s, %v", i, got, err)
				}
				off := time.Since(began) - budget
				atMost(&early, -off)
				atMost(&late, off)
			})
		}
		kit.Settles(t, "connections with the stalled ones", float64(1+n), active)
		p.Collect()
		during = p.Usage()
		ask()
		wg.Wait()
	})
	files, memory := float64(during.Files-before.Files)/float64(n), (during.RSS-before.RSS)/n
	said := fmt.Sprintf("%d stalled clients: %.2f descriptors and %d bytes each, closed %v to %v after the budget", n, files, memory,
		-time.Duration(early.Load()), time.Duration(late.Load()))
	t.Log(said)
	if files > 1.1 || !kit.Race && memory > 16<<10 {
		t.Error(said)
	}
	if got := town["strict"].heard(); got != honest.opened {
		t.Errorf("the backend has had %d connections, want those %d that said what they want", got, honest.opened)
	}
	kit.Settles(t, "connections left", 1.0, active)
}

func atMost(most *atomic.Int64, d time.Duration) {
	for {
		now := most.Load()
		if int64(d) <= now || most.CompareAndSwap(now, int64(d)) {
			return
		}
	}
}
