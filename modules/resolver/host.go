package resolver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

const (
	namespace = "wayhouse.resolvers"
	inlineKey = "resolver"
)

// Host is a named resolver of a config.
type Host struct {
	name     string
	set      *Settings
	resolver Resolver
	known    func(pool string) bool
	logger   *zap.Logger
	counts   *counters
	key      sharedKey
	shared   *shared
	uses     atomic.Int64 // calls under way, and one for the config
	failures occasional
}

// ErrNoPlace is a resolver's answer that it knows of no place.
var ErrNoPlace = errors.New("the resolver knows of no place")

var errGone = errors.New("the resolver's config has gone")

// Load makes a named resolver from its config. known says which pools an answer
// may name. Errors begin with the key below the resolver.
func Load(ctx caddy.Context, name string, raw json.RawMessage, known func(pool string) bool) (*Host, error) {
	kind, options, err := guest(raw)
	if err != nil {
		return nil, err
	}
	id := namespace + "." + kind
	mod, err := ctx.LoadModuleByID(id, options)
	if err != nil { // without Caddy's words before the key
		return nil, errors.New(strings.TrimPrefix(err.Error(), "provision "+id+": "))
	}
	r, ok := mod.(Resolver)
	if !ok {
		return nil, fmt.Errorf("%T is not a resolver", mod)
	}
	// A kind with a Provision of its own may have left this out.
	if err := errors.Join(r.Common().Provision(ctx), r.Common().Validate()); err != nil {
		closeResolver(r)
		return nil, err
	}
	h := &Host{
		name: name, set: r.Common(), resolver: r, known: known,
		logger: ctx.Logger().With(zap.String("resolver", name)), counts: countersOf(name),
		key: sharedKey{name, kind + string(options)},
	}
	if h.shared, err = takeShared(h.key, h.set.Cache); err != nil {
		closeResolver(r)
		return nil, err
	}
	h.uses.Store(1)
	live.add(h)
	return h, nil
}

// guest takes a resolver's config apart and says which key is wrong.
func guest(raw json.RawMessage) (kind string, options json.RawMessage, err error) {
	var m map[string]json.RawMessage
	if json.Unmarshal(raw, &m) != nil || m == nil {
		return "", nil, fmt.Errorf(`%s is not an object, as in {"resolver": "http", "endpoint": "https://…"}`, raw)
	}
	if json.Unmarshal(m[inlineKey], &kind) != nil || kind == "" {
		return "", nil, errors.New(`resolver: the kind is missing, as in "resolver": "http"`)
	}
	info, err := caddy.GetModule(namespace + "." + kind)
	if err != nil {
		return "", nil, fmt.Errorf("resolver: there is no %s.%s; %s", namespace, kind, suggest.Module(namespace, kind))
	}
	m = maps.Clone(m)
	delete(m, inlineKey)
	if options, err = json.Marshal(m); err != nil { // sorted, so that the order of keys is no change
		return "", nil, err
	}
	return kind, options, strictjson.Check(options, info.New())
}

// Cleanup gives back what Load took, when the calls under way have returned.
// Flows that have begun under this config may still ask; see call.
func (h *Host) Cleanup() error {
	live.drop(h)
	h.release()
	return nil
}

// Name is the resolver's name.
func (h *Host) Name() string { return h.name }

// Settings are its options, with the defaults filled in.
func (h *Host) Settings() *Settings { return h.set }

// acquire keeps the resolver open for a call.
func (h *Host) acquire() bool {
	for {
		n := h.uses.Load()
		if n == 0 {
			return false
		}
		if h.uses.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (h *Host) release() {
	if h.uses.Add(-1) > 0 {
		return
	}
	closeResolver(h.resolver)
	_, _ = resolvers.Delete(h.key) // Destruct returns no error
}

func closeResolver(r Resolver) {
	if c, ok := r.(io.Closer); ok {
		c.Close()
	}
}

// Resolve asks where a flow goes. It waits for Settings.Timeout at most, and an
// answer without error names a pool that there is or a target that is allowed.
func (h *Host) Resolve(r *Request) (Answer, error) {
	if h.set.Cache == nil {
		return h.ask(r)
	}
	k, ok := key(h.set.parts, r)
	if !ok {
		h.counts.cache[uncacheable].Inc()
		return h.ask(r)
	}
	old, fresh := h.lookup(k)
	switch {
	case fresh && old.Empty():
		h.counts.cache[hitNegative].Inc()
		return Answer{}, ErrNoPlace
	case fresh:
		h.counts.cache[hit].Inc()
		return *old, nil
	}
	v, err, _ := h.shared.flights.Do(string(k[:]), func() (any, error) {
		// Another flow may have asked since the look at the cache.
		if a, fresh := h.lookup(k); fresh {
			if a.Empty() {
				return Answer{}, ErrNoPlace
			}
			return *a, nil
		}
		a, err := h.ask(r)
		h.keep(k, a, err)
		return a, err
	})
	if err != nil && err != ErrNoPlace && h.set.OnError == StaleOK && old != nil && !old.Empty() {
		h.counts.cache[stale].Inc()
		return *old, nil
	}
	h.counts.cache[miss].Inc()
	a, _ := v.(Answer)
	return a, err
}

// lookup is what the cache has, nil when it is of no use, and whether it is
// young enough.
func (h *Host) lookup(k cacheKey) (a *Answer, fresh bool) {
	e, ok := h.shared.get(k)
	// The pools may be others than when it was kept.
	if !ok || !e.answer.Empty() && h.check(&e.answer) != nil {
		return nil, false
	}
	return &e.answer, time.Now().Before(e.expires)
}

// keep puts an answer into the cache for as long as it may stay there.
func (h *Host) keep(k cacheKey, a Answer, err error) {
	ttl := time.Duration(*h.set.Cache.PositiveTTL)
	switch {
	case err == ErrNoPlace:
		ttl = time.Duration(*h.set.Cache.NegativeTTL)
	case err != nil:
		return
	case a.HasTTL:
		ttl = a.TTL
	}
	if ttl <= 0 {
		h.shared.remove(k)
		return
	}
	h.shared.put(k, entry{answer: a, expires: time.Now().Add(ttl)})
}

// ask calls the resolver and counts what becomes of it.
func (h *Host) ask(r *Request) (Answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(*h.set.Timeout))
	defer cancel()
	began := time.Now()
	a, err := h.call(ctx, r)
	h.counts.took.Observe(time.Since(began).Seconds())
	switch {
	case err == nil && a.Empty():
		h.counts.requests[resultEmpty].Inc()
		return Answer{}, ErrNoPlace
	case err == nil:
		if err = h.check(&a); err == nil {
			h.counts.requests[resultOK].Inc()
			return a, nil
		}
		h.counts.requests[resultError].Inc()
	case ctx.Err() != nil, errors.Is(err, context.DeadlineExceeded):
		h.counts.requests[resultTimeout].Inc()
	default:
		h.counts.requests[resultError].Inc()
	}
	if held, ok := h.failures.allow(); ok {
		h.logger.Warn("resolving failed", zap.Error(err), zap.String("on_error", h.set.OnError), zap.Int64("suppressed", held))
	}
	return Answer{}, err
}

// call calls the resolver, or the one that has the name now: a reload must not
// end flows that it overtakes before they ask. A panic of it is an error: it
// must not end flows that wait for the same answer.
func (h *Host) call(ctx context.Context, r *Request) (a Answer, err error) {
	for !h.acquire() {
		if h = live.named(h.name); h == nil {
			return Answer{}, errGone
		}
	}
	defer h.release()
	if err := h.shared.enter(ctx); err != nil {
		return Answer{}, fmt.Errorf("%d calls are under way: %w", maxCalls, err)
	}
	defer h.shared.leave()
	defer func() {
		if p := recover(); p != nil {
			h.logger.Error("a resolver panicked", zap.Any("panic", p), zap.Stack("stack"))
			a, err = Answer{}, fmt.Errorf("the resolver panicked: %v", p)
		}
	}()
	return h.resolver.Resolve(ctx, r)
}

// check says why flows cannot go where the answer says.
func (h *Host) check(a *Answer) error {
	if a.Target.IsValid() {
		return h.set.checkTarget(a.Target)
	}
	if !h.known(a.Pool) {
		return fmt.Errorf("no pool is named %q", a.Pool)
	}
	return nil
}

// occasional lets one log line through in ten seconds.
type occasional struct {
	next atomic.Int64 // nanoseconds after began
	held atomic.Int64
}

var began = time.Now()

func (o *occasional) allow() (held int64, ok bool) {
	now := int64(time.Since(began))
	next := o.next.Load()
	if now < next || !o.next.CompareAndSwap(next, now+int64(10*time.Second)) {
		o.held.Add(1)
		return 0, false
	}
	return o.held.Swap(0), true
}
