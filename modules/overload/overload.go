// Package overload decides how freely the process takes new flows: at level 0
// everybody may come, at level 1 strangers have to pass a gate or show a ticket,
// at level 2 only those may who have a flow or had one in the last minute. The
// level follows how full the process is, or is set by an operator.
package overload

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

// Rule is what flows that the level keeps out are counted under.
const Rule = "overload"

// MaxLevel is the highest level.
const MaxLevel = 2

// Config says when the level rises and falls by itself. What is measured is the
// fullest of: connections and sessions, where the process has a limit of them,
// file descriptors, and memory.
type Config struct {
	// The percentage at which level 1 begins, from 1 to 100. Default: 80.
	Level1At *int `json:"level1_at,omitempty"`

	// The percentage at which level 2 begins, from 1 to 100 and not below
	// level1_at. Default: 95.
	Level2At *int `json:"level2_at,omitempty"`

	// By how many points it has to fall below that before the level ends, from 1
	// to 50. Default: 10.
	Release *int `json:"release,omitempty"`

	// For how long, so that the level does not flap. Default: 10s.
	Hold *caddy.Duration `json:"hold,omitempty"`
}

// Validate checks the numbers.
func (c *Config) Validate() error {
	s := c.settings()
	switch {
	case s.at[0] < 1 || s.at[0] > 100:
		return fmt.Errorf("level1_at: %d is not from 1 to 100", s.at[0])
	case s.at[1] < s.at[0] || s.at[1] > 100:
		return fmt.Errorf("level2_at: %d is not from level1_at, %d, to 100", s.at[1], s.at[0])
	case s.release < 1 || s.release > 50:
		return fmt.Errorf("release: %d is not from 1 to 50", s.release)
	case s.hold < 0:
		return fmt.Errorf("hold: %v is negative", s.hold)
	}
	return nil
}

// CaddyfileOptions are the options of overload. Syntax:
//
//	level1_at <percent>
//	level2_at <percent>
//	release   <points>
//	hold      <duration>
func (c *Config) CaddyfileOptions() caddyopt.Options {
	return caddyopt.Options{
		"level1_at": caddyopt.Ptr(&c.Level1At, caddyopt.Int),
		"level2_at": caddyopt.Ptr(&c.Level2At, caddyopt.Int),
		"release":   caddyopt.Ptr(&c.Release, caddyopt.Int),
		"hold":      caddyopt.Ptr(&c.Hold, caddyopt.Duration),
	}
}

type settings struct {
	at      [MaxLevel]int // percent
	release int
	hold    time.Duration
}

func (c *Config) settings() settings {
	return settings{
		at:      [MaxLevel]int{or(c.Level1At, 80), or(c.Level2At, 95)},
		release: or(c.Release, 10),
		hold:    time.Duration(or(c.Hold, caddy.Duration(10*time.Second))),
	}
}

func or[T any](p *T, def T) T {
	if p == nil {
		return def
	}
	return *p
}

// Reasons of a level.
const (
	None        = "none"
	Connections = "connections"
	Sessions    = "sessions"
	Descriptors = "descriptors"
	Memory      = "memory"
	Operator    = "operator"
)

var reasons = []string{None, Connections, Sessions, Descriptors, Memory, Operator}

// State is the level of the process, and why.
type State struct {
	Level  int       `json:"level"`
	Reason string    `json:"reason"` // of the level
	Since  time.Time `json:"since"`
	Use    int       `json:"use_percent"` // of what is fullest, when it was last measured
	Auto   bool      `json:"auto"`        // it follows what is measured
}

// process is the level of this process.
var process = &governor{state: State{Reason: None, Since: time.Now().UTC(), Auto: true}}

// Level is the level now. It is for every new flow.
func Level() int { return int(process.level.Load()) }

// Now is the state.
func Now() State {
	process.mu.Lock()
	defer process.mu.Unlock()
	return process.state
}

// Set sets the level, until Auto.
func Set(level int) { process.set(level, Operator, false) }

// Auto lets the level follow what is measured again, beginning at 0.
func Auto() { process.set(0, None, true) }

// governor keeps a level. Its one worker measures while a config is running
// that says when.
type governor struct {
	level atomic.Int32

	mu    sync.Mutex // guards what follows
	state State
	calm  time.Time // since when the use is below where the level ends; zero: it is not
	users []*Use    // of running configs, the newest last
	stop  context.CancelFunc
	done  chan struct{}
}

// Use is what a running config wants.
type Use struct {
	settings settings
	auto     bool
	limits   func() (connections, sessions int64)
	logger   *zap.Logger
}

