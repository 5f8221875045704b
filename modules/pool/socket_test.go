package pool

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
)

// eventually waits for a condition that other goroutines bring about.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(20 * time.Second); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not in 20 s", what)
		}
	}
}

// Real checks of real sockets: a backend goes away and comes back.
func TestBackendDiesAndReturns(t *testing.T) {
	for kind, listen := range map[string]func(addr string) (net.Addr, func()){
		`{"check": "tcp_connect", "interval": "10ms", "timeout": "5s"}`: func(addr string) (net.Addr, func()) {
			l, err := net.Listen("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			return l.Addr(), func() { l.Close() }
		},
		`{"check": "udp_probe", "send": "hex:01", "expect": "hex:01", "interval": "10ms", "timeout": "5s"}`: func(addr string) (net.Addr, func()) {
			pc, err := net.ListenPacket("udp", addr)
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				var b [64]byte
				for {
					n, from, err := pc.ReadFrom(b[:])
					if err != nil {
						return
					}
					_, _ = pc.WriteTo(b[:n], from) // the check may have gone
				}
			}()
			return pc.LocalAddr(), func() { pc.Close(); <-done }
		},
	} {
		t.Run(kind, func(t *testing.T) {
			one, stopOne := listen("127.0.0.1:0")
			two, stopTwo := listen("127.0.0.1:0")
			defer stopTwo()
			p := begin(t, provision(t, fmt.Sprintf(`{"targets": [%q, %q], "health": %s}`, one, two, kind)))
			b := p.Backends()[0]
			eventually(t, "both are checked", func() bool {
				n, _ := b.Checks()
				m, _ := p.Backends()[1].Checks()
				return n > 0 && m > 0
			})
			stopOne()
			eventually(t, "the dead one is down", func() bool { return !b.Healthy() })
			if _, failed := b.Checks(); failed < 3 {
				t.Errorf("down after %d checks, want 3", failed)
			}
			for range 4 {
				c, r := p.Pick(balancer.Flow{}, nil)
				if r != OK || c == b {
					t.Fatalf("Pick = %s, %v", addr(c), r)
				}
				c.Release()
			}
			if _, text := b.LastCheck(); text == "" {
				t.Error("the last check says nothing")
			}
			_, stopOne = listen(one.String())
			defer stopOne()
			eventually(t, "the live one is up", b.Healthy)
			eventually(t, "it is chosen", func() bool {
				c, _ := p.Pick(balancer.Flow{}, nil)
				c.Release()
				return c == b
			})
			if !p.Backends()[1].Healthy() {
				t.Error("the other one is down")
			}
		})
	}
}
