package udprelay

import (
	"bytes"
	"net"
	"net/netip"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// TestRunsLargerThanTheMTU: datagrams that the kernel cannot segment, because
// each is larger than the path takes, go out one by one, as fragments; and it
// is tried once only.
func TestRunsLargerThanTheMTU(t *testing.T) {
	if !probeOffload().gso {
		t.Skip("no segmentation offload here")
	}
	runtime.LockOSThread() // and never unlocked: the thread ends with this test's goroutine
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Skipf("no network namespace: %v", err)
	}
	if out, err := exec.Command("ip", "link", "set", "lo", "mtu", "1500", "up").CombinedOutput(); err != nil {
		t.Skipf("ip link: %v: %s", err, out)
	}
	e := startEngine(t, 1)
	const size, run = 4000, 8
	// burst sends a run while the worker is busy with something else, so that
	// it is likely to get it as one batch.
	burst := func(send func(p []byte)) {
		busy, over := make(chan struct{}), make(chan struct{})
		began := make(chan struct{})
		go func() {
			defer close(over)
			e.workers[0].call(func(*worker) { close(began); <-busy })
		}()
		<-began
		for i := range run {
			send(bytes.Repeat([]byte{byte(i)}, size))
		}
		close(busy)
		<-over
	}
	got := make(chan []byte, run)
	p := newPath(e, backend(t, "127.0.0.1:0", func(c *net.UDPConn, from netip.AddrPort, b []byte) {
		if string(b) == "reply" {
			burst(func(p []byte) { c.WriteToUDPAddrPort(p, from) })
			return
		}
		got <- bytes.Clone(b)
	}), nil)
	fd := dialBackend(t, p.Backend) // here, for the worker is in another namespace
	ep := listen(t, e, "127.0.0.1:0", acceptFunc(func(o *Opening) Decision {
		o.Path, o.FD = p, fd
		return Forward
	}))
	c := dial(t, ep.Addr())
	learnt := func() (up, down uint16) {
		e.workers[0].call(func(w *worker) { up, down = w.paths[w.slab.at(1).path].gso, w.slab.at(1).gso })
		return up, down
	}
	check := func(i int, b []byte) {
		t.Helper()
		if len(b) != size || int(b[0]) != i {
			t.Fatalf("got %d bytes of datagram %d, want %d of %d", len(b), b[0], size, i)
		}
	}
	sent := 0
	eventually(t, "a run to the backend tried", func() bool {
		burst(func(p []byte) { send(t, c, p) })
		for i := range run {
			check(i, <-got)
		}
		sent += run
		up, _ := learnt()
		return up == size
	})
	eventually(t, "a run to the client tried", func() bool {
		send(t, c, []byte("reply"))
		for i := range run {
			check(i, receive(t, c))
		}
		sent++
		_, down := learnt()
		return down == size
	})
	if n := dropped(p, relay.UpstreamSend) + dropped(p, relay.ReplySend); n != 0 {
		t.Errorf("%d datagrams dropped", n)
	}
	if n := p.Counters[0].PacketsC2S.Load(); n != uint64(sent) {
		t.Errorf("%d datagrams counted, want %d", n, sent)
	}
}
