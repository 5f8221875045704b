package filter

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"
	"github.com/prometheus/client_golang/prometheus/testutil"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// placed is a network and what a database says of it: a country or a number.
type placed struct {
	network string
	is      any
}

// database makes one in memory.
func database(t testing.TB, o mmdbwriter.Options, list ...placed) []byte {
	t.Helper()
	o.IncludeReservedNetworks = true
	o.BuildEpoch = 1700000000
	if o.DatabaseType == "" {
		o.DatabaseType = "Test"
	}
	w, err := mmdbwriter.New(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list {
		record := mmdbtype.Map{"registered_country": mmdbtype.Map{"iso_code": mmdbtype.String("ZZ")}}
		switch v := p.is.(type) {
		case string:
			record["country"] = mmdbtype.Map{"iso_code": mmdbtype.String(v), "names": mmdbtype.Map{"en": mmdbtype.String("Land of " + v)}}
		case int:
			record["autonomous_system_number"] = mmdbtype.Uint32(v)
		}
		n := netip.MustParsePrefix(p.network)
		if err := w.Insert(&net.IPNet{IP: n.Addr().AsSlice(), Mask: net.CIDRMask(n.Bits(), n.Addr().BitLen())}, record); err != nil {
			t.Fatal(err)
		}
	}
	var b bytes.Buffer
	if _, err := w.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func save(t testing.TB, b []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "db.mmdb")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// withDBs is a context for filters with these databases, "" for none.
func withDBs(t testing.TB, country, asn string) caddy.Context {
	t.Helper()
	var dbs GeoDBs
	var err error
	if country != "" {
		if dbs.Country, err = OpenGeoDB(Countries, country); err != nil {
			t.Fatal(err)
		}
	}
	if asn != "" {
		if dbs.ASN, err = OpenGeoDB(Systems, asn); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { dbs.Close() })
	return dbs.In(caddy.Context{Context: context.Background()})
}

var (
	worldCountries = []placed{{"192.0.2.0/24", "DE"}, {"198.51.100.0/24", "AT"}, {"203.0.113.0/24", "US"}, {"2001:db8:1::/48", "DE"}, {"2001:db8:2::/48", "us"}, {"100.64.0.0/10", nil}}
	worldSystems   = []placed{{"192.0.2.0/25", 64500}, {"198.51.100.0/24", 64501}, {"2001:db8:1::/48", 64500}, {"100.64.0.0/16", 64502}}
)

func TestGeo(t *testing.T) {
	ctx := withDBs(t, save(t, database(t, mmdbwriter.Options{}, worldCountries...)), save(t, database(t, mmdbwriter.Options{}, worldSystems...)))
	for options, tc := range map[string]struct{ in, out []string }{
		`"deny": ["de"]`:                        {[]string{"198.51.100.1", "203.0.113.1", "100.64.0.1", "2001:db8:9::1", "10.0.0.1"}, []string{"192.0.2.1", "2001:db8:1::1"}},
		`"allow": ["DE", "us"]`:                 {[]string{"192.0.2.1", "203.0.113.1", "2001:db8:2::1"}, []string{"198.51.100.1", "100.64.0.1", "10.0.0.1", "2001:db8:9::1"}},
		`"allow": ["DE"], "deny": ["DE"]`:       {nil, []string{"192.0.2.1", "198.51.100.1"}},
		`"asn_deny": [64500]`:                   {[]string{"192.0.2.200", "198.51.100.1", "10.0.0.1"}, []string{"192.0.2.1", "2001:db8:1::1"}},
		`"asn_allow": [64501]`:                  {[]string{"198.51.100.1"}, []string{"192.0.2.1", "192.0.2.200", "10.0.0.1"}},
		`"allow": ["DE"], "asn_allow": [64501]`: {[]string{"192.0.2.1", "192.0.2.200", "198.51.100.1"}, []string{"203.0.113.1", "10.0.0.1"}},
		`"allow": ["DE"], "asn_deny": [64500]`:  {[]string{"192.0.2.200"}, []string{"192.0.2.1", "198.51.100.1"}},
	} {
		t.Run(options, func(t *testing.T) {
			c, err := chainOf(t, ctx, `[{"filter": "geo", `+options+`}]`)
			if err != nil {
				t.Fatal(err)
			}
			for want, clients := range map[string][]string{"": tc.in, RuleGeo: tc.out} {
				for _, client := range clients {
					for _, form := range forms(netip.MustParseAddr(client)) {
						f := from(t, form.String())
						if got := c.Check(f); got != want {
							t.Errorf("%s: %q, want %q", form, got, want)
						}
						c.Explain(f, func(a Answer) bool {
							if a.Rule != want || !strings.Contains(a.Reason, " is in ") {
								t.Errorf("%s is explained by %+v, want %q", form, a, want)
							}
							return true
						})
					}
				}
			}
		})
	}
}

func TestGeoMistakes(t *testing.T) {
	both := withDBs(t, save(t, database(t, mmdbwriter.Options{}, worldCountries...)), save(t, database(t, mmdbwriter.Options{}, worldSystems...)))
	none := withDBs(t, "", "")
	for options, tc := range map[string]struct {
		ctx  caddy.Context
		want string
	}{
		`"allow": []`:          {both, `allow, deny, asn_allow and asn_deny are all empty`},
		`"allow": ["GER"]`:     {both, `allow[0]: "GER" is not two letters of ISO 3166-1, such as DE`},
		`"deny": ["DE", "4X"]`: {both, `deny[1]: "4X" is not two letters`},
		`"asn_deny": [0]`:      {both, `asn_deny[0]: 0 is the number of no autonomous system`},
		`"asn_deny": ["AS1"]`:  {both, `asn_deny[0]: `},
		`"country": ["DE"]`:    {both, `country: unknown key`},
		`"deny": ["DE"]`:       {none, `allow and deny need a database: give its path in apps.wayhouse.geo_db`},
		`"asn_allow": [64500]`: {none, `asn_allow and asn_deny need a database: give its path in apps.wayhouse.geo_asn_db`},
	} {
		if _, err := chainOf(t, tc.ctx, `[{"filter": "geo", `+options+`}]`); err == nil || !strings.Contains(err.Error(), "filters[0]: ") || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %s", options, err, tc.want)
		}
	}
	whole := database(t, mmdbwriter.Options{}, worldCountries...)
	for name, tc := range map[string]struct {
		kind GeoKind
		path string
		want string
	}{
		"there is none":  {Countries, "/there/is/none", "no such file"},
		"no database":    {Countries, save(t, []byte("hello")), "invalid MaxMind DB file"},
		"empty":          {Countries, save(t, nil), "invalid MaxMind DB file"},
		"half":           {Countries, save(t, whole[:len(whole)/2]), "invalid MaxMind DB file"},
		"another kind":   {Systems, save(t, whole), `there is no asn in this database of the type "Test"`},
		"a longer code":  {Countries, save(t, database(t, mmdbwriter.Options{}, placed{"192.0.2.0/24", "GER"})), `"GER" is no country`},
		"no file at all": {Countries, "/dev", "is not a regular file"},
	} {
		if _, err := OpenGeoDB(tc.kind, tc.path); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %s", name, err, tc.want)
		}
	}
}

