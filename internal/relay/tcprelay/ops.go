package tcprelay

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// wake is what is written to a worker's eventfd. Nobody reads that: it is
// watched for edges, and every write is one until the sum of all overflows,
// which for ones is never.
var wake = binary.NativeEndian.AppendUint64(nil, 1)

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
		unix.Write(int(w.wakefd), wake)
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
