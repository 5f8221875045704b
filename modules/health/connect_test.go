package health

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/sys/unix"
)

// deaf is a port whose queue is full, so that a connection to it gets no answer.
func deaf(t *testing.T) netip.AddrPort {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(sa.(*unix.SockaddrInet4).Port))
	for range 8 {
		c, err := net.DialTimeout("tcp", a.String(), 100*time.Millisecond)
		if err != nil {
			return a
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the queue does not fill")
	return a
}

func listening(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func addrOf(l net.Listener) netip.AddrPort { return l.Addr().(*net.TCPAddr).AddrPort() }

// quick is a tcp_connect with times for tests on real sockets.
func quick(t *testing.T, interval, timeout time.Duration) *TCPConnect {
	c := mustLoad(t, "tcp_connect", `{}`).(*TCPConnect)
	c.Interval, c.Timeout = new(caddy.Duration(interval)), new(caddy.Duration(timeout))
	return c
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(long); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", long, what)
		}
	}
}

func (b *target) results() []error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]error(nil), b.errs...)
}

func TestRunnerConnects(t *testing.T) {
	up, refused, silent := &target{addr: addrOf(listening(t))}, &target{addr: closedPort(t, "tcp")}, &target{addr: deaf(t)}
	r := &Runner{Name: "p", Check: quick(t, 50*time.Millisecond, 40*time.Millisecond), Limit: NewLimit(256)}
	r.Start([]Target{up, refused, silent})
	for _, b := range []*target{up, refused, silent} {
		await(t, "five results", func() bool { return len(b.results()) >= 5 })
	}
	r.Stop()
	for _, err := range up.results() {
		if err != nil {
			t.Errorf("a listening backend: %v", err)
		}
	}
	for _, err := range refused.results() {
		if !errors.Is(err, syscall.ECONNREFUSED) || NoVerdict(err) || !strings.HasSuffix(err.Error(), ": connect: connection refused") {
			t.Errorf("a closed port: %v", err)
		}
	}
	for _, err := range silent.results() {
		if err == nil || err.Error() != "no answer within 40ms" || NoVerdict(err) {
			t.Errorf("a port that does not answer: %v", err)
		}
	}
	if n := len(r.Limit); n != 0 {
		t.Errorf("%d places are still taken", n)
	}
}

// More backends than places, most of which do not answer.
func TestRunnerConnectsWithinTheLimit(t *testing.T) {
	silent, up := deaf(t), addrOf(listening(t))
	list := make([]Target, 20)
	for i := range list {
		list[i] = &target{addr: silent}
	}
	list[19] = &target{addr: up}
	r := &Runner{Name: "p", Check: quick(t, 20*time.Millisecond, 5*time.Millisecond), Limit: NewLimit(3)}
	r.Start(list)
	for _, b := range list {
		await(t, "two results", func() bool {
			if n := openTo(t, silent); n > 3 {
				t.Fatalf("%d connections at once, want 3 at most", n)
			}
			return len(b.(*target).results()) >= 2
		})
	}
	r.Stop()
	if n := len(r.Limit); n != 0 {
		t.Errorf("%d places are still taken", n)
	}
}

// openTo counts the sockets that are on their way to an address.
func openTo(t *testing.T, to netip.AddrPort) (n int) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	a := to.Addr().As4()
	want := fmt.Sprintf("%02X%02X%02X%02X:%04X", a[3], a[2], a[1], a[0], to.Port())
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[2] == want && f[3] == "02" { // SYN_SENT
			n++
		}
	}
	return n
}

// What a Runner has begun when it is stopped ends without a verdict, and leaves
// neither a descriptor nor a place behind, nor a backend that looks as if it
// were being checked.
func TestStopEndsConnections(t *testing.T) {
	silent := deaf(t)
	list := make([]Target, 5)
	for i := range list {
		list[i] = &target{addr: silent}
	}
	r := &Runner{Name: "p", Check: quick(t, 20*time.Millisecond, time.Hour), Limit: NewLimit(2)}
	r.Start(list)
	await(t, "two connections", func() bool { return openTo(t, silent) == 2 })
	r.Stop()
	if n := openTo(t, silent); n != 0 {
		t.Errorf("%d connections are left", n)
	}
	if n := len(r.Limit); n != 0 {
		t.Errorf("%d places are still taken", n)
	}
	for _, b := range list {
		b := b.(*target)
		if len(b.results()) != 0 || b.rhythm.running || !b.rhythm.last.IsZero() {
			t.Errorf("results %v, running %v, last check %v; want none", b.results(), b.rhythm.running, b.rhythm.last)
		}
	}
}

// The program of a backend does not hear of checks, so it has nothing to log
// and its queue does not fill. A machine that is busy may send the packet that
// is held back.
func TestConnectionsAreNotSeen(t *testing.T) {
	l := listening(t)
	c := mustLoad(t, "tcp_connect", `{}`)
	const checks = 20
	for range checks {
		if err := ask(t, c, addrOf(l), long); err != nil {
			t.Fatal(err)
		}
	}
	last, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer last.Close()
	for seen := 0; ; seen++ {
		conn, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		if conn.RemoteAddr().String() == last.LocalAddr().String() {
			if seen > checks/2 {
				t.Errorf("%d of %d checks were seen", seen, checks)
			}
			return
		}
	}
}
