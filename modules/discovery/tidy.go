package discovery

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
)

// maxEndpoints bounds a set.
const maxEndpoints = 16384

// skipped is how many endpoints of an answer were left out, by reason.
type skipped [numSkips]int

// skip is a reason to leave an endpoint out.
type skip uint8

const (
	skipInvalid   skip = iota // no address of one host, or without a port
	skipDuplicate             // the address is in the set already
	skipTooMany               // there are maxEndpoints
	numSkips
)

// tidy makes a set of an answer: no address twice, none that cannot be a
// host's, bounded, and in an order that is the same for the same backends.
func tidy(set Set) (list []Endpoint, left skipped) {
	list = make([]Endpoint, 0, len(set.Endpoints))
	for _, e := range set.Endpoints {
		e.Addr = netip.AddrPortFrom(e.Addr.Addr().Unmap(), e.Addr.Port())
		if !valid(e.Addr) {
			left[skipInvalid]++
			continue
		}
		e.Weight = max(e.Weight, 1)
		e.MaxSessions = max(e.MaxSessions, 0)
		list = append(list, e)
	}
	if !set.Ordered {
		slices.SortStableFunc(list, func(a, b Endpoint) int {
			return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Priority, b.Priority),
				cmp.Compare(b.Weight, a.Weight), cmp.Compare(a.MaxSessions, b.MaxSessions))
		})
	}
	seen := make(map[netip.AddrPort]bool, len(list))
	list = slices.DeleteFunc(list, func(e Endpoint) bool {
		if seen[e.Addr] {
			left[skipDuplicate]++
			return true
		}
		seen[e.Addr] = true
		return false
	})
	if n := len(list) - maxEndpoints; n > 0 {
		left[skipTooMany] = n
		list = list[:maxEndpoints:maxEndpoints]
	}
	return list, left
}

// valid reports whether flows can be sent to an address.
func valid(a netip.AddrPort) bool {
	return a.Port() != 0 && a.Addr().Zone() == "" && hostport.OneHost(a.Addr())
}
