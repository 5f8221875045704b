// Package explain tests that what POST /explain says is what happens.
package explain

import (
	"testing"

	_ "github.com/wayhouse-proxy/wayhouse"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }
