package discovery

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
)

// hostsOf answers for host names.
type hostsOf struct {
	addrs map[string]string
	ttl   time.Duration
	asked []string
}

func (h *hostsOf) Lookup(_ context.Context, host string) ([]netip.Addr, time.Duration, error) {
	h.asked = append(h.asked, host)
	if h.addrs[host] == "" {
		return nil, 0, lookup.ErrNoAddress
	}
	var list []netip.Addr
	for s := range strings.FieldsSeq(h.addrs[host]) {
		list = append(list, netip.MustParseAddr(s))
	}
	return list, h.ttl, nil
}

func described(s Set, err error) string {
	if err != nil {
		return "error: " + err.Error()
	}
	var list []string
	for _, e := range s.Endpoints {
		list = append(list, fmt.Sprintf("%s w%d p%d", e.Addr, e.Weight, e.Priority))
	}
	text := fmt.Sprintf("%s ttl %v", strings.Join(list, ", "), s.TTL)
	if s.Withdrawn {
		text += " withdrawn"
	}
	if s.Incomplete != nil {
		text += " incomplete: " + s.Incomplete.Error()
	}
	return text
}

func TestSRV(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hostsOf{addrs: map[string]string{"a.test": "10.0.0.1 2001:db8::1", "b.test": "10.0.0.2"}, ttl: 20 * time.Second}
		var found lookup.Services
		var failure error
		s := &SRV{names: names{resolver: h}, services: func(context.Context, string) (lookup.Services, error) { return found, failure }}
		list := func(want string) {
			t.Helper()
			if got := described(s.List(t.Context())); got != want {
				t.Errorf("got %s\nwant %s", got, want)
			}
		}
		found = lookup.Services{TTL: 30 * time.Second, List: []lookup.Service{
			{Host: "a.test", Port: 7, Weight: 5}, {Host: "b.test", Port: 8, Priority: 3}, {Host: "a.test", Port: 9, Weight: 65535},
		}}
		list("10.0.0.1:7 w5 p0, [2001:db8::1]:7 w5 p0, 10.0.0.2:8 w1 p3, 10.0.0.1:9 w65535 p0, [2001:db8::1]:9 w65535 p0 ttl 20s")
		if got := fmt.Sprint(len(h.asked)); got != "2" {
			t.Errorf("%s names were asked for, want 2: %v", got, h.asked)
		}

		time.Sleep(5 * time.Second) // the addresses hold for another 15 s
		found.TTL = 2 * time.Second
		found.List = found.List[1:2]
		list("10.0.0.2:8 w1 p3 ttl 2s")
		if len(h.asked) != 2 {
			t.Errorf("asked again while the answer holds: %v", h.asked)
		}

		found.Addrs = map[string]lookup.Told{"c.test": {Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.3"), netip.MustParseAddr("0.0.0.0")}, TTL: time.Minute}}
		found.List = append(found.List, lookup.Service{Host: "c.test", Port: 7})
		list("10.0.0.2:8 w1 p3, 10.0.0.3:7 w1 p0 ttl 2s")
		if len(h.asked) != 2 {
			t.Errorf("asked for what came with the answer: %v", h.asked)
		}

		time.Sleep(20 * time.Second) // b.test has expired, and is gone
		h.addrs = nil
		list("10.0.0.2:8 w1 p3, 10.0.0.3:7 w1 p0 ttl 2s incomplete: b.test: the name has no address")

		found = lookup.Services{None: true, TTL: time.Minute}
		list(" ttl 0s withdrawn")
		found = lookup.Services{TTL: time.Minute}
		list(" ttl 0s")
		found = lookup.Services{TTL: 0, List: []lookup.Service{{Host: "x.test", Port: 1}, {Host: "y.test", Port: 1}}}
		if got := described(s.List(t.Context())); !strings.HasPrefix(got, "error: ") || !strings.HasSuffix(got, "and 1 more names") {
			t.Errorf("no host known: %s", got)
		}
		failure = errors.New("SERVFAIL")
		list("error: SERVFAIL")
	})
}
