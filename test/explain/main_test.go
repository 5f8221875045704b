// Package explain tests that what POST /explain says is what happens.
package explain

import (
	"os"
	"os/signal"
	"syscall"
	"testing"

	_ "github.com/wayhouse-proxy/wayhouse"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) {
	// The runtime's goroutine for signals, which Caddy starts, stays for good: let
	// it be there before anything is counted.
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGWINCH)
	signal.Stop(c)
	kit.Main(m)
}
