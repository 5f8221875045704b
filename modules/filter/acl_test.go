package filter

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

func flowOf(client netip.Addr, stats *flow.Listener) Flow {
	return Flow{Source: cidr.Plain(client), Client: netip.AddrPortFrom(client.Unmap(), 7777), UDP: true, Stats: stats}
}

// write makes a file of a list.
func write(t testing.TB, lines ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "list")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestACL(t *testing.T) {
	blocked := write(t, "# a feed", "", "198.51.100.0/24 ; SBL1", "2001:db8:bad::/48#x", "\t::ffff:203.0.113.9 ")
	partners := write(t, "192.0.2.128/25", "2001:db8:aa::/48")
	for name, tc := range map[string]struct {
		acl     string
		in, out []string
	}{
		"deny alone lets all others in": {`"deny": ["10.0.0.0/8"]`, []string{"11.0.0.1", "2001:db8::1", "::1"}, []string{"10.1.2.3"}},
		"allow alone lets no others in": {`"allow": ["192.0.2.0/24", "2001:db8::7"]`, []string{"192.0.2.1", "2001:db8::7"}, []string{"192.0.3.1", "2001:db8::8", "::1"}},
		"deny wins":                     {`"allow": ["0.0.0.0/0"], "deny": ["10.0.0.0/8"]`, []string{"11.0.0.1"}, []string{"10.1.2.3", "2001:db8::1"}},
		"a file denies":                 {`"files": ["` + blocked + `"]`, []string{"203.0.113.8", "2001:db8::1"}, []string{"198.51.100.7", "2001:db8:bad::1", "203.0.113.9"}},
		"a file allows":                 {`"allow_files": ["` + partners + `"]`, []string{"192.0.2.200", "2001:db8:aa::1"}, []string{"192.0.2.1", "2001:db8::1"}},
		"all of it": {`"allow": ["192.0.2.7"], "deny": ["192.0.2.201"], "files": ["` + blocked + `"], "allow_files": ["` + partners + `"]`,
			[]string{"192.0.2.7", "192.0.2.200"}, []string{"192.0.2.201", "192.0.2.8", "198.51.100.7"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := mustChain(t, `[{"filter": "acl", `+tc.acl+`}]`)
			for want, clients := range map[string][]string{"": tc.in, RuleACL: tc.out} {
				for _, client := range clients {
					f := from(t, client)
					if got := c.Check(f); got != want {
						t.Errorf("%s: %q, want %q", client, got, want)
					}
					c.Explain(f, func(a Answer) bool {
						if a.Rule != want || !a.Asked || !strings.Contains(a.Reason, f.Source.String()) {
							t.Errorf("%s is explained by %+v, want %q", client, a, want)
						}
						return true
					})
				}
			}
		})
	}
}

func TestACLMistakes(t *testing.T) {
	wrong := write(t, "10.0.0.0/8", "", "10.0.0.1/8")
	for acl, want := range map[string]string{
		``:                                                    `allow, deny, files, urls, allow_files and allow_urls are all empty`,
		`"deny": ["10.0.0.1/8"]`:                              `deny[0]: "10.0.0.1/8" has bits behind its prefix: 10.0.0.0/8 is the network`,
		`"allow": ["10.0.0.0/8", "x"]`:                        `allow[1]: "x" is no network`,
		`"denny": ["10.0.0.0/8"]`:                             `denny: unknown key; did you mean deny?`,
		`"files": ["/there/is/none"]`:                         `files[0]: open /there/is/none: no such file`,
		`"files": [""]`:                                       `files[0]: the path is empty`,
		`"files": ["` + wrong + `"]`:                          `files[0]: ` + wrong + `:3: "10.0.0.1/8" has bits`,
		`"files": ["/dev"]`:                                   `files[0]: /dev is not a regular file`,
		`"files": ["/dev/null"]`:                              `files[0]: /dev/null is not a regular file`,
		`"urls": ["ftp://example.com"]`:                       `urls[0]: "ftp://example.com" begins with neither https:// nor http://`,
		`"urls": ["http://example.com/x"]`:                    `urls[0]: "http://example.com/x" is http:// to another host`,
		`"urls": ["https://u:p@h/"]`:                          `urls[0]: a user in the URL`,
		`"allow_urls": ["https:///x"]`:                        `allow_urls[0]: "https:///x" names no host`,
		`"urls": ["https://h/#f"]`:                            `urls[0]: "https://h/#f" has a fragment`,
		`"urls": ["https://h/"], "refresh_interval": "1s"`:    `refresh_interval: 1s is not from 10s to 24h0m0s`,
		`"deny": ["10.0.0.0/8"], "refresh_interval": "1m"`:    `refresh_interval: there is no URL to ask again`,
		`"deny": ["10.0.0.0/8"], "refresh_interval": "often"`: `refresh_interval: "often" is not a duration`,
	} {
		sep := ", "
		if acl == "" {
			sep = ""
		}
		_, err := chain(t, `[{"filter": "acl", "deny": ["192.0.2.1"]}, {"filter": "acl"`+sep+acl+`}]`)
		if err == nil || !strings.Contains(err.Error(), "filters[1]: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", acl, err, want)
		}
	}
	if _, err := chain(t, `[{"filter": "alc"}]`); err == nil || err.Error() != `filters[0].filter: no filter is named "alc"; did you mean acl?` {
		t.Error(err)
	}
}

