package filter

import (
	"net/netip"
	"slices"

	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
)

// What of the filters somebody else can carry out, who sees only where a packet
// comes from: the kernel.

// Denier is a filter that refuses sources by lists of their addresses alone,
// whatever other filters say.
type Denier interface {
	// Lists are the sets that it decides by now. One that has changed is another.
	Lists() []*cidr.Set

	// Denied are the sources it refuses by sets that Lists has returned.
	Denied(lists []*cidr.Set) cidr.Ranges
}

// deniers is what Chain.Denied has looked at.
type deniers struct{ lists []*cidr.Set }

// Denied are the sources that lists keep out. It returns what stands for the
// lists as they are now; while that is before, there are no sources beside it.
func (c *Chain) Denied(before any) (sources cidr.Ranges, now any) {
	var seen []*cidr.Set
	for _, n := range c.filters {
		if d, ok := n.Filter.(Denier); ok {
			seen = append(seen, d.Lists()...)
		}
	}
	if b, ok := before.(*deniers); ok && slices.Equal(b.lists, seen) {
		return nil, before
	}
	rest := seen
	for _, n := range c.filters {
		if d, ok := n.Filter.(Denier); ok {
			lists := rest[:len(d.Lists())] // as many as ever
			rest = rest[len(lists):]
			sources = sources.Join(d.Denied(lists))
		}
	}
	return sources, &deniers{seen}
}

// Lists implements Denier. A list that has not come yet is nil.
func (a *ACL) Lists() []*cidr.Set {
	sets := []*cidr.Set{a.deny, a.allow}
	for l := range a.lists {
		sets = append(sets, l.set.Load())
	}
	return sets
}

// everybody has all addresses of both families.
var everybody = cidr.RangesOf(slices.Values([]netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}))

// Denied implements Denier.
func (a *ACL) Denied(lists []*cidr.Set) cidr.Ranges {
	union := func(sets ...*cidr.Set) (rs cidr.Ranges) {
		for _, s := range sets {
			if s != nil {
				rs = rs.Join(cidr.RangesOf(s.All()))
			}
		}
		return rs
	}
	deny, allow, more := lists[0], lists[1], lists[2:]
	denied := union(append(more[:len(a.denyLists):len(a.denyLists)], deny)...)
	if !a.closed {
		return denied
	}
	return denied.Join(everybody.Without(union(append(slices.Clone(more[len(a.denyLists):]), allow)...)))
}

// Rates are how many new flows the filters admit at most of one address, and of
// one network, that is over a limit: tokens a second, and at once.
func (c *Chain) Rates() (perIP, perNet Rate) {
	for _, n := range c.filters {
		if r, ok := n.Filter.(*RateLimit); ok {
			perIP, perNet = perIP.widest(r.PerIP), perNet.widest(r.PerNet)
		}
	}
	return perIP, perNet
}

// Most is how many tokens a bucket of the rate holds.
func (r Rate) Most() int64 {
	if r.Burst != nil {
		return *r.Burst
	}
	return r.Rate
}

// widest is a rate that admits whatever either admits.
func (r Rate) widest(other *Rate) Rate {
	if other == nil {
		return r
	}
	burst := max(r.Most(), other.Most())
	return Rate{Rate: max(r.Rate, other.Rate), Burst: &burst}
}

var _ Denier = (*ACL)(nil)
