package listener

import (
	"context"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Progress tells of every live flow that has reached its backend, or a server, and
// that want selects: once an interval, and spread over it. It looks at a part of
// the flows at a time, in the order in which the engines keep them, so that a
// worker is never held up for longer than a few of them take. The workers call
// want. It returns when ctx has ended.
func (e *Engines) Progress(ctx context.Context, interval time.Duration, want func(relay.ID) bool, tell func(*relay.Info)) {
	steps := stepsOf(interval)
	tick := time.NewTicker(interval / time.Duration(steps))
	defer tick.Stop()
	r := e.round(want, tell)
	for step := 0; ; step = (step + 1) % steps {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		r.step(step, steps)
	}
}

const (
	maxSteps  = 256
	shortStep = 20 * time.Millisecond
)

// stepsOf is in how many steps an interval is divided.
func stepsOf(interval time.Duration) int { return int(min(max(interval/shortStep, 1), maxSteps)) }

// progressChunk is how many slots a worker looks at before it goes back to its
// flows.
const progressChunk = 128

// round goes through the flows, a step at a time.
type round struct {
	want    func(relay.ID) bool
	tell    func(*relay.Info)
	parts   []*cursor
	taken   []*TCPConn // that there were when the round began
	found   []relay.Info
	gParts  int // of guests that were looked at
	takenAt int
}

// cursor is where the round has come to on a worker of an engine.
type cursor struct {
	part func(from, to uint32, found []relay.Info) (_ []relay.Info, end uint32)
	at   uint32
	end  uint32 // of the slots, when it was last looked
}

func (e *Engines) round(want func(relay.ID) bool, tell func(*relay.Info)) *round {
	r := &round{want: want, tell: tell}
	for w := range e.TCP.Workers() {
		r.parts = append(r.parts, &cursor{part: func(from, to uint32, found []relay.Info) ([]relay.Info, uint32) {
			return e.TCP.Part(w, from, to, want, found)
		}})
	}
	for w := range e.UDP.Workers() {
		r.parts = append(r.parts, &cursor{part: func(from, to uint32, found []relay.Info) ([]relay.Info, uint32) {
			return e.UDP.Part(w, from, to, want, found)
		}})
	}
	return r
}

// step tells of the flows of one of the steps of a round.
func (r *round) step(step, steps int) {
	if step == 0 {
		r.taken, r.takenAt, r.gParts = taken.list(), 0, 0
		for _, c := range r.parts {
			c.at = 0
			_, c.end = c.part(0, 0, nil)
		}
	}
	for _, c := range r.parts {
		for to := upTo(int(c.end), step, steps); int(c.at) < to; {
			next := uint32(min(to, int(c.at)+progressChunk))
			r.found, c.end = c.part(c.at, next, r.found[:0])
			for i := range r.found {
				r.tell(&r.found[i])
			}
			c.at = next
		}
	}
	for to := upTo(len(r.taken), step, steps); r.takenAt < to; r.takenAt++ {
		c := r.taken[r.takenAt]
		r.taken[r.takenAt] = nil
		if i := c.info(); r.want(i.ID) && taken.get(i.ID) != nil && (i.Phase == relay.Established || i.Phase == relay.Handled) {
			r.tell(&i)
		}
	}
	for to := upTo(guestParts, step, steps); r.gParts < to; r.gParts++ {
		guestTables.Range(func(_, t any) bool {
			for _, g := range t.(*guests).parts[r.gParts].list() {
				if r.want(g.id) {
					i := g.info()
					r.tell(&i)
				}
			}
			return true
		})
	}
}

// upTo is how many of n are done when a step is.
func upTo(n, step, steps int) int { return n * (step + 1) / steps }