// FuzzACL asks a filter and a naive reading of the same rules.
func FuzzACL(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Add(uint64(44), uint64(0))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		rng := rand.New(rand.NewPCG(a, b))
		acl := ACL{allow: new(cidr.Set), deny: new(cidr.Set)}
		var allow, deny []netip.Prefix
		for range rng.IntN(20) {
			p := prefix(rng)
			allow = append(allow, p)
			if err := acl.allow.Add(written(rng, p)); err != nil {
				t.Fatal(err)
			}
		}
		for range rng.IntN(20) {
			p := prefix(rng)
			deny = append(deny, p)
			if err := acl.deny.Add(written(rng, p)); err != nil {
				t.Fatal(err)
			}
		}
		acl.closed = len(allow) > 0
		for range 50 {
			client := prefix(rng).Addr()
			if rng.IntN(2) == 0 && len(allow) > 0 {
				client = allow[rng.IntN(len(allow))].Addr()
			}
			in := func(list []netip.Prefix) bool {
				return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(client) })
			}
			want := ""
			if in(deny) || len(allow) > 0 && !in(allow) {
				want = RuleACL
			}
			for _, form := range forms(client) {
				if got := acl.Check(flowOf(form, nil)); got != want {
					t.Fatalf("%s with allow %v, deny %v: %q, want %q", form, allow, deny, got, want)
				}
			}
		}
	})
}

// prefix is a network near many others.
func prefix(rng *rand.Rand) netip.Prefix {
	if rng.IntN(2) == 0 {
		a := netip.AddrFrom4([4]byte{byte(1 + rng.IntN(2)), byte(rng.IntN(2)), byte(rng.IntN(2)), byte(rng.IntN(4))})
		return netip.PrefixFrom(a, 7+rng.IntN(26)).Masked()
	}
	var b [16]byte
	b[0], b[1], b[7], b[15] = 0x20, 0x01, byte(rng.IntN(2)), byte(rng.IntN(4))
	return netip.PrefixFrom(netip.AddrFrom16(b), 8+rng.IntN(121)).Masked()
}

// written is one of the ways to write a network.
func written(rng *rand.Rand, p netip.Prefix) string {
	if p.Addr().Is4() && rng.IntN(2) == 0 {
		return netip.PrefixFrom(netip.AddrFrom16(p.Addr().As16()), p.Bits()+96).String()
	}
	return p.String()
}

// forms are the notations in which a client's address can come.
func forms(a netip.Addr) []netip.Addr {
	list := []netip.Addr{a}
	if a.Is4() {
		mapped := netip.AddrFrom16(a.As16())
		list = append(list, mapped, mapped.WithZone("eth0"))
		if b := a.As4(); b[0] != 0 {
			list = append(list, netip.AddrFrom16([16]byte{12: b[0], 13: b[1], 14: b[2], 15: b[3]}))
		}
		return list
	}
	return append(list, a.WithZone("eth0"))
}

func TestACLAllocatesNothing(t *testing.T) {
	c := mustChain(t, `[{"filter": "acl", "deny": ["10.0.0.0/8"], "allow": ["0.0.0.0/0"], "files": ["`+write(t, "198.51.100.0/24")+`"]}]`)
	in, out := from(t, "192.0.2.1"), from(t, "198.51.100.1")
	if n := testing.AllocsPerRun(1000, func() { c.Check(in); c.Check(out) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkACL(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	var lines []string
	seen := make(map[netip.Prefix]bool)
	for len(lines) < 200_000 {
		a := netip.AddrFrom4([4]byte{byte(1 + rng.IntN(220)), byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())})
		if p := netip.PrefixFrom(a, 16+rng.IntN(17)).Masked(); !seen[p] {
			seen[p] = true
			lines = append(lines, p.String())
		}
	}
	c := mustChain(b, `[{"filter": "acl", "files": ["`+write(b, lines...)+`"]}]`)
	var clients []Flow
	for range 4096 {
		clients = append(clients, from(b, fmt.Sprintf("%d.%d.%d.%d", 1+rng.IntN(220), rng.IntN(256), rng.IntN(256), rng.IntN(256))))
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		c.Check(clients[i&4095])
		i++
	}
}
