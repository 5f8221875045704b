package cidr

import (
	"iter"
	"net/netip"
	"slices"
)

// All are the networks of the set, in no order.
func (s *Set) All() iter.Seq[netip.Prefix] { return s.t.All() }

// Range is the addresses from First to Last, both of one family.
type Range struct{ First, Last netip.Addr }

// Ranges is addresses in ascending order, IPv4 before IPv6, as few ranges as
// can be: none meets the next.
type Ranges []Range

// RangesOf are the addresses of networks, which may contain each other.
func RangesOf(networks iter.Seq[netip.Prefix]) Ranges {
	var rs Ranges
	for p := range networks {
		rs = append(rs, Range{p.Masked().Addr(), last(p)})
	}
	return merged(rs)
}

// last is the last address of a network.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := range b {
		if host := min((i+1)*8-p.Bits(), 8); host > 0 {
			b[i] |= 1<<host - 1
		}
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// merged sorts ranges and joins those that overlap or meet. It reuses rs.
func merged(rs Ranges) Ranges {
	slices.SortFunc(rs, func(a, b Range) int { return a.First.Compare(b.First) })
	out := rs[:0]
	for _, r := range rs {
		if n := len(out) - 1; n >= 0 && out[n].First.BitLen() == r.First.BitLen() {
			if after := out[n].Last.Next(); !after.IsValid() || r.First.Compare(after) <= 0 {
				if r.Last.Compare(out[n].Last) > 0 {
					out[n].Last = r.Last
				}
				continue
			}
		}
		out = append(out, r)
	}
	return out
}

// Join is what is in one of the two.
func (rs Ranges) Join(other Ranges) Ranges {
	return merged(append(slices.Clone(rs), other...))
}

// Without is what is not in other.
func (rs Ranges) Without(other Ranges) Ranges {
	var out Ranges
	for _, r := range rs {
		rest := true
		for len(other) > 0 && other[0].Last.Compare(r.First) < 0 {
			other = other[1:]
		}
		for _, o := range other {
			if o.First.Compare(r.Last) > 0 {
				break
			}
			if o.First.Compare(r.First) > 0 {
				out = append(out, Range{r.First, o.First.Prev()})
			}
			if r.First = o.Last.Next(); !r.First.IsValid() || r.First.Compare(r.Last) > 0 {
				rest = false
				break
			}
		}
		if rest {
			out = append(out, r)
		}
	}
	return out
}

// Contains reports whether an address, in its plain form, is in one of the
// ranges.
func (rs Ranges) Contains(a netip.Addr) bool {
	i, found := slices.BinarySearchFunc(rs, a, func(r Range, a netip.Addr) int { return r.First.Compare(a) })
	if found {
		return true
	}
	return i > 0 && rs[i-1].Last.Compare(a) >= 0 && rs[i-1].First.BitLen() == a.BitLen()
}
