package tcprelay

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// TestTune holds what is set at once and what is left for later.
func TestTune(t *testing.T) {
	for name, tc := range map[string]struct {
		target   Target
		flags    flags
		ahead    bool
		now      [2]int // TCP_NODELAY after tune
		second   [2]int // …and after the second write to each side
		probesAt string // now, later or never
	}{
		"usual":               {target: Target{NoDelay: true, KeepAlive: 30 * time.Second}, flags: noDelay, now: [2]int{1, 0}, second: [2]int{1, 1}, probesAt: "later"},
		"taken connection":    {target: Target{NoDelay: true}, now: [2]int{0, 0}, second: [2]int{1, 1}, probesAt: "never"},
		"bytes of ours ahead": {target: Target{NoDelay: true}, flags: noDelay, ahead: true, now: [2]int{1, 1}, second: [2]int{1, 1}, probesAt: "never"},
		"nodelay off":         {target: Target{}, flags: noDelay, now: [2]int{0, 0}, second: [2]int{0, 0}, probesAt: "never"},
		"short keepalive":     {target: Target{KeepAlive: 5 * time.Second}, now: [2]int{0, 0}, second: [2]int{0, 0}, probesAt: "now"},
	} {
		t.Run(name, func(t *testing.T) {
			c := &conn{flags: tc.flags}
			for side := range c.fd {
				fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(fd)
				c.fd[side] = int32(fd)
			}
			if tc.flags&noDelay != 0 {
				setInt(c.fd[client], unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
			}
			get := func(side, level, opt int) int {
				v, err := unix.GetsockoptInt(int(c.fd[side]), level, opt)
				if err != nil {
					t.Fatal(err)
				}
				return v
			}
			check := func(when string, want [2]int) {
				for side := range c.fd {
					if got := get(side, unix.IPPROTO_TCP, unix.TCP_NODELAY); got != want[side] {
						t.Errorf("%s: TCP_NODELAY of side %d is %d, want %d", when, side, got, want[side])
					}
				}
			}
			(&worker{}).tune(c, &tc.target, tc.ahead)
			check("at first", tc.now)
			for side := range c.fd {
				if c.has(on(nagle, side)) {
					c.delayed(side)
				}
			}
			check("after the second write", tc.second)
			probes := "never"
			switch {
			case c.keepAlive > 0:
				probes = "later"
				want := int(c.keepAlive)
				c.probed()
				if got := get(backend, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE); got != want {
					t.Errorf("TCP_KEEPIDLE is %d, want %d", got, want)
				}
			case get(client, unix.SOL_SOCKET, unix.SO_KEEPALIVE) == 1:
				probes = "now"
			}
			if probes != tc.probesAt {
				t.Errorf("keepalive is set %s, want %s", probes, tc.probesAt)
			}
		})
	}
}

// TestKeepAliveComesLater holds that an old connection is probed even when
// nothing else would have woken its timer.
func TestKeepAliveComesLater(t *testing.T) {
	c := &conn{state: established, start: 1, last: 1, keepAlive: 30}
	w := &worker{now: 2}
	w.paths.list = []pathUse{{}, {path: new(relay.Path)}}
	c.path = 1
	if got, want := w.deadline(c), c.start+keepAliveAfter; got != want {
		t.Errorf("the next look is at %d, want %d", got, want)
	}
	c.keepAlive = 0
	if got := w.deadline(c); got != never {
		t.Errorf("without keepalive the next look is at %d, want never", got)
	}
}