// TestGeoFailsClosed has a filter whose database is not there after all.
func TestGeoFailsClosed(t *testing.T) {
	g := &Geo{country: geoLists{db: new(GeoDB), deny: map[uint32]bool{1: true}}}
	if rule := g.Check(from(t, "192.0.2.1")); rule != RuleGeo {
		t.Errorf("%q, want everybody refused", rule)
	}
}

// TestGeoIPv4Only asks a database of IPv4 for IPv6.
func TestGeoIPv4Only(t *testing.T) {
	ctx := withDBs(t, save(t, database(t, mmdbwriter.Options{IPVersion: 4}, placed{"192.0.2.0/24", "DE"})), "")
	for options, want := range map[string]string{`"deny": ["DE"]`: "", `"allow": ["DE"]`: RuleGeo} {
		c, err := chainOf(t, ctx, `[{"filter": "geo", `+options+`}]`)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Check(from(t, "2001:db8::1")); got != want {
			t.Errorf("%s: %q, want %q", options, got, want)
		}
	}
}

// TestGeoIsWatched changes a database under a running filter, for the better
// and for the worse.
func TestGeoIsWatched(t *testing.T) {
	path := save(t, database(t, mmdbwriter.Options{}, placed{"192.0.2.0/24", "DE"}))
	c, err := chainOf(t, withDBs(t, path, ""), `[{"filter": "geo", "deny": ["DE"]}]`)
	if err != nil {
		t.Fatal(err)
	}
	start(t, c)
	defer c.Stop()
	denied := func(client string) bool { return c.Check(from(t, client)) == RuleGeo }
	if !denied("192.0.2.1") || denied("198.51.100.1") {
		t.Fatal("the first database does not hold")
	}
	errors := func() float64 { return testutil.ToFloat64(geoRefresh.WithLabelValues("country", "error")) }
	before := errors()
	whole := database(t, mmdbwriter.Options{}, placed{"198.51.100.0/24", "DE"})
	for i, broken := range [][]byte{whole[:len(whole)-20], bytes.Repeat([]byte{0xff}, 100)} {
		replace(t, path, string(broken))
		kit.Settles(t, "the number of failures", before+float64(i)+1, errors)
		if !denied("192.0.2.1") {
			t.Error("a broken database has taken the place of the one before")
		}
		replace(t, path, string(database(t, mmdbwriter.Options{}, placed{"192.0.2.0/24", "DE"}))) // so that the next failure is a new one
		ok := testutil.ToFloat64(geoRefresh.WithLabelValues("country", "ok"))
		kit.Eventually(t, "the whole one is read", func() bool {
			return testutil.ToFloat64(geoRefresh.WithLabelValues("country", "ok")) > ok || errors() > before+float64(i)+1
		})
	}
	replace(t, path, string(whole))
	kit.Eventually(t, "the new database holds", func() bool { return !denied("192.0.2.1") && denied("198.51.100.1") })
}

