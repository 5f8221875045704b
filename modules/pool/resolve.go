package pool

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/lookup"
)

// How soon a name is resolved again after a failure, doubled with each.
const (
	minRetry = time.Second
	maxRetry = 30 * time.Second
)

// name is what is known of a host name.
type name struct {
	lookup.Known
	due time.Time // of the next look-up
}

// answer is what a look-up has found.
type answer struct {
	host  string
	addrs []netip.Addr
	due   time.Time
	err   error
}

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
		if _, ok := p.names[t.Host]; ok || t.Host == "" {
			continue
		}
		n := known[t.Host]
		p.names[t.Host] = n
		if len(n.Addrs) == 0 {
			n.due = time.Time{}
			missing++
		}
		p.wg.Go(func() { p.followName(ctx, t.Host, n.due) })
	}
	if missing == 0 {
		return
	}
	timeout := time.NewTimer(firstAnswer)
	defer timeout.Stop()
	waiting := make(map[string]bool)
	for h, n := range p.names {
		waiting[h] = len(n.Addrs) == 0
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
		addrs, wait, err := lookup.Addresses(ctx, p.resolver, host)
		if ctx.Err() != nil {
			return
		}
		var half *lookup.HalfError
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

// answered takes in an answer.
func (p *Pool) answered(a answer) {
	old := p.names[a.host]
	now, kept, found := old.Take(a.addrs, a.err)
	if a.err != nil && (!now.Half || !old.Half) { // once where it goes on with every TTL
		p.log.Warn("resolving a target failed", zap.String("upstream", a.host), zap.Error(a.err),
			zap.Int("addresses_kept", kept), zap.Duration("retry_in", time.Until(a.due).Round(time.Millisecond)))
	}
	if found > len(now.Addrs) {
		p.log.Warn("a target has more addresses than are used", zap.String("upstream", a.host),
			zap.Int("addresses", found), zap.Int("used", len(now.Addrs)))
	}
	names := maps.Clone(p.names)
	names[a.host] = name{now, a.due}
	p.names = names
}
