package pool

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// TestMain fails when the tests leave goroutines or descriptors behind.
func TestMain(m *testing.M) {
	goroutines, fds := runtime.NumGoroutine(), descriptors()
	code := m.Run()
	if f := flag.Lookup("test.fuzz"); f != nil && f.Value.String() != "" {
		os.Exit(code) // the fuzzer itself leaves a goroutine
	}
	for deadline := time.Now().Add(5 * time.Second); code == 0; runtime.Gosched() {
		g, f := runtime.NumGoroutine(), descriptors()
		if g <= goroutines && f <= fds+2 { // the runtime's own epoll and eventfd
			break
		}
		if time.Now().After(deadline) {
			fmt.Printf("left behind: %d goroutines, %d descriptors\n", g-goroutines, f-fds)
			code = 1
		}
	}
	os.Exit(code)
}

func descriptors() int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(list)
}
