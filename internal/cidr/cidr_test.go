package cidr

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
)

func TestSet(t *testing.T) {
	var s Set
	if err := s.AddAll([]string{"10.0.0.0/8", "192.0.2.7", "::ffff:198.51.100.0/120", "2001:db8::/32", "::ffff:203.0.113.9"}); err != nil {
		t.Fatal(err)
	}
	for a, want := range map[string]bool{
		"10.255.0.1": true, "11.0.0.0": false, "192.0.2.7": true, "192.0.2.8": false, "::ffff:10.1.2.3": true,
		"198.51.100.255": true, "::ffff:198.51.100.1": true, "198.51.101.0": false, "203.0.113.9": true,
		"2001:db8:ffff::1": true, "2001:db9::": false, "fe80::1%eth0": false, "2001:db8::1%eth0": true, "::a00:1": true, "::1": false,
	} {
		if got := s.Contains(netip.MustParseAddr(a)); got != want {
			t.Errorf("%s: %v", a, got)
		}
	}
	if s.Contains(netip.Addr{}) {
		t.Error("no address is in the set")
	}
}

func TestParseErrors(t *testing.T) {
	for in, want := range map[string]string{
		"":                   `"" is no network, such as 203.0.113.0/24 or 2001:db8::/32, and no address`,
		"10.0.0.1/8":         `"10.0.0.1/8" has bits behind its prefix: 10.0.0.0/8 is the network`,
		"10.0.0.0/33":        `"10.0.0.0/33" is no network, such as 203.0.113.0/24 or 2001:db8::/32`,
		"fe80::1%eth0":       `"fe80::1%eth0" is no network, such as 203.0.113.0/24 or 2001:db8::/32, and no address`,
		"::ffff:0.0.0.0/95":  `"::ffff:0.0.0.0/95" has bits behind its prefix: ::fffe:0:0/95 is the network`,
		"example.com":        `"example.com" is no network, such as 203.0.113.0/24 or 2001:db8::/32, and no address`,
		"10.0.0.0/08":        `"10.0.0.0/08" is no network, such as 203.0.113.0/24 or 2001:db8::/32`,
		"10.0.0.0-10.0.0.99": `"10.0.0.0-10.0.0.99" is no network, such as 203.0.113.0/24 or 2001:db8::/32, and no address`,
	} {
		if _, err := Parse(in); err == nil || err.Error() != want {
			t.Errorf("%q: %v, want %s", in, err, want)
		}
	}
}

// The set agrees with going through the list.
func TestAgainstList(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var s Set
	var list []netip.Prefix
	for range 500 {
		p := netip.PrefixFrom(address(rng), 8+rng.IntN(25)).Masked()
		list = append(list, p)
		if err := s.Add(p.String()); err != nil {
			t.Fatal(err)
		}
	}
	for range 5000 {
		a, want := address(rng), false
		for _, p := range list {
			want = want || p.Contains(a)
		}
		if got := s.Contains(a); got != want {
			t.Fatalf("%s: %v, want %v", a, got, want)
		}
		if got := s.Contains(netip.AddrFrom16(a.As16())); got != want {
			t.Fatalf("%s, mapped: %v, want %v", a, got, want)
		}
	}
}

func address(rng *rand.Rand) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(rng.IntN(4)), byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32())})
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "::ffff:10.0.0.0/104", "2001:db8::", "::/0", "0.0.0.0/0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		p, err := Parse(in)
		if err != nil {
			return
		}
		if again, err := Parse(p.String()); err != nil || again != p || p.Addr().Is4In6() && p.Bits() >= 96 {
			t.Errorf("%q is %s, which is %s, %v", in, p, again, err)
		}
		var s Set
		if s.Add(in); !s.Contains(p.Addr()) {
			t.Errorf("%q does not contain %s", in, p.Addr())
		}
	})
}

func BenchmarkContains(b *testing.B) {
	for _, n := range []int{20, 200_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			rng := rand.New(rand.NewPCG(1, 2))
			var s Set
			for s.Len() < n {
				a := netip.AddrFrom4([4]byte{byte(rng.Uint32()), byte(rng.Uint32()), byte(rng.Uint32()), 0})
				s.Add(netip.PrefixFrom(a, 24).String())
			}
			a := netip.MustParseAddr("203.0.113.7")
			b.ReportAllocs()
			for b.Loop() {
				s.Contains(a)
			}
		})
	}
}
