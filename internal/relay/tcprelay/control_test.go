package tcprelay

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// opening waits for the n-th connection that the acceptor has seen.
func (r *rig) opening(n int) (o Opening) {
	r.t.Helper()
	eventually(r.t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.opened) < n {
			return fmt.Errorf("%d accepted, want %d", len(r.opened), n)
		}
		o = r.opened[n-1]
		return nil
	})
	return o
}

// header is the same for every connection.
type header string

func (h header) AppendHeader(b []byte, _ relay.ID, _, _ netip.AddrPort) []byte {
	return append(b, h...)
}

func TestTakeAndForward(t *testing.T) {
	for _, size := range []int{0, 5, 64 << 10, 300 << 10} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			header := option(func(r *rig, _ *Options, _ *sock.Options) { r.header = header("HEAD") })
			r := newRig(t, []netip.AddrPort{serve(t, echo)}, taking, header)
			c := r.dial()
			o := r.opening(1)
			if n := r.engine.Conns(); n != 0 {
				t.Errorf("%d connections, want 0: it was taken", n)
			}
			io.WriteString(c, "tail")
			prefix := payload(size, 1)
			done := make(chan struct{})
			if err := r.engine.Forward(Flow{FD: o.FD, Client: o.Client, Local: o.Local, Prefix: prefix, Dialer: r, Done: func() { close(done) }}); err != nil {
				t.Fatal(err)
			}
			c.CloseWrite()
			got, err := io.ReadAll(c)
			if want := "HEAD" + string(prefix) + "tail"; err != nil || string(got) != want {
				t.Errorf("got %d bytes, %v, want %d, or they are others", len(got), err, len(want))
			}
			<-done
			if n := r.waitClosed(1)[0].info.BytesC2S; n != uint64(size)+4 {
				t.Errorf("counted %d bytes from the client, want %d", n, size+4)
			}
		})
	}
}

