package proxy

import (
	"os"
	"os/signal"
	"sync"
	"syscall"

	"go.uber.org/zap"
)

// hangup makes SIGHUP reload the config file that the process was started
// with. Caddy does that on SIGUSR1 and only logs SIGHUP, so the one is turned
// into the other.
var hangup hangupSignal

type hangupSignal struct {
	mu   sync.Mutex
	refs int
	ch   chan os.Signal
	done chan struct{}
}

func (h *hangupSignal) acquire(logger *zap.Logger) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.refs++; h.refs > 1 {
		return
	}
	ch, done := make(chan os.Signal, 1), make(chan struct{})
	h.ch, h.done = ch, done
	signal.Notify(ch, syscall.SIGHUP)
	go func() {
		defer close(done)
		for range ch {
			logger.Info("reloading the config file on SIGHUP")
			if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
				logger.Error("asking for a reload failed", zap.Error(err))
			}
		}
	}()
}

func (h *hangupSignal) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.refs--; h.refs > 0 {
		return
	}
	signal.Stop(h.ch)
	close(h.ch)
	<-h.done
}
