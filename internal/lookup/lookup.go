// Package lookup finds the addresses and services that stand behind names, as
// the host does or from DNS servers of one's choice, with how long they hold.
// What is known of a name lives through failures in a Known.
package lookup

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
)

// Resolver finds the addresses of a host name. It is called from many
// goroutines, with a deadline in ctx.
type Resolver interface {
	// Lookup returns the addresses and how long they hold. When err is not nil
	// the addresses that were found are some of all; with a HalfError they are all
	// of the family that has answered.
	Lookup(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error)
}

// Limits.
const (
	MinTTL       = time.Second
	MaxTTL       = 5 * time.Minute
	MaxAddresses = 1024            // of one name
	Timeout      = 5 * time.Second // of one look-up
)

// ErrNoAddress is the failure to find any address.
var ErrNoAddress = errors.New("the name has no address")

// HalfError is the failure of one family beside an answer with addresses of the
// other, which is then all there is of that one.
type HalfError struct {
	Six bool // it is AAAA that has failed
	Err error
}

func (e *HalfError) Error() string { return e.Err.Error() }

// Unwrap returns the failure.
func (e *HalfError) Unwrap() error { return e.Err }

// failed reports whether it is the family of ip that has.
func (e *HalfError) failed(ip netip.Addr) bool { return ip.Is6() == e.Six }

// Addresses asks r within Timeout, and leaves out what cannot be a host's
// address; with none left it is an error. How long the answer holds is within
// the limits.
func Addresses(ctx context.Context, r Resolver, host string) ([]netip.Addr, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	addrs, ttl, err := r.Lookup(ctx, host)
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	// 0.0.0.0 is what some servers answer for names that they block; it would
	// be this host.
	addrs = slices.DeleteFunc(addrs, func(ip netip.Addr) bool { return !hostport.OneHost(ip) })
	var half *HalfError
	if len(addrs) == 0 && (err == nil || errors.As(err, &half)) {
		err = ErrNoAddress
	}
	return addrs, min(max(ttl, MinTTL), MaxTTL), err
}

// Known is what is known of a name. It does not change.
type Known struct {
	Addrs []netip.Addr // sorted
	Half  bool         // the last answer was a HalfError
}

// Take returns what is known after an answer. A failure adds what was found and
// takes nothing away; that of one family alone takes nothing of that family.
// Some servers never answer for a family that a name does not have. kept is how
// many addresses were kept in spite of the answer, and found how many there are
// before MaxAddresses.
func (k Known) Take(addrs []netip.Addr, err error) (now Known, kept, found int) {
	var half *HalfError
	if err != nil {
		old := k.Addrs
		if errors.As(err, &half) {
			old = slices.DeleteFunc(slices.Clone(old), func(ip netip.Addr) bool { return !half.failed(ip) })
		}
		kept = len(old)
		addrs = append(slices.Clip(addrs), old...)
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	if found = len(addrs); found > MaxAddresses {
		addrs = addrs[:MaxAddresses:MaxAddresses]
	}
	return Known{addrs, half != nil}, kept, found
}
