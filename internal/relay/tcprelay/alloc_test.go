package tcprelay

import (
	"io"
	"net"
	"net/netip"
	"runtime"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// mallocs counts the allocations of the whole process while do runs, which
// itself must not allocate.
func mallocs(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.Mallocs - before.Mallocs
}

// TestChunksDoNotAllocate moves small messages and bulk over an established
// connection: what the process allocates does not grow with them.
func TestChunksDoNotAllocate(t *testing.T) {
	for name, tc := range map[string]struct {
		size, times int
		opts        []option
	}{
		"small":        {64, 2000, nil},
		"bulk, splice": {4 << 20, 10, nil},
		"bulk, copy":   {4 << 20, 10, []option{copying}},
	} {
		t.Run(name, func(t *testing.T) {
			one := option(func(_ *rig, o *Options, _ *sock.Options) { o.Workers = 1 })
			r := newRig(t, []netip.AddrPort{serve(t, func(c *net.TCPConn) {
				b := make([]byte, tc.size)
				for {
					if _, err := io.ReadFull(c, b); err != nil {
						return
					}
					if _, err := c.Write(b); err != nil {
						return
					}
				}
			})}, append(tc.opts, one)...)
			c := r.dial()
			b := make([]byte, tc.size)
			exchange := func() {
				c.Write(b)
				if _, err := io.ReadFull(c, b); err != nil {
					t.Fatal(err)
				}
			}
			for range 20 {
				exchange()
			}
			n := mallocs(func() {
				for range tc.times {
					exchange()
				}
			})
			if n > uint64(tc.times)/20+20 { // the runtime's own, not one a message or a chunk
				t.Errorf("%d allocations for %d messages of %d bytes", n, tc.times, tc.size)
			}
		})
	}
}
