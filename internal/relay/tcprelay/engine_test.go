package tcprelay

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

const patience = 10 * time.Second

// rig is an engine with one endpoint in front of the backends of its dialer,
// and the record of what the engine has told them. It is the acceptor, the
// dialer and the owner.
type rig struct {
	t      *testing.T
	engine *Engine
	ep     *Endpoint
	logs   *observer.ObservedLogs

	decision Decision
	look     func(o *Opening, seen []byte, final bool) Decision // for Peek
	wait     time.Duration
	header   Header
	timeout  time.Duration
	paths    []*relay.Path
	looking  *relay.Path
	counters []relay.Counters   // of all paths
	panics   func(where string) // called at each place where guest code may panic

	mu       sync.Mutex
	opened   []Opening
	failed   []string // ConnectFailed and Failed, as strings
	answered int
	closed   []closing
	gaveUp   []relay.Reason
	pauses   []time.Duration
	looks    []string // what Look was shown
	taken    []Opening
}

type closing struct {
	info relay.Info
	why  relay.Reason
}

type option func(*rig, *Options, *sock.Options)

func withIdle(d time.Duration) option {
	return func(r *rig, _ *Options, _ *sock.Options) {
		for _, p := range r.paths {
			p.Idle = d
		}
	}
}

func withLifetime(d time.Duration) option {
	return func(r *rig, _ *Options, _ *sock.Options) {
		for _, p := range r.paths {
			p.Lifetime = d
		}
	}
}

func withTimeout(d time.Duration) option {
	return func(r *rig, _ *Options, _ *sock.Options) { r.timeout = d }
}

func taking(r *rig, _ *Options, _ *sock.Options) { r.decision = Take }

func copying(_ *rig, o *Options, _ *sock.Options) { o.noSplice = true }

// newRig starts an engine that forwards to the backends, in order. At the end
// of the test nothing may be left of it.
func newRig(t *testing.T, backends []netip.AddrPort, opts ...option) *rig {
	t.Helper()
	fds, goroutines := countFDs(t), runtime.NumGoroutine()
	core, logs := observer.New(zapcore.WarnLevel)
	r := &rig{t: t, decision: Forward, timeout: 5 * time.Second, logs: logs}
	o := Options{Workers: 2, Logger: zap.New(core)}
	r.counters = make([]relay.Counters, o.Workers)
	for i, b := range backends {
		r.paths = append(r.paths, &relay.Path{Listener: "test", Route: i, Pool: "pool", Backend: b, Owner: r, Counters: r.counters})
	}
	r.looking = &relay.Path{Listener: "test", Route: -1, Owner: r, Counters: r.counters}
	so := sock.Options{}
	for _, opt := range opts {
		opt(r, &o, &so)
	}
	var err error
	if r.engine, err = New(o); err != nil {
		t.Fatal(err)
	}
	if r.ep, err = r.engine.Listen(netip.MustParseAddrPort("127.0.0.1:0"), so, r); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.engine.Close()
		if n := r.engine.Conns(); n != 0 {
			t.Errorf("%d connections after Close", n)
		}
		for _, w := range r.engine.workers {
			if w.pipes.lent != 0 || len(w.paths.index) != 0 || len(w.pends.free) != len(w.pends.list) || len(w.spills.vacant) != len(w.spills.list) || len(w.done) != 0 {
				t.Errorf("worker %d still has %d pipes, %d paths, %d of %d pends free, %d of %d spills free, %d dones", w.index,
					w.pipes.lent, len(w.paths.index), len(w.pends.free), len(w.pends.list), len(w.spills.vacant), len(w.spills.list), len(w.done))
			}
		}
		eventually(t, func() error {
			if n := runtime.NumGoroutine(); n > goroutines {
				return fmt.Errorf("%d goroutines, %d before", n, goroutines)
			}
			if n := countFDs(t); n > fds {
				return fmt.Errorf("%d descriptors, %d before", n, fds)
			}
			return nil
		})
		if r.panics == nil {
			for _, e := range logs.All() {
				t.Errorf("logged: %s %v", e.Message, e.ContextMap())
			}
		}
	})
	return r
}

func (r *rig) Accept(o *Opening) Decision {
	r.mu.Lock()
	r.opened = append(r.opened, *o)
	decision := r.decision
	r.mu.Unlock()
	o.Counters = &r.counters[o.Worker]
	r.maybePanic("accept")
	o.Dialer, o.Looker, o.Path, o.Limit, o.Wait = r, r, r.looking, 16, r.wait
	return decision
}

