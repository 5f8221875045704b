package pool

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"go.uber.org/zap"
)

// Resolver finds the addresses of a host name. It is called from a goroutine of
// each name, with a deadline in ctx.
type Resolver interface {
	// Lookup returns the addresses and how long they hold. When err is not nil
	// the addresses that were found are some of all; with a halfError they are all
	// of the family that has answered.
	Lookup(ctx context.Context, host string) (addrs []netip.Addr, ttl time.Duration, err error)
}

// How often a name is resolved.
const (
	minTTL   = time.Second
	maxTTL   = 5 * time.Minute
	minRetry = time.Second // after a failure, doubled with each
	maxRetry = 30 * time.Second
	lookup   = 5 * time.Second // how long one may take
)

// maxAddresses bounds the backends that one name can stand for.
const maxAddresses = 1024

// name is what is known of a host name.
type name struct {
	addrs []netip.Addr // sorted
	due   time.Time    // of the next look-up
	half  bool         // the last one was a halfError
}

// answer is what a look-up has found.
type answer struct {
	host  string
	addrs []netip.Addr
	due   time.Time
	err   error
}

var errNoAddress = errors.New("the name has no address")

// follow starts a goroutine for each host name, and waits for the first answers
// of those that the running pool of the same name does not know.
func (p *Pool) follow(ctx context.Context) {
	var known map[string]name
	if q := newest(p.name); q != nil {
		known = q.snap.Load().names
	}
	p.names = make(map[string]name)
	missing := 0
	for _, t := range p.targets {
		if _, ok := p.names[t.host]; ok || t.host == "" {
			continue
		}
		n := known[t.host]
		p.names[t.host] = n
		if len(n.addrs) == 0 {
			n.due = time.Time{}
			missing++
		}
		p.wg.Go(func() { p.followName(ctx, t.host, n.due) })
	}
	if missing == 0 {
		return
	}
	timeout := time.NewTimer(firstAnswer)
	defer timeout.Stop()
	waiting := make(map[string]bool)
	for h, n := range p.names {
		waiting[h] = len(n.addrs) == 0
	}
	for missing > 0 {
		select {
		case a := <-p.answers:
			p.answered(a)
			if waiting[a.host] {
				waiting[a.host] = false
				missing--
			}
		case <-timeout.C:
			return
		}
	}
}

// followName resolves a name for as long as ctx lives. run, or follow before
// it, takes the answers.
func (p *Pool) followName(ctx context.Context, host string, due time.Time) {
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	retry := minRetry
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		lctx, cancel := context.WithTimeout(ctx, lookup)
		addrs, ttl, err := p.resolver.Lookup(lctx, host)
		cancel()
		if ctx.Err() != nil {
			return
		}
		for i := range addrs {
			addrs[i] = addrs[i].Unmap()
		}
		// 0.0.0.0 is what some servers answer for names that they block; it would
		// be this host.
		addrs = slices.DeleteFunc(addrs, func(ip netip.Addr) bool { return !ofOneHost(ip) })
		var half *halfError
		if len(addrs) == 0 && (err == nil || errors.As(err, &half)) {
			err = errNoAddress
		}
		wait := min(max(ttl, minTTL), maxTTL)
		switch {
		case err == nil:
			retry = minRetry
		case errors.As(err, &half): // the answer of the other family expires as ever
			wait, retry = min(wait, retry), min(2*retry, maxRetry)
		default:
			wait, retry = retry, min(2*retry, maxRetry)
		}
		select {
		case <-ctx.Done():
			return
		case p.answers <- answer{host, addrs, time.Now().Add(wait), err}:
		}
		timer.Reset(wait)
	}
}

// answered takes in an answer. A failure adds what was found and takes nothing
// away; that of one family alone takes nothing of that family. Some servers
// never answer for a family that a name does not have.
func (p *Pool) answered(a answer) {
	old := p.names[a.host]
	addrs := a.addrs
	var half *halfError
	if a.err != nil {
		kept := old.addrs
		if errors.As(a.err, &half) {
			kept = slices.DeleteFunc(slices.Clone(kept), func(ip netip.Addr) bool { return !half.failed(ip) })
		}
		if half == nil || !old.half { // once where it goes on with every TTL
			p.log.Warn("resolving a target failed", zap.String("upstream", a.host), zap.Error(a.err),
				zap.Int("addresses_kept", len(kept)), zap.Duration("retry_in", time.Until(a.due).Round(time.Millisecond)))
		}
		addrs = append(addrs, kept...)
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	if len(addrs) > maxAddresses {
		p.log.Warn("a target has more addresses than are used", zap.String("upstream", a.host),
			zap.Int("addresses", len(addrs)), zap.Int("used", maxAddresses))
		addrs = addrs[:maxAddresses]
	}
	names := make(map[string]name, len(p.names))
	for h, n := range p.names {
		names[h] = n
	}
	names[a.host] = name{addrs, a.due, half != nil}
	p.names = names
}
