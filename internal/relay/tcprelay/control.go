package tcprelay

import (
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// walkChunk is how many slots a worker looks at before it goes back to its
// connections.
const walkChunk = 512

// Flows calls yield for each live connection until it returns false. yield
// runs on the caller's goroutine, which must not be a worker.
func (e *Engine) Flows(yield func(*relay.Info) bool) {
	var found []relay.Info
	for _, w := range e.workers {
		for slot, more := uint32(0), true; more; {
			found = found[:0]
			if !w.call(func() {
				end := min(slot+walkChunk, w.slab.top)
				for ; slot < end; slot++ {
					if c := w.slab.at(slot); c.state != vacant && c.path != 0 {
						found = append(found, w.inspect(slot, c))
					}
				}
				more = slot < w.slab.top
			}) {
				break
			}
			for i := range found {
				if !yield(&found[i]) {
					return
				}
			}
		}
	}
}

// Part appends to found the connections among the slots [from, to) of worker n
// that are established and that want selects, and returns where the worker's slots
// end. The worker calls want. It must not be called from a worker.
func (e *Engine) Part(n int, from, to uint32, want func(relay.ID) bool, found []relay.Info) (_ []relay.Info, end uint32) {
	w := e.workers[n]
	w.call(func() {
		end = w.slab.top
		for slot := from; slot < min(to, end); slot++ {
			c := w.slab.at(slot)
			if c.state == established && want(relay.MakeID(false, w.index, slot, c.gen)) {
				found = append(found, w.inspect(slot, c))
			}
		}
	})
	return found, end
}

// Flow is the connection of that ID. It must not be called from a worker.
func (e *Engine) Flow(id relay.ID) (i relay.Info, ok bool) {
	e.with(id, func(w *worker, c *conn) {
		i, ok = w.inspect(id.Slot(), c), true
	})
	return i, ok
}

// CloseFlow ends one connection. It must not be called from a worker.
func (e *Engine) CloseFlow(id relay.ID, why relay.Reason) (ok bool) {
	e.with(id, func(w *worker, c *conn) {
		ok = true
		w.current = handle{id.Slot(), c.gen}
		w.cut(id.Slot(), c, why)
	})
	return ok
}

func (e *Engine) with(id relay.ID, do func(*worker, *conn)) {
	if id.UDP() || id.Worker() >= len(e.workers) {
		return
	}
	w := e.workers[id.Worker()]
	w.call(func() {
		if id.Slot() >= w.slab.top {
			return
		}
		if c := w.find(handle{id.Slot(), id.Gen()}); c != nil && c.path != 0 {
			do(w, c)
		}
	})
}

// inspect describes a live connection, with the address the backend sees.
func (w *worker) inspect(slot uint32, c *conn) (i relay.Info) {
	w.describe(slot, c, &i)
	if fd := c.fd[backend]; fd >= 0 {
		i.UpstreamLocal = localAddr(fd, &w.rsa)
	}
	return i
}

// ClosePaths ends the connections whose path match selects; it returns without
// waiting. match is called from the workers, once a path. With
// relay.BackendDown a connection that is still connecting tries its next
// backend. It may be called from any goroutine, a worker's included.
func (e *Engine) ClosePaths(match func(*relay.Path) bool, why relay.Reason) {
	for _, w := range e.workers {
		w.post(op{do: func() {
			doomed := make(map[*relay.Path]bool)
			for p := range w.paths.index {
				if match(p) {
					doomed[p] = true
				}
			}
			if len(doomed) > 0 {
				w.closeFrom(0, doomed, why)
			}
		}})
	}
}

// closeFrom ends the doomed connections of the slots from slot on, a chunk at a
// time.
func (w *worker) closeFrom(slot uint32, doomed map[*relay.Path]bool, why relay.Reason) {
	end := min(slot+walkChunk, w.slab.top)
	if end < w.slab.top {
		// First, so that guest code that panics below does not stop the walk.
		w.post(op{do: func() { w.closeFrom(end, doomed, why) }})
	}
	for ; slot < end; slot++ {
		c := w.slab.at(slot)
		if c.state == vacant || !doomed[w.paths.at(c.path)] {
			continue
		}
		w.current = handle{slot, c.gen}
		if c.state == connecting && why == relay.BackendDown {
			w.connectFailed(slot, c, relay.Shortage, unix.ECANCELED)
			w.dial(slot, c)
			continue
		}
		w.cut(slot, c, why)
	}
}
