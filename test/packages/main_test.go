// Package packages holds the tests of what Wayhouse is shipped in: the service of
// systemd, images, Compose, Kubernetes, Debian packages and tarballs. What takes
// minutes runs with "make packages" only.
package packages

import (
	"os"
	"os/exec"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// slow says that the tests that take minutes are wanted. They fetch tools, so
// that they have the network of the machine.
var slow = os.Getenv("WAYHOUSE_PACKAGES") == "1"

func TestMain(m *testing.M) {
	if slow {
		os.Exit(m.Run())
	}
	kit.Main(m)
}

// command runs a command in a folder below the repository and returns what it
// prints.
func command(t *testing.T, dir string, argv ...string) string {
	t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%q: %v\n%s", argv, err, out)
	}
	return string(out)
}

const root = "../.."

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
