package ticket

import (
	"bytes"
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

var (
	key    = []byte("0123456789abcdef0123456789abcdef")
	other  = []byte("fedcba9876543210fedcba9876543210")
	expiry = time.Unix(1800000000, 0)
	before = expiry.Add(-time.Second)
	v4     = netip.MustParseAddr("203.0.113.7")
	mapped = netip.MustParseAddr("::ffff:203.0.113.7")
	v6     = netip.MustParseAddr("2001:db8::7")
)

func mint(t testing.TB, pool string, client netip.Addr) []byte {
	t.Helper()
	b, err := Mint(key, pool, expiry, client)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func checker(t testing.TB, pool string, bound bool, keys ...[]byte) *Checker {
	t.Helper()
	c, err := NewChecker(keys, pool, bound)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestVector has the tickets of docs/matchers/ticket.md, which other
// implementations are tested with.
func TestVector(t *testing.T) {
	for want, client := range map[string]netip.Addr{
		vectorOpen:  {},
		vectorBound: v4,
	} {
		if got := hex.EncodeToString(mint(t, "survival", client)); got != want {
			t.Errorf("for %v: %s, want %s", client, got, want)
		}
	}
}

const (
	vectorOpen  = "0100000000006b49d200a39563ab68f064891d9e8999dc620bf1"
	vectorBound = "0101000000006b49d2008fea4d9927d6abfbfe29adcbfbfe5aca"
)

func TestCheck(t *testing.T) {
	open, bound, six := mint(t, "survival", netip.Addr{}), mint(t, "survival", v4), mint(t, "survival", v6)
	edit := func(b []byte, at int, x byte) []byte {
		b = bytes.Clone(b)
		b[at] ^= x
		return b
	}
	strict := checker(t, "survival", true, key)
	both := checker(t, "survival", false, other, key)
	for name, tc := range map[string]struct {
		c      *Checker
		b      []byte
		client netip.Addr
		now    time.Time
		want   error
	}{
		"good":                     {both, open, v4, before, nil},
		"more behind it":           {both, append(bytes.Clone(open), "hello"...), v4, before, nil},
		"for one address":          {both, bound, v4, before, nil},
		"for one, IPv4-mapped":     {strict, bound, mapped, before, nil},
		"for one, IPv6":            {strict, six, v6, before, nil},
		"of another":               {both, bound, v6, before, ErrMAC},
		"of nobody that is known":  {both, bound, netip.Addr{}, before, ErrMAC},
		"not for one":              {strict, open, v4, before, ErrUnbound},
		"made not for one":         {both, edit(bound, 1, 1), v4, before, ErrMAC},
		"at its expiry":            {both, open, v4, expiry, ErrExpired},
		"made to last":             {both, edit(open, 2, 1), v4, before, ErrMAC},
		"expired and forged":       {both, edit(open, 25, 1), v4, expiry, ErrMAC},
		"of another pool":          {checker(t, "creative", false, key), open, v4, before, ErrMAC},
		"of a pool that begins so": {checker(t, "surviva", false, key), open, v4, before, ErrMAC},
		"with another key":         {checker(t, "survival", false, other), open, v4, before, ErrMAC},
		"another version":          {both, edit(open, 0, 3), v4, before, ErrVersion},
		"another flag":             {both, edit(open, 1, 2), v4, before, ErrFlags},
		"cut":                      {both, open[:Len-1], v4, before, ErrShort},
		"nothing":                  {both, nil, v4, before, ErrShort},
	} {
		if got := tc.c.Check(tc.b, tc.client, tc.now); !errors.Is(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
	for at := range open {
		for bit := range 8 {
			if both.Check(edit(open, at, 1<<bit), v4, before) == nil {
				t.Errorf("bit %d of byte %d does not matter", bit, at)
			}
		}
	}
	for n := range Len {
		if !both.MayBegin(open[:n]) || !strict.MayBegin(bound[:n]) {
			t.Errorf("%d bytes of a ticket are not its beginning", n)
		}
	}
	if strict.MayBegin(open[:2]) || both.MayBegin([]byte{2}) || both.MayBegin([]byte{1, 2}) {
		t.Error("what is no ticket is the beginning of one")
	}
}

func TestMintRefuses(t *testing.T) {
	for name, f := range map[string]func() error{
		"a short key":   func() error { _, err := Mint(key[:15], "a", expiry, netip.Addr{}); return err },
		"no pool":       func() error { _, err := Mint(key, "", expiry, netip.Addr{}); return err },
		"a long pool":   func() error { _, err := Mint(key, strings.Repeat("a", 256), expiry, netip.Addr{}); return err },
		"before 1970":   func() error { _, err := Mint(key, "a", time.Unix(-1, 0), netip.Addr{}); return err },
		"no check pool": func() error { _, err := NewChecker([][]byte{key}, "", false); return err },
		"a weak check":  func() error { _, err := NewChecker([][]byte{key, nil}, "a", false); return err },
	} {
		if f() == nil {
			t.Errorf("%s: taken", name)
		}
	}
}

func TestParseKey(t *testing.T) {
	for in, want := range map[string]string{
		"hex:30313233343536373839616263646566":  "0123456789abcdef",
		" base64:MDEyMzQ1Njc4OWFiY2RlZg==\n":    "0123456789abcdef",
		"30313233343536373839616263646566":      "",
		"hex:3031":                              "",
		"hex:zz":                                "",
		"base64:!":                              "",
		"hex:" + strings.Repeat("00", MaxKey+1): "",
		"":                                      "",
	} {
		got, err := ParseKey(in)
		if string(got) != want || (err == nil) != (want != "") {
			t.Errorf("%.40q: %q, %v", in, got, err)
		}
		if err != nil && len(in) > 10 && strings.Contains(err.Error(), in[5:]) {
			t.Errorf("%.40q: the error tells the key", in)
		}
	}
}

func TestCheckDoesNotAllocate(t *testing.T) {
	if kit.Race {
		t.Skip("under the race detector a sync.Pool forgets on purpose")
	}
	c, b := checker(t, "survival", true, other, key), mint(t, "survival", v4)
	if n := testing.AllocsPerRun(100, func() { _ = c.Check(b, v4, before) }); n >= 1 {
		t.Errorf("%v allocations", n)
	}
}

// FuzzCheck finds no ticket that was not minted.
func FuzzCheck(f *testing.F) {
	open, bound := mint(f, "survival", netip.Addr{}), mint(f, "survival", v4)
	f.Add(open)
	f.Add(bound)
	f.Add(open[:9])
	c := checker(f, "survival", false, key)
	f.Fuzz(func(t *testing.T, b []byte) {
		err := c.Check(b, v4, before)
		if err == nil && !bytes.HasPrefix(b, open) && !bytes.HasPrefix(b, bound) {
			t.Errorf("forged: %x", b)
		}
		if (err == ErrShort) != (len(b) < Len) {
			t.Errorf("%d bytes: %v", len(b), err)
		}
		if err == nil && !c.MayBegin(b[:len(b)/2]) {
			t.Error("half a ticket is no beginning")
		}
	})
}

func BenchmarkCheck(b *testing.B) {
	c, ticket := checker(b, "survival", true, key), mint(b, "survival", v4)
	b.ReportAllocs()
	for b.Loop() {
		if c.Check(ticket, v4, before) != nil {
			b.Fatal("refused")
		}
	}
}
