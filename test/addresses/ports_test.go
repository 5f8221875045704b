package addresses

import (
	"fmt"
	"net"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestTargetPort has a listener of three ports before a backend that answers at
// the third of its own.
func TestTargetPort(t *testing.T) {
	base := kit.Ports(t, 3)
	for name, tc := range map[string]struct {
		mapping any
		hit, at int
	}{
		"same":   {"same", base + 2, base + 2},
		"offset": {"offset 1000", base + 1, base + 1001},
		"list":   {kit.A{base + 500, fmt.Sprintf("%d-%d", base+501, base+502)}, base + 2, base + 502},
	} {
		t.Run(name, func(t *testing.T) {
			// The backend has the same port at another address of loopback.
			at := fmt.Sprintf("127.0.0.2:%d", tc.at)
			kit.NewTCPBackend(t, 1, at)
			kit.NewUDPBackend(t, 1, at)
			binds := []string{fmt.Sprintf("tcp/127.0.0.1:%d-%d", base, base+2), fmt.Sprintf("udp/127.0.0.1:%d-%d", base, base+2)}
			backend := fmt.Sprintf("127.0.0.2:%d", base)
			p := kit.Start(t, kit.App(kit.M{"game": kit.Listener(binds, kit.Route(kit.M{"handler": "pool", "pool": "p", "target_port": tc.mapping}))},
				kit.M{"p": kit.Pool(backend)}), kit.Options{})
			for _, network := range []string{"tcp", "udp"} {
				c, err := net.Dial(network, kit.Local(tc.hit))
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if _, err := ask(c, 1); err != nil {
					t.Fatalf("%s: no answer: %v", network, err)
				}
				var sessions []struct{ Backend, Upstream string }
				p.JSON("/sessions?proto="+network, &sessions)
				if len(sessions) != 1 || sessions[0].Backend != backend || sessions[0].Upstream != at {
					t.Errorf("%s: /sessions shows %v, want %s at %s", network, sessions, backend, at)
				}
			}
			if n := p.Metric("backend_active_sessions", "backend", backend); n != 2 {
				t.Errorf("the backend counts %v flows, want 2", n)
			}
		})
	}
}
