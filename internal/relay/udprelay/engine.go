package udprelay

import (
	"fmt"
	"slices"
	"sync"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Engine runs the workers. Its goroutines are theirs, one each, from New to
// Close.
type Engine struct {
	workers []*worker
	offload offload

	setup sync.Mutex // held while an endpoint is made; taken before mu

	mu        sync.Mutex
	endpoints []*Endpoint // by index; nil: free
	gen       uint32      // of the next endpoint
	closed    bool
}

// New starts an engine.
func New(o Options) (*Engine, error) {
	if o.Workers < 1 || o.Workers > 127 {
		return nil, fmt.Errorf("%d workers: must be 1 to 127", o.Workers)
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	return start(o, probeOffload())
}

func start(o Options, off offload) (*Engine, error) {
	e := &Engine{offload: off}
	cl := new(claims)
	for i := range o.Workers {
		w, err := newWorker(i, o.Logger, off, cl)
		if err != nil {
			for _, w := range e.workers {
				w.closeFDs()
			}
			return nil, err
		}
		e.workers = append(e.workers, w)
	}
	for _, w := range e.workers {
		go w.run()
	}
	return e, nil
}

// Workers is the number of workers.
func (e *Engine) Workers() int { return len(e.workers) }

// Close ends every session with relay.Drain and the workers, and waits.
// Callbacks must not call it.
func (e *Engine) Close() {
	e.setup.Lock() // no endpoint is half made
	e.mu.Lock()
	e.closed = true
	eps := slices.Clone(e.endpoints)
	e.mu.Unlock()
	e.setup.Unlock()
	for _, ep := range eps {
		if ep != nil {
			ep.Close(relay.Drain)
		}
	}
	for _, w := range e.workers {
		w.post(func(w *worker) { w.stop = true })
		<-w.done
	}
}

// register gives the endpoint its index.
func (e *Engine) register(ep *Endpoint) (gen uint32, ok bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return 0, false
	}
	e.gen = (e.gen + 1) & genMask
	for i, old := range e.endpoints {
		if old == nil {
			ep.index, e.endpoints[i] = uint32(i), ep
			return e.gen, true
		}
	}
	ep.index = uint32(len(e.endpoints))
	e.endpoints = append(e.endpoints, ep)
	return e.gen, true
}

func (e *Engine) forget(ep *Endpoint) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.endpoints[ep.index] = nil
}

// Sessions counts the live sessions, held ones included.
func (e *Engine) Sessions() int {
	n := 0
	for _, w := range e.workers {
		n += int(w.sessions.Load())
	}
	return n
}

// Panics counts the panics of callbacks that the workers have survived.
func (e *Engine) Panics() uint64 {
	n := uint64(0)
	for _, w := range e.workers {
		n += w.panics.Load()
	}
	return n
}

// flowChunk is how many sessions a worker describes at a time for Flows.
const flowChunk = 256

// Flows calls yield for each live session until it returns false. The Info is
// only valid during the call. Sessions that begin or end meanwhile may be
// missing. However slow yield is, no worker waits for it. Callbacks must not
// call Flows.
func (e *Engine) Flows(yield func(*relay.Info) bool) {
	infos := make([]relay.Info, 0, flowChunk)
	for _, w := range e.workers {
		for slot, more := uint32(1), true; more; {
			infos = infos[:0]
			if !w.call(func(w *worker) {
				for budget := 4096; slot < w.slab.next && len(infos) < flowChunk && budget > 0; budget-- {
					if w.slab.at(slot).flags&live != 0 {
						infos = infos[:len(infos)+1]
						w.describe(slot, w.conns[slot], &infos[len(infos)-1])
					}
					slot++
				}
				more = slot < w.slab.next
			}) {
				break
			}
			for i := range infos {
				if !yield(&infos[i]) {
					return
				}
			}
		}
	}
}

// Part appends to found the sessions among the slots [from, to) of worker n that
// are established and that want selects, and returns where the worker's slots end.
// The worker calls want. Callbacks must not call Part.
func (e *Engine) Part(n int, from, to uint32, want func(relay.ID) bool, found []relay.Info) (_ []relay.Info, end uint32) {
	e.workers[n].call(func(w *worker) {
		end = w.slab.next
		for slot := max(from, 1); slot < min(to, end); slot++ {
			s := w.slab.at(slot)
			if s.flags&live == 0 || !want(relay.MakeID(true, w.id, slot, s.gen)) {
				continue
			}
			conn := w.conns[slot]
			if conn != nil && conn.pending() {
				continue
			}
			found = append(found, relay.Info{})
			w.describe(slot, conn, &found[len(found)-1])
		}
	})
	return found, end
}

// on runs f on the worker of the session with that ID, if it lives.
func (e *Engine) on(id relay.ID, f func(w *worker, slot uint32)) (found bool) {
	if !id.UDP() || id.Worker() >= len(e.workers) {
		return false
	}
	ok := e.workers[id.Worker()].call(func(w *worker) {
		if w.slab.get(id.Slot(), id.Gen()) != nil {
			found = true
			f(w, id.Slot())
		}
	})
	return ok && found
}

// Flow is the session of that ID. Callbacks must not call it.
func (e *Engine) Flow(id relay.ID) (info relay.Info, ok bool) {
	ok = e.on(id, func(w *worker, slot uint32) { w.describe(slot, w.conns[slot], &info) })
	return info, ok
}

// CloseFlow ends one session and waits for it. Callbacks must not call it.
func (e *Engine) CloseFlow(id relay.ID, why relay.Reason) bool {
	return e.on(id, func(w *worker, slot uint32) { w.end(slot, why) })
}

// ClosePaths ends the sessions whose path match selects; it returns without
// waiting. The workers call match, concurrently.
func (e *Engine) ClosePaths(match func(*relay.Path) bool, why relay.Reason) {
	e.walk(func(w *worker, slot uint32) bool {
		if !match(w.pathOf(slot)) {
			return false
		}
		w.end(slot, why)
		return true
	})
}

// Rehome gives the sessions whose path match selects a new backend with their
// client's next datagram: Acceptor.Open is asked again then, see
// Opening.From. Held sessions, which have no backend here, stay as they
// are. It returns without waiting; the workers call match, concurrently.
func (e *Engine) Rehome(match func(*relay.Path) bool) {
	e.walk(func(w *worker, slot uint32) bool {
		if s := w.slab.at(slot); s.flags&held == 0 && match(w.pathOf(slot)) {
			s.flags |= rehome
		}
		return false
	})
}

func (e *Engine) walk(visit func(w *worker, slot uint32) bool) {
	for _, w := range e.workers {
		w.post(func(w *worker) { w.walks = append(w.walks, &walk{visit: visit}) })
	}
}

// pathOf is the path of a session, also of one that is being handed over.
func (w *worker) pathOf(slot uint32) *relay.Path {
	if c := w.conns[slot]; c != nil {
		return c.currentPath()
	}
	return w.paths[w.slab.at(slot).path].path
}
