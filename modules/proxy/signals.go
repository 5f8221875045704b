package proxy

import (
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"

	"go.uber.org/zap"
)

// signals makes SIGHUP reload the config file that the process was started
// with, and counts the signals that end it. Caddy reloads on SIGUSR1 and only
// logs SIGHUP, so the one is turned into the other; and it forgets the file when
// a config is pushed, so that is told again. Of SIGTERM and SIGINT it notices no
// second while it is stopping.
var signals signalWatch

type signalWatch struct {
	ends atomic.Int32 // SIGTERM and SIGINT so far

	mu   sync.Mutex
	refs int
	ch   chan os.Signal
	done chan struct{}
}

// acquire begins to watch; every running config holds a reference.
func (w *signalWatch) acquire() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refs++; w.refs > 1 {
		return
	}
	takeSignals()
	ch, done := make(chan os.Signal, 4), make(chan struct{})
	w.ch, w.done = ch, done
	signal.Notify(ch, syscall.SIGHUP, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		defer close(done)
		for sig := range ch {
			if sig != syscall.SIGHUP {
				w.ends.Add(1)
				continue
			}
			processLog.Info("reloading the config file on SIGHUP")
			takeSignals()
			if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
				processLog.Error("asking for a reload failed", zap.Error(err))
			}
		}
	}()
}

func (w *signalWatch) release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.refs--; w.refs > 0 {
		return
	}
	signal.Stop(w.ch)
	close(w.ch)
	<-w.done
}
