package cidr

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

func TestRanges(t *testing.T) {
	ranges := func(ss ...string) Ranges {
		var ps []netip.Prefix
		for _, s := range ss {
			p, err := Parse(s)
			if err != nil {
				t.Fatal(err)
			}
			ps = append(ps, p)
		}
		return RangesOf(slices.Values(ps))
	}
	all := ranges("0.0.0.0/0", "::/0")
	for name, tc := range map[string]struct {
		got  Ranges
		want string
	}{
		"none":             {ranges(), "[]"},
		"one address":      {ranges("192.0.2.7"), "[{192.0.2.7 192.0.2.7}]"},
		"odd bits":         {ranges("10.0.0.0/9", "2001:db8::/33"), "[{10.0.0.0 10.127.255.255} {2001:db8:: 2001:db8:7fff:ffff:ffff:ffff:ffff:ffff}]"},
		"inside":           {ranges("10.0.0.0/8", "10.1.0.0/16"), "[{10.0.0.0 10.255.255.255}]"},
		"meet":             {ranges("10.0.1.0/24", "10.0.0.0/24"), "[{10.0.0.0 10.0.1.255}]"},
		"apart":            {ranges("10.0.0.0/24", "10.0.2.0/24"), "[{10.0.0.0 10.0.0.255} {10.0.2.0 10.0.2.255}]"},
		"all":              {all, "[{0.0.0.0 255.255.255.255} {:: ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff}]"},
		"all but":          {all.Without(ranges("10.0.0.0/8", "::/96", "ff00::/8")), "[{0.0.0.0 9.255.255.255} {11.0.0.0 255.255.255.255} {::1:0:0 feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff}]"},
		"all but the ends": {ranges("0.0.0.0/0").Without(ranges("0.0.0.0", "255.255.255.255")), "[{0.0.0.1 255.255.255.254}]"},
		"all but all":      {all.Without(all), "[]"},
		"two of one":       {ranges("10.0.0.0/24").Without(ranges("10.0.0.8", "10.0.0.16")), "[{10.0.0.0 10.0.0.7} {10.0.0.9 10.0.0.15} {10.0.0.17 10.0.0.255}]"},
		"one of two":       {ranges("10.0.0.0/24", "10.0.2.0/24").Without(ranges("10.0.0.0/22")), "[]"},
		"joined":           {ranges("10.0.0.0/24").Join(ranges("10.0.1.0/24", "::1")), "[{10.0.0.0 10.0.1.255} {::1 ::1}]"},
	} {
		if got := fmt.Sprint(tc.got); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
}

// TestRangesAgainstSet compares a difference with what two sets say.
func TestRangesAgainstSet(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 50 {
		var a, b Set
		for range 40 {
			for _, s := range []*Set{&a, &b} {
				s.Add(netip.PrefixFrom(address(rng), 4+rng.IntN(29)).Masked().String())
			}
		}
		left, both := RangesOf(a.All()).Without(RangesOf(b.All())), RangesOf(a.All()).Join(RangesOf(b.All()))
		for i := 1; i < len(left); i++ {
			if left[i-1].Last.Next().Compare(left[i].First) >= 0 {
				t.Fatalf("%v meets %v", left[i-1], left[i])
			}
		}
		for range 2000 {
			x := address(rng)
			if rng.IntN(2) == 0 && len(left) > 0 {
				if x = left[rng.IntN(len(left))].Last; rng.IntN(2) == 0 {
					x = x.Next()
				}
			}
			if !x.IsValid() {
				continue
			}
			if got, want := left.Contains(x), a.Contains(x) && !b.Contains(x); got != want {
				t.Fatalf("%s in the difference: %v, want %v", x, got, want)
			}
			if got, want := both.Contains(x), a.Contains(x) || b.Contains(x); got != want {
				t.Fatalf("%s in the union: %v, want %v", x, got, want)
			}
		}
	}
}
