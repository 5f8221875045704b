// Package testkit holds what the tests of the whole product share: a runner
// for the real process, backends that say who they saw, a load that notices
// every lost, repeated and re-sourced message, and network namespaces. Only
// tests import it.
package testkit

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/pprof"
	"syscall"
	"testing"
	"time"
)

// Long is how long anything may take before a test gives up. It is no claim
// about speed: machines of ours are shared and the race detector is slow.
const Long = 2 * time.Minute

// M is a JSON object.
type M = map[string]any

// A is a JSON array.
type A = []any

// Poll calls ok until it is true, and reports whether that happened before
// the deadline.
func Poll(within time.Duration, ok func() bool) bool {
	end := time.NewTimer(within)
	defer end.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-end.C:
			return ok()
		}
	}
	return true
}

// Eventually fails the test unless ok becomes true.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	if !Poll(Long, ok) {
		t.Fatalf("still not after %v: %s", Long, what)
	}
}

// Settles waits for value to become want, and fails the test telling what it
// was last.
func Settles[T comparable](t testing.TB, what string, want T, value func() T) {
	t.Helper()
	var got T
	if !Poll(Long, func() bool { got = value(); return got == want }) {
		t.Fatalf("%s is %v after %v, want %v", what, got, Long, want)
	}
}

// Require skips a test for want of something, unless this is CI, where
// everything has to be there.
func Require(t testing.TB, err error, what string) {
	t.Helper()
	switch {
	case err == nil:
	case os.Getenv("CI") == "true":
		t.Fatalf("CI has no %s: %v", what, err)
	default:
		t.Skipf("no %s: %v", what, err)
	}
}

// Soak reports whether the long forms of tests are wanted.
func Soak() bool { return os.Getenv("WAYHOUSE_SOAK") == "1" }

// Scaled is full in a soak and part otherwise.
func Scaled(part, full int) int {
	if Soak() {
		return full
	}
	return part
}

// Main runs the tests of a package in a network namespace of their own, where
// that is allowed, so that their ports collide with nobody's, with a data
// directory of their own, and fails them when goroutines or descriptors of the
// test itself are left at the end.
func Main(m *testing.M) {
	if code, done := inOwnNetwork(); done {
		os.Exit(code)
	}
	remove := OwnData()
	settleSignals()
	files, goroutines := openFiles(os.Getpid()), runtime.NumGoroutine()
	code := m.Run()
	if code == 0 && !fuzzing() && !left(files, goroutines) {
		code = 1
	}
	remove()
	os.Exit(code)
}

// OwnData gives Caddy in this process a data directory that nobody else uses.
func OwnData() (remove func()) {
	dir, err := os.MkdirTemp("", "wayhouse-data")
	if err != nil {
		fmt.Fprintln(os.Stderr, "making a data directory:", err)
		os.Exit(1)
	}
	os.Setenv("XDG_DATA_HOME", dir)
	return func() { os.RemoveAll(dir) }
}

// settleSignals has os/signal start the goroutine that it keeps for good, which
// a test that runs Caddy would otherwise seem to leave.
func settleSignals() {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGWINCH)
	signal.Stop(ch)
}

// fuzzing reports whether the run was for fuzzing: that leaves goroutines of
// its own.
func fuzzing() bool {
	f := flag.Lookup("test.fuzz")
	return f != nil && f.Value.String() != ""
}

// left reports whether what the tests used has been given back.
func left(files, goroutines int) bool {
	ok := Poll(10*time.Second, func() bool {
		return openFiles(os.Getpid()) <= files+1 && runtime.NumGoroutine() <= goroutines // +1: the runtime's epoll
	})
	if !ok {
		fmt.Fprintf(os.Stderr, "the tests began with %d descriptors and %d goroutines and end with %d and %d\n",
			files, goroutines, openFiles(os.Getpid()), runtime.NumGoroutine())
		pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
	}
	return ok
}

// openFiles counts the descriptors of a process; -1 when it is gone.
func openFiles(pid int) int {
	d, err := os.Open(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return -1
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return -1
	}
	if pid == os.Getpid() {
		return len(names) - 1 // d itself
	}
	return len(names)
}
