package discovery

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
)

// answer is what somebody says of a host name.
type answer struct {
	addrs string
	err   error
}

// says answers for host names, for 10 s.
type says map[string]answer

func (s says) Lookup(_ context.Context, host string) ([]netip.Addr, time.Duration, error) {
	a := s[host]
	var list []netip.Addr
	for f := range strings.FieldsSeq(a.addrs) {
		list = append(list, netip.MustParseAddr(f))
	}
	if len(list) == 0 && a.err == nil {
		return nil, 0, lookup.ErrNoAddress
	}
	return list, 10 * time.Second, a.err
}

// The families of a name fail one by one, and other names do not mind.
func TestNamesThroughFailures(t *testing.T) {
	noSix := &lookup.HalfError{Six: true, Err: errors.New("no answer about AAAA")}
	type step struct {
		of          map[string]answer
		dns, static string
	}
	both := "10.0.0.1:7 w0 p0, [2001:db8::1]:7 w0 p0"
	synctest.Test(t, func(t *testing.T) {
		at := says{}
		d := &DNS{Name: "a.test", Port: 7}
		s := &Static{Targets: []string{"b.test:8", "10.0.0.9:9", "a.test:7"}}
		for _, err := range []error{d.Provision(ctxOf(t)), s.Provision(ctxOf(t))} {
			if err != nil {
				t.Fatal(err)
			}
		}
		d.names.resolver, s.names.resolver = at, at
		for i, tc := range []step{
			{map[string]answer{"a.test": {"10.0.0.1 2001:db8::1", nil}, "b.test": {"10.0.0.2", nil}},
				both + " ttl 10s", "10.0.0.2:8 w0 p0, 10.0.0.9:9 w0 p0, " + both + " ttl 10s"},
			{map[string]answer{"a.test": {"", errors.New("away")}, "b.test": {"10.0.0.3", nil}},
				"error: a.test: away", "10.0.0.3:8 w0 p0, 10.0.0.9:9 w0 p0, " + both + " ttl 10s incomplete: a.test: away"},
			{map[string]answer{"a.test": {"10.0.0.1", noSix}},
				both + " ttl 5m0s incomplete: a.test: no answer about AAAA", "10.0.0.3:8 w0 p0, 10.0.0.9:9 w0 p0, " + both + " ttl 5m0s incomplete: a.test: no answer about AAAA, and 1 more names"},
			{map[string]answer{"a.test": {"10.0.0.4", noSix}, "b.test": {"10.0.0.3", nil}},
				"10.0.0.4:7 w0 p0, [2001:db8::1]:7 w0 p0 ttl 10s", "10.0.0.3:8 w0 p0, 10.0.0.9:9 w0 p0, 10.0.0.4:7 w0 p0, [2001:db8::1]:7 w0 p0 ttl 10s"},
			{map[string]answer{"a.test": {"10.0.0.4", nil}, "b.test": {"10.0.0.3", nil}},
				"10.0.0.4:7 w0 p0 ttl 10s", "10.0.0.3:8 w0 p0, 10.0.0.9:9 w0 p0, 10.0.0.4:7 w0 p0 ttl 10s"},
		} {
			clear(at)
			for h, a := range tc.of {
				at[h] = a
			}
			if got := described(d.List(t.Context())); got != tc.dns {
				t.Errorf("step %d, dns: %s\nwant %s", i, got, tc.dns)
			}
			got := described(s.List(t.Context()))
			if i == 2 { // which of the two names is named is open
				got = strings.Replace(got, "b.test: the name has no address", "a.test: no answer about AAAA", 1)
			}
			if got != tc.static {
				t.Errorf("step %d, static: %s\nwant %s", i, got, tc.static)
			}
			time.Sleep(11 * time.Second)
		}
	})
}
