package health

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net/netip"
	"sync"
	"time"
)

// Target is a backend that a Runner checks.
type Target interface {
	Addr() netip.AddrPort

	// Checked hears the result of every check, from one goroutine at a time.
	// An err that is NoVerdict must not count.
	Checked(at time.Time, err error)

	// Rhythm returns the same value for the same backend in every config.
	Rhythm() *Rhythm
}

// Rhythm is when a backend was last checked, and whether it is being checked.
// It lives as long as the backend, so that its checks keep their rhythm, and
// never overlap, when one config takes over from another.
type Rhythm struct {
	mu      sync.Mutex
	running bool
	last    time.Time // start of the last check
	before  time.Time // start of the one before
	first   time.Time // when the first is planned
}

// claim starts a check, or says when to ask again.
func (r *Rhythm) claim(now time.Time, interval time.Duration) (next time.Time, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running { // and may be cut short
		return now.Add(interval / 8), false
	}
	if due := r.last.Add(interval); !r.last.IsZero() && due.After(now) {
		return due, false
	}
	r.running, r.last, r.before = true, now, r.last
	return now.Add(interval), true
}

// due returns when to claim, and false for a backend that has no plan yet. A
// check in progress is another Runner's, which may cut it short.
func (r *Rhythm) due(now time.Time, interval time.Duration) (time.Time, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running {
		return now.Add(interval / 8), true
	}
	if r.last.IsZero() {
		return r.first, !r.first.IsZero()
	}
	return r.last.Add(interval), true
}

// plan sets when the first check is to be.
func (r *Rhythm) plan(at time.Time) {
	r.mu.Lock()
	r.first = at
	r.mu.Unlock()
}

// done ends a check. One that was cut short is as good as never begun: it is
// due again, or reloads in quick succession would let no check come to its end.
func (r *Rhythm) done(cut bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running = false
	if cut {
		r.last = r.before
	}
}

// Limit bounds how many checks run at once.
type Limit chan struct{}

// NewLimit returns a limit of n.
func NewLimit(n int) Limit { return make(Limit, n) }

// process bounds the checks of all pools together.
var process = NewLimit(256)

// Runner checks the backends of one pool. It has one goroutine that plans,
// started by Start, and one for each check in progress, except that the one that
// plans makes the connections of tcp_connect itself; Stop ends them and waits
// for them.
type Runner struct {
	Name  string // of the pool: pools of different names start at different times
	Check Check
	Limit Limit // default: one for the process

	interval, timeout time.Duration

	cancel context.CancelFunc
	change chan []Target // to plan
	wg     sync.WaitGroup
}

// Start runs the checks of targets.
func (r *Runner) Start(targets []Target) {
	s := r.Check.Common()
	r.interval, r.timeout = time.Duration(*s.Interval), time.Duration(*s.Timeout)
	if r.Limit == nil {
		r.Limit = process
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	r.change = make(chan []Target)
	r.wg.Go(func() { r.plan(ctx, targets) })
}

// Set changes the backends that are checked. It must not be called after Stop.
func (r *Runner) Set(targets []Target) { r.change <- targets }

// Stop ends the checks; those in progress end without a verdict.
func (r *Runner) Stop() {
	r.cancel()
	r.wg.Wait()
}

// entry is a target and when it is to be checked next.
type entry struct {
	target Target
	next   time.Time
}

type queue []entry

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].next.Before(q[j].next) }
func (q queue) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)        { *q = append(*q, x.(entry)) }
func (q *queue) Pop() any {
	old := *q
	e := old[len(old)-1]
	*q = old[:len(old)-1]
	return e
}

// The steps of the goroutine that plans: what is due within one is begun
// together, and all connections in progress are looked at together.
const (
	lookEvery = 5 * time.Millisecond
	lookSoon  = time.Millisecond // for the first time after one was begun

	never = time.Hour
)

func (r *Runner) plan(ctx context.Context, targets []Target) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	q := r.queue(targets)
	connects := connector{settings: r.Check.Common(), limit: r.Limit, timeout: r.timeout}
	defer connects.stop()
	_, bare := r.Check.(*TCPConnect)
	step := min(lookEvery, r.interval/64)
	for {
		now := time.Now()
		for len(q) > 0 && !q[0].next.After(now) {
			t := q[0].target
			next, ok := t.Rhythm().claim(now, r.interval)
			switch {
			case ok && bare:
				connects.waiting = append(connects.waiting, t)
			case ok:
				r.wg.Go(func() { r.check(ctx, t) })
			}
			q[0].next = next
			heap.Fix(&q, 0)
		}
		connects.begin()
		wait := connects.look()
		if len(q) > 0 {
			wait = min(wait, max(time.Until(q[0].next), step))
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return
		case targets := <-r.change:
			q = r.queue(targets)
		case connects.place() <- struct{}{}:
			connects.placed()
		case <-timer.C:
		}
	}
}

// queue plans the next check of every target. Backends that were never checked
// are spread over one interval, each pool from a point of its own, so that
// neither one large pool nor many small ones are checked all at once.
func (r *Runner) queue(targets []Target) queue {
	q := make(queue, 0, len(targets))
	var fresh []Target
	now := time.Now()
	for _, t := range targets {
		if next, ok := t.Rhythm().due(now, r.interval); ok {
			q = append(q, entry{t, next})
		} else {
			fresh = append(fresh, t)
		}
	}
	h := fnv.New32a()
	h.Write([]byte(r.Name))
	start := float64(h.Sum32()) / (1 << 32)
	for i, t := range fresh {
		part := (float64(i) + start) / float64(len(fresh))
		at := now.Add(time.Duration(part * float64(r.interval)))
		t.Rhythm().plan(at)
		q = append(q, entry{t, at})
	}
	heap.Init(&q)
	return q
}

// check runs one check that claim has started. The wait for a place in the
// limit is no part of the check's time.
func (r *Runner) check(ctx context.Context, t Target) {
	cut := true
	defer func() { t.Rhythm().done(cut) }()
	select {
	case r.Limit <- struct{}{}:
		defer func() { <-r.Limit }()
	case <-ctx.Done():
		return
	}
	err := r.ask(ctx, t)
	if ctx.Err() != nil {
		return
	}
	cut = false
	t.Checked(time.Now(), err)
}

// ask keeps a check that panics from ending the process; the panic counts as a
// failure of our own.
func (r *Runner) ask(ctx context.Context, t Target) (err error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	defer func() {
		if p := recover(); p != nil {
			err = panicError{p}
		}
	}()
	err = r.Check.Check(ctx, t.Addr())
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) && !NoVerdict(err) {
		err = lateError(r.timeout)
	}
	return err
}

// lateError is that of a check that took longer than it may.
type lateError time.Duration

func (e lateError) Error() string { return fmt.Sprintf("no answer within %v", time.Duration(e)) }

// panicError is the panic of a check, which is a mistake of the check's and not
// the backend's.
type panicError struct{ value any }

func (e panicError) Error() string { return fmt.Sprintf("health check panicked: %v", e.value) }
