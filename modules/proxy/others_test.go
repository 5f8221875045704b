package proxy_test

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// TestAddressOfAnotherApp has a server of another app listen where a listener
// does. The kernel would let both, whichever is first, and also when the
// listener has its sockets from the config before.
func TestAddressOfAnotherApp(t *testing.T) {
	var port int
	load := func(bind, other string) error {
		return caddy.Load(fmt.Appendf(nil, `{"admin": {"disabled": true, "config": {"persist": false}}, "apps": {%s
			"wayhouse": {"shutdown_grace": "0s", "listeners": {"game": {"bind": ["%s:%d"], "routes": [{"handle": [{"handler": "echo"}]}]}}}}}`,
			strings.ReplaceAll(other, "PORT", fmt.Sprint(port)), bind, port), true)
	}
	t.Cleanup(func() { caddy.Stop() })
	http := func(listen, more string) string {
		return fmt.Sprintf(`"http": {"servers": {"site": {"listen": [%q], "automatic_https": {"disable": true}%s}}},`, listen, more)
	}
	l4 := func(listen string) string {
		return fmt.Sprintf(`"layer4": {"servers": {"site": {"listen": [%q], "routes": [{"handle": [{"handler": "echo"}]}]}}},`, listen)
	}
	for name, tc := range map[string]struct {
		bind, other, want string
	}{
		"a site on every address":   {"tcp/", http(":PORT", ""), "apps.http.servers.site listens on tcp/[::]:PORT too"},
		"a site on one address":     {"tcp/127.0.0.1", http("localhost:PORT", ""), "apps.http.servers.site listens on tcp/127.0.0.1:PORT too"},
		"HTTP/3":                    {"udp/", http(":PORT", `, "tls_connection_policies": [{}]`), "apps.http.servers.site listens on udp/[::]:PORT too"},
		"a layer4 server":           {"udp/0.0.0.0", l4("udp/0.0.0.0:PORT"), "apps.layer4.servers.site listens on udp/0.0.0.0:PORT too"},
		"a layer4 server of TCP":    {"udp/", l4("127.0.0.1:PORT"), ""},
		"a site without TLS":        {"udp/", http(":PORT", ""), ""},
		"two addresses of one port": {"tcp/127.0.0.1", http("127.0.0.2:PORT", ""), ""},
	} {
		t.Run(name, func(t *testing.T) {
			for _, before := range []string{"nothing", "the listener alone"} {
				caddy.Stop()
				// Another port each time: servers of other apps may close theirs a little late.
				free, err := net.Listen("tcp", ":0")
				if err != nil {
					t.Fatal(err)
				}
				port = free.Addr().(*net.TCPAddr).Port
				free.Close()
				want := strings.ReplaceAll(tc.want, "PORT", fmt.Sprint(port))
				if before != "nothing" {
					if err := load(tc.bind, ""); err != nil {
						t.Fatal(err)
					}
				}
				err = load(tc.bind, tc.other)
				switch {
				case want == "" && err != nil:
					t.Errorf("after %s: %v", before, err)
				case want != "" && err == nil, want != "" && before != "nothing" && !strings.Contains(err.Error(), want):
					t.Errorf("after %s: %v, want %q", before, err, want)
				case want != "" && !strings.Contains(err.Error(), "listeners.game.bind[0]: "):
					t.Errorf("after %s: %v does not tell the path", before, err)
				}
			}
		})
	}
}
