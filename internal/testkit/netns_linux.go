package testkit

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ownNetwork marks the environment of a test binary that inOwnNetwork has
// started.
const ownNetwork = "WAYHOUSE_TEST_NETWORK"

// inOwnNetwork runs this binary again in a new network namespace and returns
// its exit code. done is false in that second run and where the kernel does
// not allow it.
func inOwnNetwork() (code int, done bool) {
	if os.Getenv(ownNetwork) != "" {
		if err := loopbackUp(); err != nil {
			fmt.Fprintln(os.Stderr, "bringing loopback up:", err)
			return 1, true
		}
		return 0, false
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), ownNetwork+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	// A process group, to end whatever a run that was cut short has left.
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL, Setpgid: true}
	runtime.LockOSThread() // Pdeathsig is about the thread that starts the child
	defer runtime.UnlockOSThread()
	err := cmd.Start()
	if err == nil {
		err = cmd.Wait()
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, true
	case errors.As(err, &exit):
		return max(exit.ExitCode(), 1), true
	case errors.Is(err, syscall.EPERM):
		return 0, false // on the host's network then
	}
	fmt.Fprintln(os.Stderr, "running in a network namespace:", err)
	return 1, true
}

// loopbackUp sets lo up in the namespace of this process.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var req struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(req.name[:], "lo")
	req.flags = unix.IFF_UP | unix.IFF_RUNNING
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFFLAGS, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return errno
	}
	return nil
}

// Netns is a network namespace with loopback up.
type Netns struct {
	Name string
	fd   int
}

var netnsCount atomic.Int64

// NewNetns makes a namespace that is removed when the test ends.
func NewNetns(t testing.TB) *Netns {
	t.Helper()
	name := fmt.Sprintf("wh-%d-%d", os.Getpid(), netnsCount.Add(1))
	_, err := exec.LookPath("ip")
	Require(t, err, "ip command (package iproute2)")
	if os.Geteuid() != 0 {
		Require(t, errors.New("not root"), "right to make network namespaces")
	}
	Require(t, run("ip", "netns", "add", name), "network namespaces")
	fd, err := unix.Open("/run/netns/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("opening namespace %s: %v", name, err)
	}
	n := &Netns{Name: name, fd: fd}
	t.Cleanup(func() {
		unix.Close(fd)
		if err := run("ip", "netns", "del", name); err != nil {
			t.Errorf("removing namespace %s: %v", name, err)
		}
	})
	n.Run(t, "ip", "link", "set", "lo", "up")
	// Without a link-local address, which is in doubt for a second or two, a host
	// does not ask who its neighbour is.
	n.Run(t, "sh", "-c", "for f in all default; do if [ -e /proc/sys/net/ipv6 ]; then echo 0 > /proc/sys/net/ipv6/conf/$f/accept_dad; fi; done")
	return n
}

// Veth joins two namespaces by a pair of interfaces with these prefixes, such
// as 10.0.0.1/24.
func Veth(t testing.TB, a *Netns, prefixA string, b *Netns, prefixB string) {
	t.Helper()
	n := netnsCount.Add(1)
	devA, devB := fmt.Sprintf("wha%d", n), fmt.Sprintf("whb%d", n)
	a.Run(t, "ip", "link", "add", devA, "type", "veth", "peer", "name", devB, "netns", b.Name)
	for _, end := range []struct {
		ns          *Netns
		dev, prefix string
	}{{a, devA, prefixA}, {b, devB, prefixB}} {
		args := []string{"ip", "addr", "add", end.prefix, "dev", end.dev}
		if strings.Contains(end.prefix, ":") {
			args = append(args, "nodad")
		}
		end.ns.Run(t, args...)
		end.ns.Run(t, "ip", "link", "set", end.dev, "up")
	}
}

// Run runs a command in the namespace.
func (n *Netns) Run(t testing.TB, argv ...string) {
	t.Helper()
	if err := run("ip", append([]string{"netns", "exec", n.Name}, argv...)...); err != nil {
		t.Fatalf("in namespace %s: %v", n.Name, err)
	}
}

// Ports sets the range that the kernel takes local ports from.
func (n *Netns) Ports(t testing.TB, first, last int) {
	t.Helper()
	n.Run(t, "sh", "-c", fmt.Sprintf("echo %d %d > /proc/sys/net/ipv4/ip_local_port_range", first, last))
}

// Do calls f on a thread in the namespace: sockets that f opens itself, not
// in a goroutine it starts, belong to it.
func (n *Netns) Do(t testing.TB, f func()) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if err := unix.Setns(n.fd, unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		f()
		done <- nil
	}()
	if err := <-done; err != nil {
		t.Fatalf("entering namespace %s: %v", n.Name, err)
	}
}

func run(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// nextPort is where Ports looks next. Below the range the kernel gives out.
var nextPort atomic.Int64

const (
	firstPort = 10000
	lastPort  = 32000
)

// Ports returns the first of n free ports in a row, for TCP and UDP.
func Ports(t testing.TB, n int) int {
	t.Helper()
	for range lastPort - firstPort {
		end := int(nextPort.Add(int64(n)))
		first := firstPort + (end-n+os.Getpid()*61)%(lastPort-firstPort-n)
		if allFree(first, n) {
			return first
		}
	}
	t.Fatalf("no %d free ports in a row", n)
	return 0
}

// Port returns a port that is free for TCP and UDP.
func Port(t testing.TB) int { return Ports(t, 1) }

func allFree(first, n int) bool {
	for p := first; p < first+n; p++ {
		tcp, err := net.Listen("tcp", ":"+strconv.Itoa(p))
		if err != nil {
			return false
		}
		tcp.Close()
		udp, err := net.ListenPacket("udp", ":"+strconv.Itoa(p))
		if err != nil {
			return false
		}
		udp.Close()
	}
	return true
}
