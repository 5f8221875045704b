// Package serve holds the tests of what the product does when all is well:
// every size of datagram, every kind of address, handlers of ours and of
// caddy-l4 in each other's routes, the admin API, metrics, and a decent end.
package serve

import (
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// perfect ends a load that must have noticed nothing.
func perfect(t *testing.T, l *kit.Load) {
	t.Helper()
	if r := l.Stop(); !r.Perfect() {
		t.Errorf("the load noticed: %v", &r)
	}
}

// backends are one of TCP and one of UDP.
type backends struct {
	tcp *kit.TCPBackend
	udp *kit.UDPBackend
}

func newBackends(t *testing.T) backends {
	return backends{kit.NewTCPBackend(t, 1, "127.0.0.1:0"), kit.NewUDPBackend(t, 1, "127.0.0.1:0")}
}

func (b backends) pools() kit.M {
	return kit.M{"tcp": kit.Pool(b.tcp.Addr), "udp": kit.Pool(b.udp.Addr)}
}
