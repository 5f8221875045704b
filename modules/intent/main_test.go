package intent

import (
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
