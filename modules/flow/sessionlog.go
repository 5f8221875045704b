package flow

import (
	"fmt"
	"math"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The session log has a record of every connection and UDP session that has
// ended, and if wanted of those that begin or go on. A record is a value that the
// worker leaves in a queue; a goroutine writes it to Caddy's log. See logqueue.go.

// LogName is the name of the session log's logger below the app's.
const LogName = "log.sessions"

// LogConfig says what the session log has. It is written by the logger
// wayhouse.log.sessions, for which Caddy's logging has outputs, formats and
// rotation.
type LogConfig struct {
	// The share of sessions that are logged, above 0 and up to 1. A session is
	// logged with all of its records or with none. Default: 1, all of them.
	Sample *float64 `json:"sample,omitempty"`

	// Log sessions that have reached their backend, too: session_open.
	// Default: false.
	Open bool `json:"open,omitempty"`

	// How often live sessions are logged, too: session_progress. At least 1s.
	// Default: never.
	Progress *caddy.Duration `json:"progress,omitempty"`
}

// minProgress keeps the log from being most of the work.
const minProgress = time.Second

// Validate checks the numbers.
func (c *LogConfig) Validate() error {
	if s := c.Sample; s != nil && !(*s > 0 && *s <= 1) {
		return fmt.Errorf("sample: %v is not above 0 and up to 1; to log nothing leave connection_log out", *s)
	}
	if p := c.Progress; p != nil && time.Duration(*p) < minProgress {
		return fmt.Errorf("progress: %v is below %v; leave it out for no records of live sessions", time.Duration(*p), minProgress)
	}
	return nil
}

// UnmarshalCaddyfile sets up the log from Caddyfile tokens. Syntax:
//
//	connection_log {
//		sample   <share>
//		open
//		progress <duration>
//	}
func (c *LogConfig) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return caddyopt.Block(d, caddyopt.Options{
		"sample":   caddyopt.Ptr(&c.Sample, caddyopt.Float),
		"open":     caddyopt.Word(&c.Open),
		"progress": caddyopt.Ptr(&c.Progress, caddyopt.Duration),
	})
}

// logSettings are a LogConfig in use.
type logSettings struct {
	below    uint64 // sessions whose mixed ID is less are logged
	open     bool
	progress time.Duration
}

func (c *LogConfig) settings() *logSettings {
	s := &logSettings{below: math.MaxUint64, open: c.Open}
	if c.Sample != nil && *c.Sample < 1 {
		s.below = uint64(*c.Sample * math.MaxUint64)
	}
	if c.Progress != nil {
		s.progress = time.Duration(*c.Progress)
	}
	return s
}

// has reports whether a session is logged: by its ID, so that it is with all of
// its records.
func (s *logSettings) has(id relay.ID) bool {
	return s.below == math.MaxUint64 || mix(uint64(id)) < s.below
}

// mix spreads IDs, which differ in few bits, over all numbers.
func mix(n uint64) uint64 {
	n += 0x9e3779b97f4a7c15
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// sessions is the session log of the process. The config that runs says what it
// has and where it is written.
var sessions struct {
	set    atomic.Pointer[logSettings] // nil: off
	logger atomic.Pointer[zap.Logger]
	queue  logQueue
}

// UseLog has the session log as a config wants it, nil for none, from here on.
// What is still queued is written to logger too.
func UseLog(c *LogConfig, logger *zap.Logger) {
	sessions.logger.Store(logger)
	if c == nil {
		sessions.set.Store(nil)
		return
	}
	sessions.set.Store(c.settings())
}

// FlushLog waits until what has been logged so far is written, for at most d.
func FlushLog(d time.Duration) { sessions.queue.flush(d) }

// Logged reports whether a live session is one whose progress is logged.
func Logged(id relay.ID) bool {
	s := sessions.set.Load()
	return s != nil && s.progress > 0 && s.has(id)
}

// LogsOpen reports whether a session is one whose beginning is logged.
func LogsOpen(id relay.ID) bool {
	s := sessions.set.Load()
	return s != nil && s.open && s.has(id)
}

// Opened hears of a flow that has reached its backend, or a server on the
// listener's network. It is called by the engines' workers.
func (l *Listener) Opened(i *relay.Info) {
	if LogsOpen(i.ID) {
		sessions.queue.put(record{event: sessionOpen, listener: l.Name, info: *i})
	}
}

// Progress logs a flow that is Logged.
func Progress(i *relay.Info) {
	if i.Path != nil && Logged(i.ID) {
		sessions.queue.put(record{event: sessionProgress, listener: i.Path.Listener, info: *i})
	}
}

// logClosed logs the end of a flow.
func (l *Listener) logClosed(last *relay.Info, why relay.Reason) {
	if s := sessions.set.Load(); s != nil && s.has(last.ID) {
		sessions.queue.put(record{event: sessionClose, listener: l.Name, info: *last, why: why})
	}
}

// LogRefused logs a flow that a rule has kept out, with how many were not logged
// since the last that was. It reports false while the session log is off.
func (l *Listener) LogRefused(rule string, client, local netip.AddrPort, udp bool, suppressed int64) bool {
	if sessions.set.Load() == nil {
		return false
	}
	sessions.queue.put(record{
		event: refused, listener: l.Name, rule: rule, suppressed: suppressed,
		info: relay.Info{ID: relay.MakeID(udp, 0, 0, 0), Client: client, Local: local},
	})
	return true
}