// FuzzGeo asks a filter and a naive reading of the networks.
func FuzzGeo(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) {
		rng := rand.New(rand.NewPCG(a, b))
		var list []placed
		for range 1 + rng.IntN(15) {
			list = append(list, placed{prefix(rng).String(), []string{"DE", "AT", "US"}[rng.IntN(3)]})
		}
		c, err := newGeoContent(Countries, database(t, mmdbwriter.Options{DisableIPv4Aliasing: true}, list...))
		if err != nil {
			t.Fatal(err)
		}
		db := new(GeoDB)
		db.content.Store(c)
		g := &Geo{country: geoLists{db: db, allow: map[uint32]bool{}, deny: map[uint32]bool{}}}
		var allow, deny []string
		for _, code := range []string{"DE", "AT", "US"} {
			v, _ := country(code)
			switch rng.IntN(3) {
			case 0:
				g.country.allow[v], g.closed = true, true
				allow = append(allow, code)
			case 1:
				g.country.deny[v] = true
				deny = append(deny, code)
			}
		}
		for range 30 {
			client := prefix(rng).Addr()
			is := ""
			for _, p := range list { // a later network is written over an earlier one
				if netip.MustParsePrefix(p.network).Contains(client) {
					is = p.is.(string)
				}
			}
			want := ""
			if slices.Contains(deny, is) || len(allow) > 0 && !slices.Contains(allow, is) {
				want = RuleGeo
			}
			for _, form := range forms(client) {
				if got := g.Check(flowOf(form, nil)); got != want {
					t.Fatalf("%s in %q with %v, allow %v, deny %v: %q, want %q", form, is, list, allow, deny, got, want)
				}
			}
		}
	})
}

// FuzzGeoDB reads what may be no database.
func FuzzGeoDB(f *testing.F) {
	f.Add(database(f, mmdbwriter.Options{}, worldCountries...))
	f.Add(database(f, mmdbwriter.Options{IPVersion: 4, RecordSize: 24}, placed{"192.0.2.0/24", "DE"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := newGeoContent(Countries, b)
		if err != nil {
			return
		}
		db := &GeoDB{kind: Countries}
		db.content.Store(c)
		for _, a := range []string{"192.0.2.1", "2001:db8:1::1", "255.255.255.255"} {
			db.find(netip.MustParseAddr(a))
		}
	})
}

func TestGeoAllocatesNothing(t *testing.T) {
	ctx := withDBs(t, save(t, database(t, mmdbwriter.Options{}, worldCountries...)), save(t, database(t, mmdbwriter.Options{}, worldSystems...)))
	c, err := chainOf(t, ctx, `[{"filter": "geo", "deny": ["US"], "allow": ["DE"], "asn_deny": [64501]}]`)
	if err != nil {
		t.Fatal(err)
	}
	flows := []Flow{from(t, "192.0.2.1"), from(t, "198.51.100.1"), from(t, "2001:db8:2::1"), from(t, "10.0.0.1")}
	if n := testing.AllocsPerRun(1000, func() {
		for _, f := range flows {
			c.Check(f)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkGeo(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 2))
	var list []placed
	for range 20_000 {
		a := netip.AddrFrom4([4]byte{byte(1 + rng.IntN(220)), byte(rng.Uint32()), byte(rng.Uint32()), 0})
		list = append(list, placed{netip.PrefixFrom(a, 12+rng.IntN(13)).Masked().String(), fmt.Sprintf("%c%c", 'A'+rng.IntN(26), 'A'+rng.IntN(26))})
	}
	c, err := chainOf(b, withDBs(b, save(b, database(b, mmdbwriter.Options{}, list...)), ""), `[{"filter": "geo", "deny": ["US"]}]`)
	if err != nil {
		b.Fatal(err)
	}
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