// Start begins to follow a config: c is nil where the level is only for
// operators to set. The newest config counts. Stop ends it.
func Start(c *Config, limits func() (connections, sessions int64), logger *zap.Logger) *Use {
	u := &Use{limits: limits, logger: logger, auto: c != nil}
	if c != nil {
		u.settings = c.settings()
	}
	g := process
	g.mu.Lock()
	defer g.mu.Unlock()
	g.users = append(g.users, u)
	if len(g.users) == 1 {
		ctx, cancel := context.WithCancel(context.Background())
		g.stop, g.done = cancel, make(chan struct{})
		go g.run(ctx, g.done)
	}
	return u
}

// Stop undoes Start.
func (u *Use) Stop() {
	g := process
	g.mu.Lock()
	for i, other := range g.users {
		if other == u {
			g.users = append(g.users[:i:i], g.users[i+1:]...)
			break
		}
	}
	stop, done := g.stop, g.done
	last := len(g.users) == 0
	g.mu.Unlock()
	if last {
		stop()
		<-done
	}
}

const measureEvery = time.Second

func (g *governor) run(ctx context.Context, done chan struct{}) {
	defer close(done)
	tick := time.NewTicker(measureEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		g.mu.Lock()
		var u *Use
		if n := len(g.users); n > 0 {
			u = g.users[n-1]
		}
		auto := g.state.Auto
		g.mu.Unlock()
		if u == nil || !auto {
			continue
		}
		use, reason := 0, None
		if u.auto {
			use, reason = measure(u.limits())
		}
		g.follow(u, use, reason, time.Now())
	}
}

// follow moves the level to what has been measured.
func (g *governor) follow(u *Use, use int, reason string, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.state.Auto {
		return
	}
	g.state.Use = use
	var level int
	level, g.calm = u.settings.next(g.state.Level, use, g.calm, now)
	if !u.auto {
		level = 0
	}
	if level == g.state.Level {
		return
	}
	if level < g.state.Level && level == 0 {
		reason = None
	}
	u.logger.Warn("overload level has changed", zap.Int("now", level), zap.Int("before", g.state.Level), zap.String("reason", reason), zap.Int("use_percent", use))
	g.changeLocked(level, reason, now)
}

// next is the level that follows another one: it rises at once, and falls when
// the use has been well below for long enough.
func (s settings) next(level, use int, calm, now time.Time) (int, time.Time) {
	target := 0
	for i, at := range s.at {
		if use >= at {
			target = i + 1
		}
	}
	switch {
	case target >= level:
		return target, time.Time{}
	case use > s.at[level-1]-s.release:
		return level, time.Time{}
	case calm.IsZero():
		return level, now
	case now.Sub(calm) >= s.hold:
		return target, time.Time{}
	}
	return level, calm
}

func (g *governor) set(level int, reason string, auto bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.state.Auto = auto
	g.calm = time.Time{}
	g.changeLocked(level, reason, time.Now())
}

func (g *governor) changeLocked(level int, reason string, now time.Time) {
	if level != g.state.Level || reason != g.state.Reason {
		g.state.Level, g.state.Reason, g.state.Since = level, reason, now.UTC()
	}
	g.level.Store(int32(level))
}

// measure is how full the fullest is, in percent.
func measure(maxConns, maxSessions int64) (use int, reason string) {
	reason = None
	most := func(now, of float64, what string) {
		if of <= 0 {
			return
		}
		if p := int(math.Min(100, now/of*100)); p > use {
			use, reason = p, what
		}
	}
	conns, sessions := flow.Live()
	most(float64(conns), float64(maxConns), Connections)
	most(float64(sessions), float64(maxSessions), Sessions)
	var lim unix.Rlimit
	if n, err := metrics.OpenFiles(); err == nil && unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		most(float64(n), float64(lim.Cur), Descriptors)
	}
	if rss, err := resident(); err == nil {
		most(float64(rss), float64(memoryLimit(groupsFile, groupsDir)), Memory)
	}
	return use, reason
}

var (
	levelDesc  = metrics.Desc("overload_level", "How freely new flows are taken: 0 all, 1 strangers pass a gate, 2 none but those who come back.")
	sinceDesc  = metrics.Desc("overload_changed", "Unix time at which the overload level or its reason has changed.")
	reasonDesc = metrics.Desc("overload_reason", "1 for the reason of the overload level, 0 for the others.", "reason")
)

func init() {
	metrics.Add(metrics.Func{Descs: []*prometheus.Desc{levelDesc, sinceDesc, reasonDesc}, Send: func(ch chan<- prometheus.Metric) {
		s := Now()
		ch <- prometheus.MustNewConstMetric(levelDesc, prometheus.GaugeValue, float64(s.Level))
		ch <- prometheus.MustNewConstMetric(sinceDesc, prometheus.GaugeValue, float64(s.Since.Unix()))
		for _, r := range reasons {
			is := 0.0
			if r == s.Reason {
				is = 1
			}
			ch <- prometheus.MustNewConstMetric(reasonDesc, prometheus.GaugeValue, is, r)
		}
	}})
}
