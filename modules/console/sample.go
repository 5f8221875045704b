package console

import (
	"cmp"
	"context"
	"errors"
	"net/url"
	"slices"
	"strconv"
	"time"
)

// sample is what an instance has at a moment.
type sample struct {
	at        time.Time
	ready     string // what /readyz says
	listeners []listenerView
	pools     []poolView
	sessions  []sessionView
	cut       bool // there are more sessions
}

// take asks for everything that top shows, sessions up to a number.
func (c *client) take(ctx context.Context, sessions int) (*sample, error) {
	s := &sample{at: time.Now(), ready: "ready"}
	var err error
	if s.listeners, err = c.listeners(ctx); err != nil {
		return nil, err
	}
	if s.pools, err = c.pools(ctx); err != nil {
		return nil, err
	}
	if sessions > 0 {
		q := url.Values{"limit": {strconv.Itoa(sessions + 1)}}
		err = each(ctx, c, "/sessions", q, func(v *sessionView) error {
			if s.cut = len(s.sessions) == sessions; !s.cut {
				s.sessions = append(s.sessions, *v)
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	var state struct{ Status string }
	var no *refusal
	switch err := c.get(ctx, "/readyz", nil, &state); {
	case errors.As(err, &no):
		s.ready = "not ready: " + no.text
	case err != nil:
		return nil, err
	}
	return s, nil
}

// rate is how much a counter has gained in a second. One that has fallen is of
// another process.
func rate(before, now uint64, over time.Duration) float64 {
	if now < before || over <= 0 {
		return 0
	}
	return float64(now-before) / over.Seconds()
}

// The rates of a line of top, a second.
type rates struct {
	opened, c2s, s2c, packets, dropped float64
}

func (r rates) plus(o rates) rates {
	return rates{r.opened + o.opened, r.c2s + o.c2s, r.s2c + o.s2c, r.packets + o.packets, r.dropped + o.dropped}
}

// listenerRates compares a listener with what it was; before nil is not known.
func listenerRates(before *listenerView, now *listenerView, over time.Duration) rates {
	if before == nil {
		return rates{}
	}
	return rates{
		opened:  rate(before.ConnectionsTotal+before.SessionsTotal, now.ConnectionsTotal+now.SessionsTotal, over),
		c2s:     rate(before.BytesC2S, now.BytesC2S, over),
		s2c:     rate(before.BytesS2C, now.BytesS2C, over),
		packets: rate(before.PacketsC2S+before.PacketsS2C, now.PacketsC2S+now.PacketsS2C, over),
		dropped: rate(before.Dropped, now.Dropped, over),
	}
}

// order is what sessions may be sorted by.
type order int

const (
	byRate order = iota
	byTotal
	byAge
	byIdle
	orders
)

var orderNames = [orders]string{"rate", "bytes", "age", "idle"}

// busy is a session with its rates.
type busy struct {
	*sessionView
	c2s, s2c float64
}

// busiest are the sessions in an order, the first that should be seen first. A
// session that is new since before has moved all it has moved since.
func busiest(before, now *sample, by order) []busy {
	was := map[string]*sessionView{}
	var over time.Duration
	if before != nil {
		over = now.at.Sub(before.at)
		for i := range before.sessions {
			was[before.sessions[i].ID] = &before.sessions[i]
		}
	}
	list := make([]busy, 0, len(now.sessions))
	for i := range now.sessions {
		s := &now.sessions[i]
		b := busy{sessionView: s}
		switch old := was[s.ID]; {
		case old != nil:
			b.c2s, b.s2c = rate(old.BytesC2S, s.BytesC2S, over), rate(old.BytesS2C, s.BytesS2C, over)
		case before != nil && !before.cut && s.age() < over:
			b.c2s, b.s2c = rate(0, s.BytesC2S, over), rate(0, s.BytesS2C, over)
		}
		list = append(list, b)
	}
	slices.SortFunc(list, func(x, y busy) int {
		var n int
		switch by {
		case byRate:
			n = cmp.Compare(y.c2s+y.s2c, x.c2s+x.s2c)
		case byTotal:
			n = cmp.Compare(y.BytesC2S+y.BytesS2C, x.BytesC2S+x.BytesS2C)
		case byAge:
			n = cmp.Compare(y.AgeMS, x.AgeMS)
		case byIdle:
			n = cmp.Compare(y.IdleMS, x.IdleMS)
		}
		return cmp.Or(n, cmp.Compare(x.ID, y.ID))
	})
	return list
}

// placed is a backend with its pool and how many flows it is given a second.
type placed struct {
	pool string
	*backendView
	opened float64
}

// troubled are the backends, those that get no new flows first and then the
// busiest.
func troubled(before, now *sample) (list []placed) {
	type key struct{ pool, addr string }
	was := map[key]uint64{}
	var over time.Duration
	if before != nil {
		over = now.at.Sub(before.at)
		for _, p := range before.pools {
			for _, b := range p.Backends {
				was[key{p.Name, b.Addr}] = b.Total
			}
		}
	}
	for _, p := range now.pools {
		for i := range p.Backends {
			b := placed{pool: p.Name, backendView: &p.Backends[i]}
			if total, known := was[key{p.Name, b.Addr}]; known {
				b.opened = rate(total, b.Total, over)
			}
			list = append(list, b)
		}
	}
	out := func(b placed) int {
		if b.health() != "healthy" || b.State != "enabled" {
			return 0
		}
		return 1
	}
	slices.SortFunc(list, func(x, y placed) int {
		return cmp.Or(cmp.Compare(out(x), out(y)), cmp.Compare(y.Active, x.Active), cmp.Compare(x.pool, y.pool), cmp.Compare(x.Addr, y.Addr))
	})
	return list
}
