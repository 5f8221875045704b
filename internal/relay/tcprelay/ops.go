package tcprelay

import "golang.org/x/sys/unix"

// op is a command to a worker: a flow to take, or something to do.
type op struct {
	flow Flow
	do   func()
}

// post queues o and wakes the worker. It reports false when the worker has
// ended or is ending.
func (w *worker) post(o op) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return false
	}
	w.ops = append(w.ops, o)
	if len(w.ops) == 1 {
		one := [8]byte{0: 1, 7: 1} // not zero in either byte order
		unix.Write(int(w.wakefd), one[:])
	}
	return true
}

// call runs do on the worker and waits for it. It must not be called from a
// worker.
func (w *worker) call(do func()) bool {
	ran := make(chan struct{})
	if !w.post(op{do: func() { defer close(ran); do() }}) {
		return false
	}
	<-ran
	return true
}

func (w *worker) runOps() {
	w.mu.Lock()
	w.batch, w.ops = w.ops, w.batch[:0]
	w.mu.Unlock()
	w.batchAt = 0
	w.finishOps()
}

// finishOps runs each op of the batch; one that panics does not take the
// others with it.
func (w *worker) finishOps() {
	ok := false
	defer func() {
		if !ok {
			w.contain(recover())
			w.finishOps()
		}
	}()
	for w.batchAt < len(w.batch) {
		o := w.batch[w.batchAt]
		w.batch[w.batchAt] = op{}
		w.batchAt++
		w.current = handle{}
		if o.do != nil {
			o.do()
		} else {
			w.adopt(o.flow)
		}
	}
	ok = true
}
