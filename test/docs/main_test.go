// Package docs checks the documents: that what they link to is there, that
// their examples load, that their commands exist, and that the pages a newcomer
// follows work when they are followed.
package docs

import (
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
