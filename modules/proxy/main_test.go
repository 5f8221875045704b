package proxy_test

import (
	"os"
	"os/signal"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, os.Interrupt) // os/signal keeps a goroutine once it was used
	signal.Stop(ch)
	testkit.Main(m)
}
