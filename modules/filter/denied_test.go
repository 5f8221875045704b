package filter

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// TestDenied wants the ranges to be those addresses that Check refuses.
func TestDenied(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	more, allowed := file("more", "192.0.2.64/26\n2001:db8:1::/48\n"), file("allowed", "192.0.2.0/24\n2001:db8::/32\n")
	for name, raws := range map[string][]string{
		"no list":   {`{"filter":"source_limit","max_per_ip":1}`},
		"deny":      {`{"filter":"acl","deny":["192.0.2.0/25","::ffff:198.51.100.0/120"],"allow_files":[]}`},
		"allow":     {`{"filter":"acl","allow":["192.0.2.0/25","2001:db8::/33"]}`},
		"both":      {`{"filter":"acl","allow":["192.0.2.0/24"],"deny":["192.0.2.7"]}`},
		"files":     {fmt.Sprintf(`{"filter":"acl","files":[%q],"allow_files":[%q],"deny":["192.0.2.1"],"allow":["198.51.100.0/24"]}`, more, allowed)},
		"two":       {`{"filter":"acl","allow":["192.0.2.0/24"]}`, `{"filter":"acl","deny":["192.0.2.128/25"]}`},
		"all":       {`{"filter":"acl","deny":["0.0.0.0/0","::/0"]}`},
		"all of v4": {`{"filter":"acl","deny":["0.0.0.0/0"]}`},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
			defer cancel()
			var in []json.RawMessage
			for _, r := range raws {
				in = append(in, json.RawMessage(r))
			}
			c, err := Load(ctx, "denied", in)
			if err != nil {
				t.Fatal(err)
			}
			ranges, state := c.Denied(nil)
			if again, same := c.Denied(state); again != nil || same != state {
				t.Error("asked again without a change, there is another answer")
			}
			for _, s := range []string{
				"192.0.2.0", "192.0.2.1", "192.0.2.7", "192.0.2.8", "192.0.2.63", "192.0.2.64", "192.0.2.127", "192.0.2.128", "192.0.2.255", "192.0.3.0",
				"198.51.100.0", "198.51.101.0", "0.0.0.0", "255.255.255.255", "::1", "2001:db8::1", "2001:db8:1::1", "2001:db8:8000::1", "2001:db9::",
			} {
				a := netip.MustParseAddr(s)
				f := Flow{Source: cidr.Plain(a), Client: netip.AddrPortFrom(a, 1), UDP: true}
				refused := false
				for _, n := range c.filters {
					if acl, ok := n.Filter.(*ACL); ok {
						refused = refused || acl.Check(f) != ""
					}
				}
				if got := ranges.Contains(f.Source); got != refused {
					t.Errorf("%s: %v, and Check refuses it: %v", s, got, refused)
				}
			}
		})
	}
}

func TestRates(t *testing.T) {
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	defer cancel()
	c, err := Load(ctx, "rates", []json.RawMessage{
		json.RawMessage(`{"filter":"rate_limit","per_ip":{"rate":5}}`),
		json.RawMessage(`{"filter":"rate_limit","per_ip":{"rate":3,"burst":9},"per_net":{"rate":7,"burst":8}}`),
	})
	if err != nil {
		t.Fatal(err)
	}
	ip, network := c.Rates()
	if ip.Rate != 5 || ip.Most() != 9 || network.Rate != 7 || network.Most() != 8 {
		t.Errorf("%d %d, %d %d", ip.Rate, ip.Most(), network.Rate, network.Most())
	}
}
