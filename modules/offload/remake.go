package offload

import (
	"net/netip"
	"time"

	"go.uber.org/zap"
)

// What run does when the table has failed, and what it reads from one that has
// not.

// lost gives up a table that has failed: somebody has removed it, or part of
// it, or the kernel does not follow. What it had in it is put into the next one.
func (k *Kernel) lost(err error) {
	k.Logger.Warn("the kernel's table failed; everything is decided without it until there is a new one",
		zap.String("table", k.t.t.Name), zap.Error(err), zap.Duration("retry_in", k.backoff))
	k.t.close()
	k.t, k.err = nil, err
	k.retryAt = time.Now().Add(k.backoff)
	k.backoff = min(2*k.backoff, maxBackoff)
	up.WithLabelValues().Set(0)
	for _, s := range k.scopes {
		s.counts = [causes]uint64{}
	}
}

// remake makes a table anew and puts into it what there was.
func (k *Kernel) remake() {
	now := time.Now()
	if now.Before(k.retryAt) {
		return
	}
	t, err := newTable(k.plain)
	if err != nil {
		k.retryAt = now.Add(k.backoff)
		k.backoff = min(2*k.backoff, maxBackoff)
		if err.Error() != k.err.Error() {
			k.Logger.Warn("the kernel's table cannot be made", zap.Error(err), zap.Duration("retry_in", k.retryAt.Sub(now)))
		}
		k.err = err
		return
	}
	k.t = t
	if err := k.point(); err != nil {
		k.lost(err)
		return
	}
	for _, s := range k.scopes {
		clear(s.kept)
		s.denied, s.before = nil, nil
		left := make(map[source]time.Duration)
		for src, until := range s.blocked {
			if d := until.Add(-spare).Sub(now); d >= time.Second {
				left[src] = d
			}
		}
		keep, fits := k.look(s, func(a netip.Addr) bool {
			_, ip := left[sourceOf(a, anIP)]
			_, net := left[sourceOf(a, aNet)]
			return ip || net
		})
		if !fits || len(left) == 0 {
			clear(s.blocked)
		} else {
			if k.keep(s, keep) != nil {
				return
			}
			if err := k.t.block(s.id, left); err != nil {
				k.lost(err)
				return
			}
		}
		if k.updateDenied(s, true); k.t == nil {
			return
		}
	}
	remade.WithLabelValues().Inc()
	up.WithLabelValues().Set(1)
	k.Logger.Info("the kernel's table is there again", zap.String("table", t.t.Name))
}

// count reads what the table has dropped since the last time.
func (k *Kernel) count() {
	all, err := k.t.counts()
	if err != nil {
		k.lost(err)
		return
	}
	for id, n := range all {
		s := k.scopes[id]
		if s == nil {
			continue
		}
		var sum uint64
		for cause := range causes {
			d := n[cause] - min(s.counts[cause], n[cause])
			drops.add(s.Listener, cause, d)
			sum += d
		}
		s.counts = n
		if sum > 0 {
			k.Count(s.Listener, sum)
		}
	}
	if k.backoff > minBackoff && time.Since(k.retryAt) > maxBackoff {
		k.backoff = minBackoff
	}
}

// gauge shows what the table has.
func (k *Kernel) gauge() {
	var n [3]int
	if k.t != nil {
		for _, s := range k.scopes {
			n[0] += len(s.denied)
			n[1] += len(s.blocked)
			n[2] += len(s.kept)
		}
	}
	for i, kind := range []string{"denied", "blocked", "kept"} {
		entries.WithLabelValues(kind).Set(float64(n[i]))
	}
}
