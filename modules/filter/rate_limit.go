package filter

import (
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/cidr"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

func init() { caddy.RegisterModule(new(RateLimit)) }

// RateLimit bounds how many new flows come from an address and from its
// network, by token buckets.
type RateLimit struct {
	// New connections and sessions of one client address. Default: no limit; at
	// least one of per_ip and per_net is needed.
	PerIP *Rate `json:"per_ip,omitempty"`

	// New ones of one network: a /24 of IPv4, a /64 of IPv6. Default: no limit.
	PerNet *Rate `json:"per_net,omitempty"`

	place   place
	logger  *zap.Logger
	buckets *buckets
}

// Rate is what a token bucket gains and holds.
type Rate struct {
	// Tokens a second, from 1 to 1000000. Required.
	Rate int64 `json:"rate,omitempty"`

	// How many it holds, from 1 to 1000000. Default: the rate.
	Burst *int64 `json:"burst,omitempty"`

	step, most int64 // nanoseconds: of a token, of all of them
}

const maxRate = 1_000_000

// CaddyModule returns the Caddy module information.
func (*RateLimit) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.filters.rate_limit",
		New: func() caddy.Module { return new(RateLimit) },
	}
}

// UnmarshalJSON decodes the filter with errors that name the key.
func (r *RateLimit) UnmarshalJSON(b []byte) error {
	type plain RateLimit
	return strictjson.Unmarshal(b, (*plain)(r))
}

// Provision takes the buckets of the listener.
func (r *RateLimit) Provision(ctx caddy.Context) (err error) {
	if r.PerIP == nil && r.PerNet == nil {
		return errors.New("neither per_ip nor per_net is given: it would let everybody in; give one, as in per_ip 50 burst 100")
	}
	if err := r.PerIP.provision(); err != nil {
		return fmt.Errorf("per_ip.%w", err)
	}
	if err := r.PerNet.provision(); err != nil {
		return fmt.Errorf("per_net.%w", err)
	}
	if r.place, err = placeOf(ctx); err != nil {
		return err
	}
	r.logger = ctx.Logger().With(zap.String("listener", r.place.listener))
	v, _, err := rates.LoadOrNew(r.place, func() (caddy.Destructor, error) { return newBuckets(maxBuckets), nil })
	if err != nil {
		return err
	}
	r.buckets = v.(*buckets)
	return nil
}

func (r *Rate) provision() error {
	if r == nil {
		return nil
	}
	if r.Rate < 1 || r.Rate > maxRate {
		return fmt.Errorf("rate: %d is not from 1 to %d", r.Rate, maxRate)
	}
	burst := r.Rate
	if r.Burst != nil {
		burst = *r.Burst
	}
	if burst < 1 || burst > maxRate {
		return fmt.Errorf("burst: %d is not from 1 to %d; leave it out for the rate", burst, maxRate)
	}
	r.step = int64(time.Second) / r.Rate
	r.most = r.step * burst
	return nil
}

// Cleanup gives back what Provision took.
func (r *RateLimit) Cleanup() error {
	if r.buckets == nil {
		return nil
	}
	r.buckets = nil
	_, err := rates.Delete(r.place)
	return err
}

// Check implements Filter: it takes a token of each bucket, or none.
func (r *RateLimit) Check(f Flow) string { return r.check(f, int64(time.Since(began)), true) }

// Explain implements Explainer.
func (r *RateLimit) Explain(f Flow) (rule, reason string) {
	switch rule = r.check(f, int64(time.Since(began)), false); rule {
	case RuleRateIP:
		reason = fmt.Sprintf("the bucket of %s is empty", f.Source)
	case RuleRateNet:
		reason = fmt.Sprintf("the bucket of the network of %s is empty", f.Source)
	default:
		reason = fmt.Sprintf("there is a token for %s", f.Source)
	}
	return rule, reason
}

func (r *RateLimit) check(f Flow, now int64, take bool) string {
	ip, net := cidr.Keys(f.Source)
	p := &r.buckets.parts[maphash.Comparable(partSeed, net)%bucketParts]
	p.mu.Lock()
	ofIP, ipOK := p.ips.next(ip, now, r.PerIP)
	ofNet, netOK := p.nets.next(net, now, r.PerNet)
	ipRoom := !ipOK || p.ips.room(ip, now, r.PerIP, r.buckets.perPart, f)
	netRoom := !netOK || p.nets.room(net, now, r.PerNet, r.buckets.perPart, f)
	if take && ipOK && netOK && ipRoom && netRoom {
		p.ips.put(ip, ofIP, r.PerIP)
		p.nets.put(net, ofNet, r.PerNet)
	}
	p.mu.Unlock()
	switch {
	case !ipRoom:
		r.buckets.warn(&r.buckets.warnedIP, now, r.logger, "per_ip", take)
	case !netRoom && ipOK:
		r.buckets.warn(&r.buckets.warnedNet, now, r.logger, "per_net", take)
	}
	switch {
	case !ipOK || !ipRoom:
		return RuleRateIP
	case !netOK || !netRoom:
		return RuleRateNet
	}
	return ""
}

