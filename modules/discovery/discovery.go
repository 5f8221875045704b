// Package discovery finds the backends of pools while they run: by DNS, from
// Consul, Kubernetes, Docker or Agones, in a file. Each kind is a module
// wayhouse.sources.NAME.
package discovery

import (
	"context"
	"net/netip"
	"time"
)

// Source is a kind of source. One instance serves every pool and every config
// that names it with the same options: it may outlive the config that has
// provisioned it, so that after Provision it uses neither that caddy.Context
// nor anything that ends with it. A Source that has something to close is an
// io.Closer: Close is called after the last List and Watch have returned.
type Source interface {
	// List returns the backends there are now. It is called from one goroutine,
	// never twice at once, with a deadline in ctx. An error, and a set without
	// backends that is not withdrawn, leave what was known before in place.
	List(ctx context.Context) (Set, error)

	// Watch calls changed whenever List may have something new to tell, until ctx
	// ends; then it returns nil. It runs beside List, in a goroutine of its own.
	// It is called again, after 5 s doubling to 60 s, when it returns before. A
	// source that cannot hear of changes embeds Polled.
	Watch(ctx context.Context, changed func()) error

	// Common returns the options that all kinds share; embedding Settings
	// provides it.
	Common() *Settings
}

// Set is what a source has found.
type Set struct {
	Endpoints []Endpoint

	// How long it holds, 0 for the refresh interval. It is taken as at least a
	// second and at most five minutes.
	TTL time.Duration

	// The order of Endpoints means something, as where somebody has written them
	// down: it is kept. Else they are put in the order of their addresses.
	Ordered bool

	// What could not be found out beside what was, when not all is known. The set
	// is taken, and the source is asked again soon.
	Incomplete error

	// The source says that there is nothing on purpose: an empty set is taken.
	Withdrawn bool
}

// Endpoint is a backend that a source has found.
type Endpoint struct {
	Addr netip.AddrPort // IPv4 is never IPv4-mapped

	// Its share; 0 is 1.
	Weight uint32

	// Backends of a higher number get flows only while all those of lower
	// numbers are down, as in SRV records.
	Priority uint16

	// How many flows it may have at once, below what the pool allows; 0 says
	// nothing.
	MaxSessions int64
}

// Polled is embedded by sources that are asked again and again.
type Polled struct{}

// Watch waits for the end of ctx.
func (Polled) Watch(ctx context.Context, _ func()) error {
	<-ctx.Done()
	return nil
}
