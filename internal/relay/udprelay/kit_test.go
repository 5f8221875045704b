package udprelay

import (
	"bytes"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// What the tests share: engines that must end without leaks, acceptors,
// backends and clients on loopback.

const patience = 10 * time.Second

// eventually polls a condition.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for until := time.Now().Add(patience); !cond(); {
		if time.Now().After(until) {
			t.Fatalf("not within %v: %s", patience, what)
		}
		runtime.Gosched()
		syscall.Select(0, nil, nil, nil, &syscall.Timeval{Usec: 1000})
	}
}

// poller is made with the first socket of a process, by the runtime, and has
// descriptors of its own.
var poller sync.Once

func openFDs(t *testing.T) int {
	t.Helper()
	poller.Do(func() {
		if c, err := net.ListenPacket("udp", "127.0.0.1:0"); err == nil {
			c.Close()
		}
	})
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// engineGoroutines counts the goroutines that run code of this package other
// than tests.
func engineGoroutines() int {
	buf := make([]byte, 1<<20)
	n := 0
	for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if strings.Contains(g, "udprelay.(*worker)") || strings.Contains(g, "udprelay.(*Conn)") {
			n++
		}
	}
	return n
}

// startEngine starts an engine that the test's end closes. It must leave no
// descriptor and no goroutine then.
func startEngine(t *testing.T, workers int) *Engine {
	t.Helper()
	return startEngineWith(t, workers, probeOffload())
}

func startEngineWith(t *testing.T, workers int, off offload) *Engine {
	t.Helper()
	before, running := openFDs(t), engineGoroutines()
	e, err := start(Options{Workers: workers, Logger: zaptest.NewLogger(t)}, off)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.Close()
		if n := e.Sessions(); n != 0 {
			t.Errorf("%d sessions left after Close", n)
		}
		for i, w := range e.workers {
			if n, b := w.pending.Load(), w.pendingBytes.Load(); n != 0 || b != 0 {
				t.Errorf("worker %d: %d sessions and %d bytes still pending after Close", i, n, b)
			}
			if n, m, k := len(w.viaIndex), len(w.kept), len(w.vias)-1-len(w.freeVias); n != 0 || m != 0 || k != 0 {
				t.Errorf("worker %d: %d and %d vias left after Close, %d of them kept", i, n, k, m)
			}
			if n := len(w.pathIndex); n != 0 {
				t.Errorf("worker %d: %d paths left after Close", i, n)
			}
		}
		// Sockets of the test itself, closed by earlier cleanups, are gone by now.
		eventually(t, "descriptors as before", func() bool { return openFDs(t) <= before })
		eventually(t, "goroutines as before", func() bool { return engineGoroutines() <= running })
	})
	return e
}

// owner records what it hears.
type owner struct {
	mu       sync.Mutex
	answered int
	failed   []relay.Failure
	closed   []relay.Reason
	infos    []relay.Info
}

func (o *owner) ConnectFailed(*relay.Path, relay.Failure, syscall.Errno) {}

func (o *owner) Answered(*relay.Path) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.answered++
}

func (o *owner) Failed(_ *relay.Path, f relay.Failure, _ syscall.Errno) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.failed = append(o.failed, f)
}

func (o *owner) Closed(_ *relay.Path, info *relay.Info, why relay.Reason) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = append(o.closed, why)
	o.infos = append(o.infos, *info)
}

func (o *owner) count() (answered, failed, closed int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.answered, len(o.failed), len(o.closed)
}

func (o *owner) lastClosed() (relay.Reason, relay.Info, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.closed) == 0 {
		return 0, relay.Info{}, false
	}
	return o.closed[len(o.closed)-1], o.infos[len(o.infos)-1], true
}

// acceptFunc is an Acceptor.
type acceptFunc func(o *Opening) Decision

func (f acceptFunc) Open(o *Opening) Decision { return f(o) }

func newPath(e *Engine, backend netip.AddrPort, o *owner) *relay.Path {
	p := &relay.Path{Listener: "test", Pool: "pool", Backend: backend, Counters: make([]relay.Counters, e.Workers())}
	if o != nil {
		p.Owner = o
	}
	return p
}

// forwardTo sends every session to the path's backend.
func forwardTo(p *relay.Path) acceptFunc {
	return func(o *Opening) Decision {
		o.Counters = &p.Counters[o.Worker]
		fd, errno := sock.DialUDP(p.Backend, netip.Addr{})
		if errno != 0 {
			o.Reason = relay.UpstreamBind
			return Refuse
		}
		o.Path, o.FD = p, fd
		return Forward
	}
}

func listen(t *testing.T, e *Engine, addr string, a Acceptor) *Endpoint {
	t.Helper()
	ep, err := e.Listen(netip.MustParseAddrPort(addr), sock.Options{}, a)
	if err != nil {
		t.Fatal(err)
	}
	return ep
}

// backend is a UDP socket that passes what it gets to a function.
func backend(t *testing.T, addr string, f func(c *net.UDPConn, from netip.AddrPort, p []byte)) netip.AddrPort {
	t.Helper()
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(addr)))
	if err != nil {
		t.Fatal(err)
	}
	c.SetReadBuffer(4 << 20)
	c.SetWriteBuffer(4 << 20)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 64<<10)
		for {
			n, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			f(c, from, buf[:n])
		}
	}()
	t.Cleanup(func() {
		c.Close()
		<-done
	})
	return c.LocalAddr().(*net.UDPAddr).AddrPort()
}

func echoBackend(t *testing.T, addr string) netip.AddrPort {
	return backend(t, addr, func(c *net.UDPConn, from netip.AddrPort, p []byte) { c.WriteToUDPAddrPort(p, from) })
}

func dial(t *testing.T, to netip.AddrPort) *net.UDPConn {
	t.Helper()
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	c.SetReadBuffer(4 << 20)
	t.Cleanup(func() { c.Close() })
	return c
}

func send(t *testing.T, c net.Conn, p []byte) {
	t.Helper()
	if _, err := c.Write(p); err != nil {
		t.Fatal(err)
	}
}

func receive(t *testing.T, c net.Conn) []byte {
	t.Helper()
	buf := make([]byte, 64<<10)
	c.SetReadDeadline(time.Now().Add(patience))
	n, err := c.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

// roundTrip sends p and expects it back.
func roundTrip(t *testing.T, c net.Conn, p []byte) {
	t.Helper()
	send(t, c, p)
	if got := receive(t, c); !bytes.Equal(got, p) {
		t.Fatalf("sent %d bytes, got back %d different ones", len(p), len(got))
	}
}

func dropped(p *relay.Path, why relay.Drop) (n uint64) {
	for i := range p.Counters {
		n += p.Counters[i].Dropped[why].Load()
	}
	return n
}
