package proxy

import (
	"slices"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// processLog is for what outlives configs, such as the engines: it writes where
// the running config wants its log. The log of the config that an engine was
// started with may be closed by now.
var processLog = zap.New(runningCore{}).Named("wayhouse")

// runningCore hands everything to the core of the running config's logger.
type runningCore struct{ fields []zapcore.Field }

func (runningCore) core() zapcore.Core {
	if app := Running(); app != nil {
		return app.logger.Core()
	}
	return caddy.Log().Core()
}

// Enabled implements zapcore.LevelEnabler.
func (c runningCore) Enabled(l zapcore.Level) bool { return c.core().Enabled(l) }

// With implements zapcore.Core.
func (c runningCore) With(fields []zapcore.Field) zapcore.Core {
	return runningCore{slices.Concat(c.fields, fields)}
}

// Check implements zapcore.Core.
func (c runningCore) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if c.Enabled(e.Level) {
		return ce.AddCore(e, c)
	}
	return ce
}

// Write implements zapcore.Core.
func (c runningCore) Write(e zapcore.Entry, fields []zapcore.Field) error {
	if ce := c.core().Check(e, nil); ce != nil {
		ce.Write(slices.Concat(c.fields, fields)...)
	}
	return nil
}

// Sync implements zapcore.Core.
func (c runningCore) Sync() error { return c.core().Sync() }
