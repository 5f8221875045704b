// Package monitoring holds the tests of what a process tells those who watch
// it: that its series stay as many as the config has names, and that the
// dashboard and the alerts of deploy/ speak of series that there are.
package monitoring

import (
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }
