package discovery

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
)

// taskKey is what makes two sources the same.
type taskKey struct{ kind, options string }

// task asks one source, for all pools that have it. It has two goroutines while
// a pool that uses it runs: run, which calls List, and watch. The first join
// starts them and the last leave ends them, without waiting for a guest; the
// next start, and Close of the source, wait for both.
type task struct {
	key      taskKey
	source   Source
	interval time.Duration

	mu        sync.Mutex
	uses      []*Use // that run, the newest last
	cancel    context.CancelFunc
	ended     chan struct{} // of the last run; nil before the first
	destroyed bool

	// What is known. The set is replaced, never changed.
	set     []Endpoint
	asked   bool
	success time.Time // when the source last told a set
}

func newTask(key taskKey, s Source) *task {
	return &task{key: key, source: s, interval: time.Duration(*s.Common().RefreshInterval)}
}

// Destruct implements caddy.Destructor: no config has the source any more.
func (t *task) Destruct() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.destroyed = true
	if t.ended == nil {
		closeSource(t.source)
		return nil
	}
	go func() {
		<-t.ended
		closeSource(t.source)
	}()
	return nil
}

func (t *task) join(u *Use, pool string, log *zap.Logger) {
	t.mu.Lock()
	defer t.mu.Unlock()
	u.pool, u.log, u.counts, u.running = pool, log, countersOf(pool, t.key.kind), true
	t.uses = append(t.uses, u)
	running.add(u)
	if len(t.uses) > 1 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.cancel = cancel
	before, ended := t.ended, make(chan struct{})
	t.ended = ended
	go func() {
		defer close(ended)
		if before != nil {
			<-before
		}
		t.run(ctx)
	}()
}

func (t *task) leave(u *Use) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !u.running {
		return
	}
	u.running = false
	running.drop(u)
	t.uses = slices.DeleteFunc(t.uses, func(o *Use) bool { return o == u })
	if len(t.uses) == 0 {
		t.cancel()
	}
}

// logger is that of the newest config.
func (t *task) logger() *zap.Logger {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n := len(t.uses); n > 0 {
		return t.uses[n-1].log
	}
	return zap.NewNop()
}

// run asks until ctx ends: when an answer has expired, and when the source
// tells of changes, once it has been quiet for a while.
func (t *task) run(ctx context.Context) {
	signs := make(chan struct{}, 1)
	var watching sync.WaitGroup
	watching.Go(func() { t.watch(ctx, signs) })
	defer watching.Wait()

	var c clock
	timer := time.NewTimer(0)
	defer timer.Stop()
	var trouble outage
	for {
		select {
		case <-ctx.Done():
			return
		case <-signs:
			c.sign(time.Now())
		case <-timer.C:
			if ctx.Err() != nil {
				return
			}
			wait := t.ask(ctx, &trouble)
			if ctx.Err() != nil {
				return
			}
			c = clock{due: time.Now().Add(wait)}
		}
		timer.Reset(time.Until(c.next()))
	}
}

// clock says when the source is asked next.
type clock struct {
	due         time.Time // without a sign
	first, last time.Time // signs since it was asked
}

// sign hears that there may be something new.
func (c *clock) sign(now time.Time) {
	if c.first.IsZero() {
		c.first = now
	}
	c.last = now
}

func (c *clock) next() time.Time {
	at := c.due
	for _, limit := range []time.Time{c.last.Add(quiet), c.first.Add(impatience)} {
		if !c.first.IsZero() && limit.Before(at) {
			at = limit
		}
	}
	return at
}

// outage is how long a source has been failing.
type outage struct {
	since time.Time // zero: it is not
	retry time.Duration
}

// failed returns when to try again, and whether this begins the outage.
func (o *outage) failed(now time.Time) (retry time.Duration, begins bool) {
	if begins = o.since.IsZero(); begins {
		o.since, o.retry = now, minRetry
	}
	retry = o.retry
	o.retry = min(2*o.retry, maxRetry)
	return retry, begins
}

// ask lists once and returns how long until the next time.
func (t *task) ask(ctx context.Context, trouble *outage) time.Duration {
	lctx, cancel := context.WithTimeout(ctx, listLimit)
	set, err := t.list(lctx)
	cancel()
	if ctx.Err() != nil {
		return 0
	}
	list, left := tidy(set)
	result := t.took(list, left, set.Withdrawn, err)
	wait := t.interval
	if set.TTL > 0 {
		wait = min(max(set.TTL, minRefreshInterval), maxTTL)
	}
	if result == resultOK && set.Incomplete != nil {
		err = set.Incomplete
	}
	switch {
	case err != nil:
		retry, begins := trouble.failed(time.Now())
		if result == resultOK {
			wait = min(wait, retry)
		} else {
			wait = retry
		}
		if begins {
			t.logger().Warn("discovery source failed", zap.Error(err), zap.Duration("retry_in", wait), zap.Int("backends_kept", t.size()))
		}
	case !trouble.since.IsZero():
		t.logger().Info("discovery source works again", zap.Duration("duration", time.Since(trouble.since)))
		*trouble = outage{}
	}
	// A little less, so that many instances that have started together do not
	// ask together for ever.
	return max(wait-rand.N(wait/16+1), minRefreshInterval)
}

// errPanic is a panic of guest code.
type errPanic struct{ value any }

func (e errPanic) Error() string { return fmt.Sprintf("the source panicked: %v", e.value) }

// list calls the guest. Its panics are errors.
func (t *task) list(ctx context.Context) (set Set, err error) {
	defer func() {
		if p := recover(); p != nil {
			t.logger().Error("discovery source panicked", zap.Any("panic", p), zap.ByteString("stack", debug.Stack()))
			set, err = Set{}, errPanic{p}
		}
	}()
	return t.source.List(ctx)
}

// took takes in an answer, tells the pools when it is another set than the one
// before, and counts.
func (t *task) took(list []Endpoint, left skipped, withdrawn bool, err error) result {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked = true
	r := resultError
	if err == nil {
		switch {
		case withdrawn:
			r, list = resultWithdrawn, nil
		case len(list) == 0:
			r = resultEmpty
		default:
			r = resultOK
		}
	}
	if r == resultOK || r == resultWithdrawn {
		t.success = time.Now()
		if !slices.Equal(list, t.set) {
			t.set = list
		}
	}
	var counted []*counters
	for _, u := range t.uses {
		if !slices.Contains(counted, u.counts) { // two configs may have a pool of one name for a moment
			counted = append(counted, u.counts)
			u.counts.add(r, left)
		}
		select { // also when nothing has changed: a pool may wait for the first answer
		case u.changed <- struct{}{}:
		default:
		}
	}
	return r
}

func (t *task) size() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.set)
}

// watch keeps the source's Watch running, and passes its signs on.
func (t *task) watch(ctx context.Context, signs chan<- struct{}) {
	changed := func() {
		select {
		case signs <- struct{}{}:
		default:
		}
	}
	retry, told := minRewatch, false
	for {
		began := time.Now()
		err := t.watchOnce(ctx, changed)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > maxRewatch { // it was well meanwhile
			retry, told = minRewatch, false
		}
		if err == nil {
			err = errors.New("it has ended")
		}
		if !told {
			told = true
			t.logger().Warn("discovery source does not tell of changes", zap.Error(err), zap.Duration("retry_in", retry), zap.Duration("asked_every", t.interval))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(retry):
		}
		retry = min(2*retry, maxRewatch)
	}
}

func (t *task) watchOnce(ctx context.Context, changed func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			t.logger().Error("discovery source panicked", zap.Any("panic", p), zap.ByteString("stack", debug.Stack()))
			err = errPanic{p}
		}
	}()
	return t.source.Watch(ctx, changed)
}
