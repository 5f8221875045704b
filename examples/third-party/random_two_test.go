package randomtwo

import (
	"net/netip"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/modules/balancer"
)

type backend struct{ active int64 }

func (*backend) Addr() netip.AddrPort { return netip.AddrPort{} }
func (*backend) Weight() uint32       { return 1 }
func (b *backend) Active() int64      { return b.active }

// The busiest backend wins against nobody, so it is never taken; every other
// one is, sooner or later.
func TestPick(t *testing.T) {
	candidates := []balancer.Candidate{&backend{1}, &backend{9}, &backend{1}, &backend{2}}
	taken := make([]int, len(candidates))
	for range 10000 {
		taken[new(RandomTwo).Pick(candidates, balancer.Flow{})]++
	}
	for i, n := range taken {
		if busiest := i == 1; busiest != (n == 0) {
			t.Errorf("backend %d was taken %d times", i, n)
		}
	}
	if got := new(RandomTwo).Pick(candidates[:1], balancer.Flow{}); got != 0 {
		t.Errorf("of one backend number %d was taken", got)
	}
}

func TestIsABalancer(t *testing.T) {
	m, err := caddy.GetModule("wayhouse.balancers.random_two")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := m.New().(balancer.Balancer); !ok {
		t.Errorf("%T is no balancer", m.New())
	}
	for in, good := range map[string]bool{"random_two": true, "random_two x": false, "random_two {\n x\n}": false} {
		if _, err := caddyfile.UnmarshalModule(dispenser(in), "wayhouse.balancers.random_two"); (err == nil) != good {
			t.Errorf("%q: error %v", in, err)
		}
	}
}

func dispenser(in string) *caddyfile.Dispenser {
	d := caddyfile.NewTestDispenser(in)
	d.Next()
	return d
}
