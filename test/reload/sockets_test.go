package reload

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// listening names the sockets of a process that are bound to a port, listening
// ones of TCP and unconnected ones of UDP, by their inodes: another socket in
// the place of one has another inode.
func listening(t *testing.T, p *kit.Process, port int) string {
	t.Helper()
	own := make(map[string]bool)
	fds := fmt.Sprintf("/proc/%d/fd", p.PID())
	names, err := os.ReadDir(fds)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		if to, err := os.Readlink(filepath.Join(fds, n.Name())); err == nil { // else it was closed meanwhile
			own[to] = true
		}
	}
	var found []string
	for _, network := range []string{"tcp", "tcp6", "udp", "udp6"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", p.PID(), network))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) < 10 || !strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) {
				continue
			}
			if !own["socket:["+f[9]+"]"] {
				continue
			}
			if f[3] == "0A" || strings.HasPrefix(network, "udp") && f[3] == "07" {
				found = append(found, network+"/"+f[9])
			}
		}
	}
	slices.Sort(found)
	return strings.Join(found, " ")
}
