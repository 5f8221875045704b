package cidr

import (
	"net/netip"
	"testing"
)

func TestPlain(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.1":              "192.0.2.1",
		"::ffff:192.0.2.1":       "192.0.2.1",
		"::192.0.2.1":            "192.0.2.1",
		"::ffff:192.0.2.1%eth0":  "192.0.2.1",
		"fe80::1%eth0":           "fe80::1",
		"2001:db8::1":            "2001:db8::1",
		"::1":                    "::1",
		"::":                     "::",
		"0.0.0.1":                "0.0.0.1",
		"64:ff9b::192.0.2.1":     "64:ff9b::c000:201",
		"::1:192.0.2.1":          "::1:c000:201",
		"::ffff:0:192.0.2.1":     "::ffff:0:c000:201",
		"2001:db8::192.0.2.1%x1": "2001:db8::c000:201",
	} {
		if got := Plain(netip.MustParseAddr(in)); got.String() != want {
			t.Errorf("Plain(%s) = %s, want %s", in, got, want)
		}
	}
}

// TestKeys wants one key for each address and each network, and none of one
// family in the other.
func TestKeys(t *testing.T) {
	for _, tc := range []struct {
		a, b            string
		sameIP, sameNet bool
	}{
		{"192.0.2.1", "192.0.2.1", true, true},
		{"192.0.2.1", "192.0.2.255", false, true},
		{"192.0.2.1", "192.0.3.1", false, false},
		{"2001:db8::1", "2001:db8::ffff:0:0:1", false, true},
		{"2001:db8::1", "2001:db8:0:1::1", false, false},
		{"192.0.2.1", "2001:db8::1", false, false},
		{"0.0.0.1", "::1", false, false},
	} {
		ipA, netA := Keys(netip.MustParseAddr(tc.a))
		ipB, netB := Keys(netip.MustParseAddr(tc.b))
		if ipA == ipB != tc.sameIP || netA == netB != tc.sameNet {
			t.Errorf("%s and %s: same address %v, same network %v", tc.a, tc.b, ipA == ipB, netA == netB)
		}
	}
}

// TestBothForms asks sets that were written in one form for addresses in the
// others.
func TestBothForms(t *testing.T) {
	forms := []string{"192.0.2.7", "::ffff:192.0.2.7", "::192.0.2.7", "::ffff:192.0.2.7%eth0", "::192.0.2.7%eth0"}
	for _, rule := range []string{"192.0.2.0/24", "::ffff:192.0.2.0/120", "::192.0.2.0/120", "192.0.2.7", "::ffff:192.0.2.7", "::192.0.2.7", "0.0.0.0/0"} {
		var s Set
		if err := s.Add(rule); err != nil {
			t.Fatal(err)
		}
		for _, f := range forms {
			if !s.Contains(netip.MustParseAddr(f)) {
				t.Errorf("%s is not in %s", f, rule)
			}
		}
		if s.Contains(netip.MustParseAddr("2001:db8::7")) {
			t.Errorf("2001:db8::7 is in %s", rule)
		}
	}
}