// rates has the buckets of every listener that has such a filter, by place.
var rates = caddy.NewUsagePool()

var (
	began    = time.Now()
	partSeed = maphash.MakeSeed()
)

const (
	maxBuckets  = 200_000 // of a table
	bucketParts = 64

	// sweepEvery is how often a part that is full is looked through for
	// buckets that are not in use.
	sweepEvery = int64(50 * time.Millisecond)
	warnEvery  = int64(time.Minute)
)

// buckets are the two tables of a filter, in parts by network: one lock covers
// both buckets of a flow.
type buckets struct {
	perPart             int // buckets of each table
	parts               [bucketParts]bucketPart
	warnedIP, warnedNet atomic.Int64 // when the log may say again that a table is full
}

type bucketPart struct {
	mu        sync.Mutex
	ips, nets table
	_         [64]byte // keep two parts off one cache line
}

// table has for each bucket the time at which it will be full again: a number
// without a pointer. One that is full is the same as none.
type table struct {
	full  map[cidr.Key]int64
	sweep int64 // when the next may be
}

func newBuckets(most int) *buckets { return &buckets{perPart: most / bucketParts} }

// Destruct implements caddy.Destructor.
func (b *buckets) Destruct() error { return nil }

// len counts the buckets of addresses and of networks.
func (b *buckets) len() (ips, nets int) {
	for i := range b.parts {
		p := &b.parts[i]
		p.mu.Lock()
		ips, nets = ips+len(p.ips.full), nets+len(p.nets.full)
		p.mu.Unlock()
	}
	return ips, nets
}

// next is what a bucket will be when a token has been taken, if it has one.
func (t *table) next(k cidr.Key, now int64, r *Rate) (full int64, ok bool) {
	if r == nil {
		return 0, true
	}
	if full = t.full[k]; full > now+r.most { // of a rate that a reload has changed
		full = now + r.most
		t.full[k] = full
	}
	full = max(full, now) + r.step
	return full, full-now <= r.most
}

// room reports whether a bucket is there or there is room for it. The last
// eighth is for sources that have flows or had some lately.
func (t *table) room(k cidr.Key, now int64, r *Rate, most int, f Flow) bool {
	if r == nil || len(t.full) < most-most/8 {
		return true
	}
	if _, known := t.full[k]; known {
		return true
	}
	if now >= t.sweep {
		t.sweep = now + sweepEvery
		for k, full := range t.full {
			if full <= now {
				delete(t.full, k)
			}
		}
	}
	return len(t.full) < most-most/8 || len(t.full) < most && flow.Returning(f.Source)
}

func (t *table) put(k cidr.Key, full int64, r *Rate) {
	if r == nil {
		return
	}
	if t.full == nil {
		t.full = make(map[cidr.Key]int64)
	}
	t.full[k] = full
}

// warn says that a table is full, once a minute.
func (b *buckets) warn(next *atomic.Int64, now int64, logger *zap.Logger, table string, take bool) {
	if due := next.Load(); take && now >= due && next.CompareAndSwap(due, now+warnEvery) {
		logger.Warn("rate limiter table is full", zap.String("table", table), zap.Int("buckets", maxBuckets))
	}
}

// UnmarshalCaddyfile sets up the filter from Caddyfile tokens. Syntax:
//
//	rate_limit {
//		per_ip  <rate> [burst <number>]
//		per_net <rate> [burst <number>]
//	}
func (r *RateLimit) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	return caddyopt.Block(d, caddyopt.Options{
		"per_ip":  caddyopt.Func(unmarshalRate(&r.PerIP)),
		"per_net": caddyopt.Func(unmarshalRate(&r.PerNet)),
	})
}

func unmarshalRate(to **Rate) func(*caddyfile.Dispenser) error {
	return func(d *caddyfile.Dispenser) error {
		r := new(Rate)
		name := d.Val()
		if err := caddyopt.Int(&r.Rate).Read(d); err != nil {
			return err
		}
		if d.NextArg() {
			if d.Val() != "burst" {
				return d.Errf("%s: unexpected argument %q; write it as in %s 50 burst 100", name, d.Val(), name)
			}
			if err := caddyopt.Ptr(&r.Burst, caddyopt.Int).Read(d); err != nil {
				return err
			}
		}
		*to = r
		return nil
	}
}

// Interface guards
var (
	_ caddy.Provisioner     = (*RateLimit)(nil)
	_ caddy.CleanerUpper    = (*RateLimit)(nil)
	_ caddyfile.Unmarshaler = (*RateLimit)(nil)
	_ Filter                = (*RateLimit)(nil)
	_ Explainer             = (*RateLimit)(nil)
)
