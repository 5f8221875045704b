package proxy

import (
	"context"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// flushSessionLog is how long a config, or the process, waits at its end for the
// session log to be written.
const flushSessionLog = 2 * time.Second

// logSessions has the session log as this config wants it.
func (a *App) logSessions() { flow.UseLog(a.ConnectionLog, a.logger.Named(flow.LogName)) }

// followSessions logs live sessions while the config runs, if it wants that.
func (a *App) followSessions(e *listener.Engines) {
	if a.ConnectionLog == nil || a.ConnectionLog.Progress == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	a.endFollowing = func() {
		cancel()
		<-done
	}
	go func() {
		defer close(done)
		e.Progress(ctx, time.Duration(*a.ConnectionLog.Progress), flow.Logged, flow.Progress)
	}()
}

// leaveSessionLog hands the session log over when this config has stopped: to the
// one that runs, or at the end of the process to nobody. What was logged so far is
// in this config's log by then.
func (a *App) leaveSessionLog() {
	switch next := Running(); {
	case next != nil:
		next.logSessions()
	case !caddy.Exiting(): // flows may go on for the grace, when this log is closed
		flow.UseLog(a.ConnectionLog, processLog.Named(flow.LogName))
	}
	flow.FlushLog(flushSessionLog)
}

// endSessionLog ends the session log, for there is neither a config nor a flow.
func endSessionLog(logger *zap.Logger) {
	flow.FlushLog(flushSessionLog)
	if Running() == nil {
		flow.UseLog(nil, logger)
	}
}
