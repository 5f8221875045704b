package tcprelay

import (
	"errors"
	"fmt"
	"sync"

	"go.uber.org/zap"
)

// ErrClosed says that the engine has been closed.
var ErrClosed = errors.New("tcp engine closed")

// Engine runs the workers: one goroutine each, started by New and ended by
// Close.
type Engine struct {
	workers []*worker
	closing sync.Once
}

// New starts an engine.
func New(o Options) (*Engine, error) {
	if o.Workers < 1 || o.Workers > 127 {
		return nil, fmt.Errorf("workers: %d is not from 1 to 127", o.Workers)
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	e := &Engine{}
	for i := range o.Workers {
		w, err := newWorker(i, o)
		if err != nil {
			e.Close()
			return nil, err
		}
		e.workers = append(e.workers, w)
		go w.run()
	}
	return e, nil
}

// Workers is the number of workers.
func (e *Engine) Workers() int { return len(e.workers) }

// Close ends every connection with relay.Drain and the workers, and waits. It
// must not be called from a worker.
func (e *Engine) Close() {
	e.closing.Do(func() {
		for _, w := range e.workers {
			w.post(op{do: func() { w.stopping = true }})
		}
	})
	for _, w := range e.workers {
		<-w.exited
	}
}

// Conns counts the live connections, connecting ones included.
func (e *Engine) Conns() int {
	n := int64(0)
	for _, w := range e.workers {
		n += w.conns.Load()
	}
	return int(n)
}

// Forward hands a connection to the worker that has the fewest. After an error
// the caller still owns f.FD, and neither Done nor the dialer has been called.
// It may be called from any goroutine, a worker's included.
func (e *Engine) Forward(f Flow) error {
	best := e.workers[0]
	for _, w := range e.workers[1:] {
		if w.conns.Load() < best.conns.Load() {
			best = w
		}
	}
	if !best.post(op{flow: f}) {
		return ErrClosed
	}
	return nil
}
