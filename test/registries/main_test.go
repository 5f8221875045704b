// Package registries holds the tests of pools whose backends Consul or
// Kubernetes tells of, in a running process.
package registries

import (
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
