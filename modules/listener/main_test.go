package listener_test

import (
	"os"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestMain does not look for goroutines that are left: caddy-l4 leaves those of
// UDP connections whose server has ended until they are idle.
func TestMain(m *testing.M) {
	remove := testkit.OwnData()
	code := m.Run()
	remove()
	os.Exit(code)
}