func (r *rig) Look(o *Opening, seen []byte, final bool) Decision {
	r.maybePanic("look")
	d := r.look(o, seen, final)
	s := fmt.Sprintf("%q", seen)
	if final {
		s += " final"
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.looks = append(r.looks, s)
	o.Dialer = r
	return d
}

func (r *rig) Taken(o *Opening) {
	r.maybePanic("taken")
	r.mu.Lock()
	defer r.mu.Unlock()
	r.taken = append(r.taken, *o)
}

func (r *rig) maybePanic(where string) {
	if r.panics != nil {
		r.panics(where)
	}
}

// waitPanics waits until the counters have so many panics, no more.
func (r *rig) waitPanics(want uint64) {
	r.t.Helper()
	eventually(r.t, func() error {
		n := uint64(0)
		for i := range r.counters {
			n += r.counters[i].Panics.Load()
		}
		if n != want {
			return fmt.Errorf("%d panics are counted, want %d", n, want)
		}
		return nil
	})
}

func (r *rig) AcceptFailed(_ error, pause time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pauses = append(r.pauses, pause)
}

func (r *rig) Next(_, _ netip.AddrPort, attempt int, tried []*relay.Path) (Target, bool) {
	r.maybePanic("next")
	if len(tried) != attempt {
		r.t.Errorf("attempt %d after %d tried", attempt, len(tried))
	}
	if attempt >= len(r.paths) {
		return Target{}, false
	}
	return Target{Path: r.paths[attempt], ConnectTimeout: r.timeout, NoDelay: true, KeepAlive: 30 * time.Second, Header: r.header}, true
}

func (r *rig) GaveUp(_ *relay.Info, why relay.Reason) {
	r.mu.Lock()
	r.gaveUp = append(r.gaveUp, why)
	r.mu.Unlock()
	r.maybePanic("gaveup")
}

func (r *rig) ConnectFailed(p *relay.Path, f relay.Failure, errno syscall.Errno) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = append(r.failed, fmt.Sprintf("%d: connect: %v", p.Route, f))
}

func (r *rig) Answered(*relay.Path) {
	r.maybePanic("answered")
	r.mu.Lock()
	r.answered++
	r.mu.Unlock()
}

func (r *rig) Failed(p *relay.Path, f relay.Failure, _ syscall.Errno) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = append(r.failed, fmt.Sprintf("%d: %v", p.Route, f))
}

func (r *rig) Closed(_ *relay.Path, i *relay.Info, why relay.Reason) {
	r.mu.Lock()
	r.closed = append(r.closed, closing{*i, why})
	r.mu.Unlock()
	r.maybePanic("closed")
}

// waitClosed waits for the n-th end of a connection and returns all.
func (r *rig) waitClosed(n int) []closing {
	r.t.Helper()
	var got []closing
	eventually(r.t, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if got = append([]closing(nil), r.closed...); len(got) < n {
			return fmt.Errorf("%d closed, want %d", len(got), n)
		}
		return nil
	})
	if len(got) > n {
		r.t.Errorf("%d closed, want %d", len(got), n)
	}
	return got
}

func (r *rig) dial() *net.TCPConn {
	r.t.Helper()
	c, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(r.ep.Addr()))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

func eventually(t *testing.T, check func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		<-time.After(2 * time.Millisecond)
	}
}

func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip(err)
	}
	n := 0
	for _, e := range entries {
		// Go's own netpoller opens two when it is first used.
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, "socket:") || strings.HasPrefix(to, "pipe:") {
			n++
		}
	}
	return n
}

// serve starts a backend whose connections are handled by handle.
func serve(t *testing.T, handle func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			c.SetDeadline(time.Now().Add(patience))
			wg.Go(func() {
				defer c.Close()
				handle(c)
			})
		}
	})
	t.Cleanup(func() { l.Close(); wg.Wait() })
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func echo(c *net.TCPConn) {
	io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
}

func refusing(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func payload(n int, seed uint64) []byte {
	b := make([]byte, n)
	rng := rand.NewChaCha8([32]byte{byte(seed)})
	rng.Read(b)
	return b
}

func roundTrip(t *testing.T, c net.Conn, msg string) {
	t.Helper()
	if _, err := io.WriteString(c, msg); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(msg))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != msg {
		t.Fatalf("got %q, %v, want %q", got, err, msg)
	}
}

