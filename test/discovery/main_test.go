// Package discovery holds the tests of sources against what they ask: a DNS
// server whose records change under running sessions, and files.
package discovery

import (
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
