package admission

import (
	"net/http"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestExplain asks what filters say, up to the one that refuses.
func TestExplain(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	l := kit.With(kit.ToPool("udp", "udp/"+addr), kit.M{"filters": kit.A{
		kit.M{"filter": "acl", "deny": []string{"192.0.2.0/24"}},
		kit.M{"filter": "source_limit", "max_per_ip": 1},
		kit.M{"filter": "rate_limit", "per_ip": kit.M{"rate": 1}},
	}})
	p := kit.Start(t, kit.App(kit.M{"l": l}, game(t)), kit.Options{})
	for src, want := range map[string][]string{
		"192.0.2.7:1":          {`"what":"filter","reason":"acl: 192.0.2.7 is denied by the config"`},
		"[::ffff:192.0.2.7]:1": {`"what":"filter","reason":"acl: 192.0.2.7 is denied by the config"`},
		"198.51.100.7:1":       {`"step":"filter","name":"rate_limit","verdict":"passes"`, `"step":"filter","name":"source_limit","verdict":"passes"`, `"what":"pool"`},
	} {
		for range 3 { // nothing is counted
			status, body := p.Do(http.MethodPost, "/explain", []byte(`{"listener": "l", "src": "`+src+`", "bytes": "ascii:x"}`))
			for _, w := range want {
				if status != 200 || !strings.Contains(body, w) {
					t.Errorf("%s: %d %s, want %s", src, status, body, w)
				}
			}
		}
	}
	if n := p.Metric("filter_blocked_total"); n != 0 {
		t.Errorf("%v were counted", n)
	}
}
