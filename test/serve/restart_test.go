package serve

import (
	"fmt"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestRestartUnderLoad holds that new connections are refused between the
// signal that ends one process and the readiness of the next, and at no other
// time. How long that is gets logged.
func TestRestartUnderLoad(t *testing.T) {
	const openers, perSecond = 10, 500
	b := newBackends(t)
	addr := kit.Local(kit.Port(t))
	config := kit.App(kit.M{"t": kit.ToPool("tcp", "tcp/"+addr)}, b.pools(), kit.M{"shutdown_grace": "0s"})
	p := kit.Start(t, config, kit.Options{})

	type failure struct {
		began, ended time.Time
		err          error
	}
	var (
		mu       sync.Mutex
		failures []failure
		tries    int
		wg       sync.WaitGroup
	)
	stop := make(chan struct{})
	for i := range openers {
		wg.Go(func() {
			every := time.NewTicker(openers * time.Second / perSecond)
			defer every.Stop()
			for n := uint32(0); ; n++ {
				select {
				case <-stop:
					return
				case <-every.C:
				}
				began := time.Now()
				err := visit(addr, uint32(i)<<16|n&0xffff)
				mu.Lock()
				tries++
				if err != nil {
					failures = append(failures, failure{began, time.Now(), err})
				}
				mu.Unlock()
			}
		})
	}
	enough := func(more int) {
		t.Helper()
		mu.Lock()
		want := tries + more
		mu.Unlock()
		kit.Eventually(t, fmt.Sprintf("%d more connections", more), func() bool {
			mu.Lock()
			defer mu.Unlock()
			return tries >= want
		})
	}
	enough(200)
	down := time.Now()
	p.Signal(syscall.SIGTERM)
	if code := p.Exit(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	kit.Start(t, config, kit.Options{})
	up := time.Now()
	enough(200)
	close(stop)
	wg.Wait()
	for _, f := range failures {
		if f.ended.Before(down) || f.began.After(up) {
			t.Errorf("a connection %v after the signal, %v after the next process was ready: %v", f.began.Sub(down), f.began.Sub(up), f.err)
		}
	}
	if len(failures) == 0 {
		t.Error("nobody was refused: the processes have not been apart")
	}
	t.Logf("%d of %d connections were refused, in a gap of %v", len(failures), tries, up.Sub(down))
}

// visit opens a connection, asks one question and hears the answer.
func visit(addr string, flow uint32) error {
	c, err := net.DialTimeout("tcp", addr, kit.Long)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(kit.Long))
	q := kit.Frame{Flow: flow, Seq: 1}
	if _, err := c.Write(q.Append(nil)); err != nil {
		return err
	}
	_, _, err = kit.ReadFrame(c, nil)
	return err
}
