// Package reload holds the tests of one promise: a change of config disturbs no
// flow it does not mean to, and a config that cannot run changes nothing.
package reload

import (
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