func TestRefuse(t *testing.T) {
	r := newRig(t, nil, func(r *rig, _ *Options, _ *sock.Options) { r.decision = Refuse })
	if n, err := r.dial().Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

func TestWildcard(t *testing.T) {
	r := newRig(t, []netip.AddrPort{serve(t, echo)})
	for _, bind := range []string{"0.0.0.0:0", "[::]:0"} {
		ep, err := r.engine.Listen(netip.MustParseAddrPort(bind), sock.Options{}, r)
		if err != nil {
			t.Fatal(err)
		}
		defer ep.Close()
		to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.7"), ep.Addr().Port())
		c, err := net.Dial("tcp", to.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		roundTrip(t, c, "hello")
		r.mu.Lock()
		o := r.opened[len(r.opened)-1]
		r.mu.Unlock()
		if o.Local != to || o.Client.String() != c.LocalAddr().String() {
			t.Errorf("%s: from %v to %v, want from %v to %v", bind, o.Client, o.Local, c.LocalAddr(), to)
		}
	}
}

func TestControl(t *testing.T) {
	b1, b2 := serve(t, echo), serve(t, echo)
	r := newRig(t, []netip.AddrPort{b1, b2})
	other := *r.paths[1]
	second := dialerFunc(func() Target { return Target{Path: &other, ConnectTimeout: time.Second} })
	var conns []net.Conn
	for i := range 10 {
		c := r.dial()
		roundTrip(t, c, "hello")
		conns = append(conns, c)
		if i == 0 {
			// Another path to the other backend.
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			s, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			l.Close()
			f, err := s.(*net.TCPConn).File()
			if err != nil {
				t.Fatal(err)
			}
			s.Close()
			fd, err := syscall.Dup(int(f.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			f.Close()
			syscall.SetNonblock(fd, true)
			if err := r.engine.Forward(Flow{FD: fd, Client: netip.MustParseAddrPort("192.0.2.1:1"), Dialer: second}); err != nil {
				t.Fatal(err)
			}
			roundTrip(t, c, "hello")
			conns = append(conns, c)
		}
	}
	seen := make(map[relay.ID]relay.Info)
	r.engine.Flows(func(i *relay.Info) bool { seen[i.ID] = *i; return true })
	if len(seen) != 11 || r.engine.Conns() != 11 {
		t.Errorf("%d flows and %d connections, want 11", len(seen), r.engine.Conns())
	}
	stopped := 0
	r.engine.Flows(func(*relay.Info) bool { stopped++; return stopped < 3 })
	if stopped != 3 {
		t.Errorf("yielded %d times after false at 3", stopped)
	}
	want := conns[5].LocalAddr().(*net.TCPAddr).AddrPort()
	for id, i := range seen {
		if !i.UpstreamLocal.IsValid() || i.BytesC2S != 5 || i.BytesS2C != 5 {
			t.Errorf("%v: %+v", id, i)
		}
		if got, ok := r.engine.Flow(id); !ok || got.Client != i.Client {
			t.Errorf("flow %v: %+v, %v", id, got, ok)
		}
		if i.Client == want {
			if !r.engine.CloseFlow(id, relay.Admin) {
				t.Errorf("%v could not be closed", id)
			}
			if r.engine.CloseFlow(id, relay.Admin) {
				t.Errorf("%v closed twice", id)
			}
			if _, ok := r.engine.Flow(id); ok {
				t.Errorf("%v is still there", id)
			}
		}
	}
	if _, err := conns[5].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read: %v", err)
	}
	if end := r.waitClosed(1)[0]; end.why != relay.Admin || end.info.Client != want {
		t.Errorf("closed %v: %v", end.info.Client, end.why)
	}
	r.engine.ClosePaths(func(p *relay.Path) bool { return p == &other }, relay.BackendDown)
	if end := r.waitClosed(2)[1]; end.why != relay.BackendDown || end.info.Path != &other {
		t.Errorf("closed %v: %v", end.info.Client, end.why)
	}
	r.ep.Close()
	for i, c := range conns {
		if i != 5 && i != 1 {
			roundTrip(t, c, "still here")
		}
	}
	for _, bad := range []relay.ID{0, 1 << 63, relay.MakeID(false, 100, 0, 1), relay.MakeID(false, 0, 1<<30, 1)} {
		if _, ok := r.engine.Flow(bad); ok {
			t.Errorf("flow %v exists", bad)
		}
	}
	r.engine.Close()
	for _, end := range r.waitClosed(11)[2:] {
		if end.why != relay.Drain {
			t.Errorf("closed: %v", end.why)
		}
	}
	if err := r.engine.Forward(Flow{}); !errors.Is(err, ErrClosed) {
		t.Errorf("forward after close: %v", err)
	}
}

type dialerFunc func() Target

func (f dialerFunc) Next(_, _ netip.AddrPort, attempt int, _ []*relay.Path) (Target, bool) {
	return f(), attempt == 0
}
func (dialerFunc) GaveUp(*relay.Info, relay.Reason) {}

// TestEndpointClose has connections in the queue when the endpoint closes.
func TestEndpointClose(t *testing.T) {
	r := newRig(t, []netip.AddrPort{serve(t, echo)})
	var conns []*net.TCPConn
	block := make(chan struct{})
	for _, w := range r.engine.workers {
		w.post(op{do: func() { <-block }})
	}
	for range 50 {
		conns = append(conns, r.dial())
	}
	closed := make(chan struct{})
	go func() { r.ep.Close(); close(closed) }()
	close(block)
	<-closed
	for _, c := range conns {
		roundTrip(t, c, "hello")
	}
	if c, err := net.Dial("tcp", r.ep.Addr().String()); err == nil {
		c.Close()
		t.Error("still listening")
	}
	r.ep.Close() // again: nothing
}

// TestSlowReader has one client that reads nothing of a flood, beside one that
// wants its echoes, on one worker.
func TestSlowReader(t *testing.T) {
	for name, opts := range map[string][]option{"splice": nil, "copy": {copying}} {
		t.Run(name, func(t *testing.T) {
			const flood = 64 << 20
			var sent atomic.Int64
			b := serve(t, func(c *net.TCPConn) {
				first := make([]byte, 1)
				io.ReadFull(c, first)
				if first[0] == 'e' {
					c.Write(first)
					echo(c)
					return
				}
				for b := payload(64<<10, 1); sent.Load() < flood; {
					n, err := c.Write(b)
					sent.Add(int64(n))
					if err != nil {
						return
					}
				}
			})
			one := option(func(_ *rig, o *Options, _ *sock.Options) { o.Workers = 1 })
			r := newRig(t, []netip.AddrPort{b}, append(opts, one)...)
			slow, quick := r.dial(), r.dial()
			slow.SetReadBuffer(64 << 10)
			io.WriteString(slow, "f")
			roundTrip(t, quick, "e")
			// What the kernel and we hold is bounded, so the flood stops.
			last := int64(-1)
			eventually(t, func() error {
				for range 20 {
					roundTrip(t, quick, "hello")
				}
				if n := sent.Load(); n == 0 || n != last {
					last = n
					<-time.After(20 * time.Millisecond)
					return errors.New("the flood does not stop")
				}
				return nil
			})
			w := r.engine.workers[0]
			w.call(func() {
				held := uint32(0)
				for slot := range w.slab.top {
					c := w.slab.at(slot)
					held += c.held[0] + c.held[1]
				}
				if held == 0 || held > pipeSize {
					t.Errorf("%d bytes held", held)
				}
			})
			n, err := io.Copy(io.Discard, slow)
			if err != nil || n < flood {
				t.Errorf("read %d bytes, %v, want at least %d", n, err, flood)
			}
		})
	}
}

// TestChurn opens and closes many connections, some of them with a reset.
func TestChurn(t *testing.T) {
	const conns, peers = 2000, 20
	r := newRig(t, []netip.AddrPort{serve(t, echo)})
	var wg sync.WaitGroup
	var failures atomic.Int64
	for p := range peers {
		wg.Go(func() {
			for i := range conns / peers {
				c, err := net.Dial("tcp", r.ep.Addr().String())
				if err != nil {
					failures.Add(1)
					continue
				}
				var b [1]byte
				if _, err := c.Write(b[:]); err != nil {
					failures.Add(1)
				}
				if _, err := io.ReadFull(c, b[:]); err != nil {
					failures.Add(1)
				}
				if (p+i)%3 == 0 {
					c.(*net.TCPConn).SetLinger(0)
				}
				c.Close()
			}
		})
	}
	wg.Wait()
	if n := failures.Load(); n > 0 {
		t.Errorf("%d of %d failed", n, conns)
	}
	r.waitClosed(conns)
	for _, w := range r.engine.workers {
		if w.slab.top > 4*chunk {
			t.Errorf("worker %d uses %d slots for %d connections at a time", w.index, w.slab.top, peers)
		}
	}
}

// TestPanics has guest code panic at each place, once: the connection it was
// called for is lost and nothing else.
func TestPanics(t *testing.T) {
	for _, where := range []string{"accept", "next", "answered", "closed", "gaveup"} {
		t.Run(where, func(t *testing.T) {
			var armed atomic.Bool
			one := option(func(r *rig, o *Options, _ *sock.Options) {
				o.Workers = 1
				r.panics = func(at string) {
					if at == where && armed.CompareAndSwap(true, false) {
						panic("guest")
					}
				}
			})
			backends := []netip.AddrPort{serve(t, echo)}
			if where == "gaveup" {
				backends[0] = refusing(t)
			}
			r := newRig(t, backends, one)
			bystander := r.dial()
			if where != "gaveup" {
				roundTrip(t, bystander, "hello")
				eventually(t, func() error {
					r.mu.Lock()
					defer r.mu.Unlock()
					if r.answered == 0 {
						return errors.New("not answered")
					}
					return nil
				})
			}
			armed.Store(true)
			c := r.dial()
			io.WriteString(c, "x")
			c.CloseWrite()
			io.Copy(io.Discard, c)
			eventually(t, func() error {
				if armed.Load() {
					return errors.New("no panic")
				}
				return nil
			})
			if where != "gaveup" {
				roundTrip(t, bystander, "hello")
				roundTrip(t, r.dial(), "hello")
			}
			eventually(t, func() error {
				if len(r.logs.FilterMessage("panic on a tcp worker").All()) != 1 {
					return fmt.Errorf("logged %v", r.logs.All())
				}
				return nil
			})
			r.waitPanics(1)
		})
	}
}

// TestShortOfDescriptors runs in a process of its own, which it leaves none.
func TestShortOfDescriptors(t *testing.T) {
	const inChild = "TCPRELAY_SHORT"
	if os.Getenv(inChild) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestShortOfDescriptors$", "-test.v")
		cmd.Env = append(os.Environ(), inChild+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS") {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 256, Max: 256}); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, []netip.AddrPort{serve(t, echo)}, withTimeout(time.Second))
	before := r.dial()
	roundTrip(t, before, "hello")
	waiting := r.dialRaw(2) // opened while there are descriptors, connected when there are none
	var hoard []int
	for {
		fd, err := syscall.Dup(0)
		if err != nil {
			break
		}
		hoard = append(hoard, fd)
	}
	for _, fd := range waiting {
		if err := syscall.Connect(fd, &syscall.SockaddrInet4{Port: int(r.ep.Addr().Port()), Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			t.Fatal(err)
		}
	}
	var pauses []time.Duration
	eventually(t, func() error { // the pauses double
		r.mu.Lock()
		defer r.mu.Unlock()
		pauses = append(pauses[:0], r.pauses...)
		for _, p := range pauses {
			if p == 400*time.Millisecond {
				return nil
			}
		}
		return fmt.Errorf("pauses: %v", pauses)
	})
	roundTrip(t, before, "still here")
	flows := 0
	r.engine.Flows(func(*relay.Info) bool { flows++; return true })
	if flows != 1 {
		t.Errorf("%d flows", flows)
	}
	// One descriptor: the client is accepted and the backend cannot be dialed.
	syscall.Close(hoard[0])
	eventually(t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.failed) == 0 || r.failed[0] != "0: connect: shortage" || len(r.gaveUp) == 0 {
			return fmt.Errorf("failed: %v, gave up: %v", r.failed, r.gaveUp)
		}
		return nil
	})
	for _, fd := range hoard[1:] {
		syscall.Close(fd)
	}
	for _, fd := range waiting {
		syscall.Close(fd)
	}
	roundTrip(t, r.dial(), "hello")
}

func (r *rig) dialRaw(n int) (fds []int) {
	for range n {
		fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			r.t.Fatal(err)
		}
		fds = append(fds, fd)
	}
	return fds
}

func TestListenErrors(t *testing.T) {
	r := newRig(t, nil)
	if _, err := r.engine.Listen(netip.MustParseAddrPort("192.0.2.1:1"), sock.Options{}, r); err == nil {
		t.Error("listens on an address of another host")
	}
	for _, n := range []int{0, 128} {
		if _, err := New(Options{Workers: n}); err == nil {
			t.Errorf("%d workers", n)
		}
	}
	r.engine.Close()
	if _, err := r.engine.Listen(netip.MustParseAddrPort("127.0.0.1:0"), sock.Options{}, r); !errors.Is(err, ErrClosed) {
		t.Errorf("listen after close: %v", err)
	}
}