func TestEcho(t *testing.T) {
	r := newRig(t, []netip.AddrPort{serve(t, echo)})
	c := r.dial()
	for range 100 {
		roundTrip(t, c, "hello")
	}
	if n := r.engine.Conns(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
	c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || len(b) != 0 {
		t.Errorf("after the end: %q, %v", b, err)
	}
	got := r.waitClosed(1)[0]
	if got.why != relay.ClientClose || got.info.BytesC2S != 500 || got.info.BytesS2C != 500 {
		t.Errorf("closed %v after %d and %d bytes", got.why, got.info.BytesC2S, got.info.BytesS2C)
	}
	if want := c.LocalAddr().(*net.TCPAddr).AddrPort(); got.info.Client != want {
		t.Errorf("client %v, want %v", got.info.Client, want)
	}
	if got.info.Local != r.ep.Addr() {
		t.Errorf("local %v, want %v", got.info.Local, r.ep.Addr())
	}
	if r.answered != 1 {
		t.Errorf("answered %d times", r.answered)
	}
	var c2s, s2c uint64
	for i := range r.paths[0].Counters {
		c2s += r.paths[0].Counters[i].BytesC2S.Load()
		s2c += r.paths[0].Counters[i].BytesS2C.Load()
	}
	if c2s != 500 || s2c != 500 {
		t.Errorf("counted %d and %d bytes", c2s, s2c)
	}
}

// TestBulk sends 10 MiB both ways at once, with what it takes to find a byte
// out of place.
func TestBulk(t *testing.T) {
	for name, opts := range map[string][]option{"splice": nil, "copy": {copying}} {
		t.Run(name, func(t *testing.T) {
			up, down := payload(10<<20, 1), payload(10<<20, 2)
			sum := make(chan [32]byte, 1)
			r := newRig(t, []netip.AddrPort{serve(t, func(c *net.TCPConn) {
				var wg sync.WaitGroup
				wg.Go(func() { c.Write(down); c.CloseWrite() })
				b, _ := io.ReadAll(c)
				sum <- sha256.Sum256(b)
				wg.Wait()
			})}, opts...)
			c := r.dial()
			var wg sync.WaitGroup
			wg.Go(func() { c.Write(up); c.CloseWrite() })
			got, err := io.ReadAll(c)
			wg.Wait()
			if err != nil || !bytes.Equal(got, down) {
				t.Errorf("client got %d bytes, %v; equal: %v", len(got), err, bytes.Equal(got, down))
			}
			if <-sum != sha256.Sum256(up) {
				t.Error("backend got other bytes")
			}
			end := r.waitClosed(1)[0]
			if end.info.BytesC2S != 10<<20 || end.info.BytesS2C != 10<<20 {
				t.Errorf("counted %d and %d bytes", end.info.BytesC2S, end.info.BytesS2C)
			}
		})
	}
}

func TestConnectFailures(t *testing.T) {
	for name, tc := range map[string]struct {
		backends []netip.AddrPort
		ok       bool
		failed   []string
	}{
		"second answers": {[]netip.AddrPort{refusing(t), serve(t, echo)}, true, []string{"0: connect: refused"}},
		"none answers":   {[]netip.AddrPort{refusing(t), refusing(t)}, false, []string{"0: connect: refused", "1: connect: refused"}},
		"no backend":     {nil, false, nil},
		"unreachable": {[]netip.AddrPort{netip.MustParseAddrPort("255.255.255.255:9"), serve(t, echo)}, true,
			[]string{"0: connect: unreachable"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, tc.backends)
			c := r.dial()
			if tc.ok {
				roundTrip(t, c, "hello")
			} else {
				if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
					t.Errorf("read %d bytes, %v", n, err)
				}
				eventually(t, func() error {
					r.mu.Lock()
					defer r.mu.Unlock()
					if len(r.gaveUp) != 1 || r.gaveUp[0] != relay.Error {
						return fmt.Errorf("gave up: %v", r.gaveUp)
					}
					return nil
				})
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			if fmt.Sprint(r.failed) != fmt.Sprint(tc.failed) {
				t.Errorf("failed: %v, want %v", r.failed, tc.failed)
			}
			if !tc.ok && len(r.closed) != 0 {
				t.Errorf("closed: %v", r.closed)
			}
		})
	}
}

func TestTimeouts(t *testing.T) {
	for name, tc := range map[string]struct {
		opt  option
		want relay.Reason
	}{
		"idle":     {withIdle(50 * time.Millisecond), relay.IdleTimeout},
		"lifetime": {withLifetime(50 * time.Millisecond), relay.Limit},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, []netip.AddrPort{serve(t, echo)}, tc.opt)
			c := r.dial()
			roundTrip(t, c, "hello")
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				t.Errorf("read: %v, want EOF", err)
			}
			if end := r.waitClosed(1)[0]; end.why != tc.want || end.info.Age < 50*time.Millisecond {
				t.Errorf("closed: %v after %v", end.why, end.info.Age)
			}
		})
	}
}
