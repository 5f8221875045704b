package udprelay

import "time"

// The timers of a worker: one wheel of 512 buckets of a tenth of a second,
// whose lists are links in the sessions. A session stands in the bucket of the
// time it would end if nothing happened, or in the last one when that is
// further away. Activity only notes the time; a session whose bucket comes up
// too early is put into a later one. Times are ticks of the monotonic clock
// since the worker's start.

const (
	tick         = 100 * time.Millisecond
	wheelBuckets = 512
)

type wheel struct {
	at    uint32 // the tick whose bucket is being emptied; all before it are empty
	n     int    // sessions in it
	heads [wheelBuckets]uint32
}

// ticks rounds up and adds one for the tick that has begun, so that nothing
// ends early. It keeps far from overflow.
func ticks(d time.Duration) uint32 {
	return uint32(min((d+tick-1)/tick+1, 1<<30))
}

// arm puts a session into the bucket of due.
func (w *worker) arm(slot, due uint32) {
	t := &w.wheel
	if t.n == 0 {
		t.at = w.now
		w.tickTimer(true)
	}
	due = min(max(due, t.at+1), t.at+wheelBuckets-1)
	head := &t.heads[due%wheelBuckets]
	s := w.slab.at(slot)
	s.due, s.timerPrev, s.timerNext = due, 0, *head
	if *head != 0 {
		w.slab.at(*head).timerPrev = slot
	}
	*head = slot
	s.flags |= armed
	t.n++
}

func (w *worker) disarm(slot uint32) {
	s := w.slab.at(slot)
	if s.flags&armed == 0 {
		return
	}
	if s.timerPrev != 0 {
		w.slab.at(s.timerPrev).timerNext = s.timerNext
	} else {
		w.wheel.heads[s.due%wheelBuckets] = s.timerNext
	}
	if s.timerNext != 0 {
		w.slab.at(s.timerNext).timerPrev = s.timerPrev
	}
	s.flags &^= armed
	w.wheel.n--
}

// expire ends the sessions whose time has come, up to a budget, and reports
// whether more are left to look at. A panic in it loses no session: each is
// out of its bucket before anybody is told.
func (w *worker) expire() (more bool) {
	t := &w.wheel
	for budget := 256; ; {
		for slot := t.heads[t.at%wheelBuckets]; slot != 0; slot = t.heads[t.at%wheelBuckets] {
			if budget--; budget < 0 {
				return true
			}
			w.disarm(slot)
			due, why := w.deadline(slot)
			if due <= w.now {
				w.end(slot, why)
			} else {
				w.arm(slot, due)
			}
		}
		if t.n == 0 {
			t.at = w.now
			w.tickTimer(false)
			return false
		}
		if t.at >= w.now {
			return false
		}
		t.at++
	}
}
