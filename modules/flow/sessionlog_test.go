package flow

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

func TestLogConfig(t *testing.T) {
	f := func(v float64) *float64 { return &v }
	d := func(v time.Duration) *caddy.Duration { return (*caddy.Duration)(&v) }
	for name, tc := range map[string]struct {
		c    LogConfig
		want string
	}{
		"empty":         {},
		"all":           {c: LogConfig{Sample: f(1), Open: true, Progress: d(time.Second)}},
		"a share":       {c: LogConfig{Sample: f(0.001)}},
		"nothing":       {LogConfig{Sample: f(0)}, "sample: 0 is not above 0 and up to 1"},
		"less":          {LogConfig{Sample: f(-1)}, "sample: -1 is not"},
		"percent":       {LogConfig{Sample: f(5)}, "sample: 5 is not"},
		"too often":     {LogConfig{Progress: d(999 * time.Millisecond)}, "progress: 999ms is below 1s"},
		"no time":       {LogConfig{Progress: d(0)}, "progress: 0s is below 1s"},
		"negative time": {LogConfig{Progress: d(-time.Minute)}, "progress: -1m0s is below 1s"},
	} {
		t.Run(name, func(t *testing.T) {
			switch err := tc.c.Validate(); {
			case tc.want == "" && err != nil:
				t.Error(err)
			case tc.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.want)):
				t.Errorf("%v, want %s", err, tc.want)
			}
		})
	}
}

// sink is a log that keeps what is written, and can be made to wait or to panic.
type sink struct {
	zapcore.Encoder

	mu    sync.Mutex // held while it is stalled
	lines []string
	times []time.Time
	panic bool
	light bool // keep times alone
}

func (s *sink) Enabled(zapcore.Level) bool        { return true }
func (s *sink) With([]zapcore.Field) zapcore.Core { return s }
func (s *sink) Sync() error                       { return nil }
func (s *sink) Check(e zapcore.Entry, ce *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	return ce.AddCore(e, s)
}

func (s *sink) Write(e zapcore.Entry, f []zapcore.Field) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.panic {
		s.panic = false
		panic("of the test's log")
	}
	s.times = append(s.times, e.Time)
	if s.light {
		return nil
	}
	b, err := s.EncodeEntry(e, f)
	s.lines = append(s.lines, b.String())
	return err
}

// use has the session log written to a sink, until the test ends.
func use(t *testing.T, c *LogConfig) *sink {
	t.Helper()
	s := &sink{Encoder: zapcore.NewJSONEncoder(zapcore.EncoderConfig{MessageKey: "msg", NameKey: "logger"})}
	UseLog(c, zap.New(s).Named(LogName))
	t.Cleanup(func() {
		FlushLog(time.Minute)
		UseLog(nil, zap.NewNop())
	})
	return s
}

func (s *sink) all() []string {
	FlushLog(time.Minute)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lines
}

func closing(l *Listener, id relay.ID) {
	client := netip.MustParseAddrPort("192.0.2.1:7")
	l.Open(id.UDP(), client.Addr(), Bounds{})
	l.Closed(&relay.Info{ID: id, Client: client}, relay.ClientClose)
}

// TestSample logs a share of sessions, each with all of its records or none.
func TestSample(t *testing.T) {
	const n, share = 5000, 0.1
	sample, every := share, caddy.Duration(time.Minute)
	s := use(t, &LogConfig{Sample: &sample, Open: true, Progress: &every})
	l := ListenerOf(t.Name())
	for i := range uint32(n) {
		id := relay.MakeID(i%2 == 0, int(i%3), i, i/7)
		l.Opened(&relay.Info{ID: id})
		Progress(&relay.Info{ID: id, Path: &relay.Path{Listener: l.Name}})
		closing(l, id)
	}
	seen := make(map[string]map[string]int)
	for _, line := range s.all() {
		var r struct{ Session, Event string }
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if seen[r.Session] == nil {
			seen[r.Session] = make(map[string]int)
		}
		seen[r.Session][r.Event]++
	}
	for id, events := range seen {
		if fmt.Sprint(events) != "map[session_close:1 session_open:1 session_progress:1]" {
			t.Errorf("%s has %v", id, events)
		}
	}
	if got := float64(len(seen)) / n; got < share*0.8 || got > share*1.2 {
		t.Errorf("%v of the sessions are logged, want %v", got, share)
	}
}

// TestLogOff logs nothing without a config, and only the ends with an empty one.
func TestLogOff(t *testing.T) {
	l := ListenerOf(t.Name())
	s := use(t, nil)
	id := relay.MakeID(true, 0, 1, 1)
	l.Opened(&relay.Info{ID: id})
	closing(l, id)
	if l.LogRefused("acl", netip.AddrPort{}, netip.AddrPort{}, true, 0) || Logged(id) || len(s.all()) > 0 {
		t.Errorf("logged: %v", s.all())
	}
	s = use(t, new(LogConfig))
	l.Opened(&relay.Info{ID: id})
	Progress(&relay.Info{ID: id, Path: noPath})
	closing(l, id)
	if got := s.all(); len(got) != 1 || !strings.Contains(got[0], `"event":"session_close"`) || !strings.Contains(got[0], `"logger":"log.sessions"`) {
		t.Errorf("logged: %v", got)
	}
}

// TestLogStalls has a log that takes nothing for a while. Who logs does not wait,
// what is too much is counted, and the rest is written when it goes on, with the
// time at which it happened.
func TestLogStalls(t *testing.T) {
	const more = 1000
	s, l := use(t, new(LogConfig)), ListenerOf(t.Name())
	dropped := testutil.ToFloat64(logDropped)
	s.mu.Lock()
	s.light = true
	for i := range uint32(maxQueued + 2*logChunk + more) {
		closing(l, relay.MakeID(true, 0, i, 1))
	}
	filled := time.Now()
	lost := testutil.ToFloat64(logDropped) - dropped
	s.mu.Unlock()
	s.all()
	if got := len(s.times); float64(got)+lost != maxQueued+2*logChunk+more || lost < more || lost > more+2*logChunk {
		t.Errorf("%d written, %v lost", got, lost)
	}
	if last := s.times[len(s.times)-1]; last.After(filled) {
		t.Errorf("the last is of %v, after %v", last, filled)
	}
}

// TestLogPanics has an encoder that panics once: that record is lost.
func TestLogPanics(t *testing.T) {
	s, l := use(t, new(LogConfig)), ListenerOf(t.Name())
	dropped := testutil.ToFloat64(logDropped)
	s.mu.Lock()
	s.panic = true
	for i := range uint32(3) {
		closing(l, relay.MakeID(true, 0, i, 1))
	}
	s.mu.Unlock()
	if got, lost := len(s.all()), testutil.ToFloat64(logDropped)-dropped; got != 2 || lost != 1 {
		t.Errorf("%d written, %v lost", got, lost)
	}
}

// TestLogFollowsUse writes to the log of the config that runs.
func TestLogFollowsUse(t *testing.T) {
	l := ListenerOf(t.Name())
	first := use(t, new(LogConfig))
	closing(l, 1)
	one := len(first.all())
	second := use(t, new(LogConfig))
	closing(l, 2)
	if two := len(second.all()); one != 1 || two != 1 || len(first.all()) != 1 {
		t.Errorf("%d in the first, then %d in the second and %d in the first", one, two, len(first.all()))
	}
}

// TestSides has what a record says of who has ended a session.
func TestSides(t *testing.T) {
	for name, tc := range map[string]struct {
		why  relay.Reason
		info relay.Info
		want string
	}{
		"client":               {relay.ClientClose, relay.Info{}, sideClient},
		"backend":              {relay.BackendClose, relay.Info{}, sideBackend},
		"backend down":         {relay.BackendDown, relay.Info{}, sideBackend},
		"idle":                 {relay.IdleTimeout, relay.Info{}, sideProxy},
		"operator":             {relay.Admin, relay.Info{}, sideProxy},
		"refused":              {relay.Error, relay.Info{Tries: 2, Failure: relay.Refused}, sideBackend},
		"out of ports":         {relay.Error, relay.Info{Tries: 1, Failure: relay.Shortage}, sideProxy},
		"no backend":           {relay.Error, relay.Info{}, sideProxy},
		"drained while trying": {relay.Drain, relay.Info{Tries: 1, Failure: relay.Timeout}, sideProxy},
	} {
		if got := (&record{why: tc.why, info: tc.info}).side(); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
}

// TestEscapes has names with what would break a line in all that is not ours.
func TestEscapes(t *testing.T) {
	const bad = "a\"}\n{\x00\x1b[2J\u2028\xff"
	s := use(t, new(LogConfig))
	l := ListenerOf(t.Name())
	client := netip.MustParseAddrPort("[fe80::1%eth0]:1")
	l.Open(false, client.Addr(), Bounds{})
	l.GaveUp(&relay.Info{Client: client, Path: &relay.Path{Resolver: bad, Pool: bad}}, relay.Error)
	got := s.all()
	var r struct{ Pool, Resolver string }
	if len(got) != 1 || strings.Count(got[0], "\n") != 1 || json.Unmarshal([]byte(got[0]), &r) != nil {
		t.Fatalf("%q", got)
	}
	if want := strings.ToValidUTF8(bad, "\ufffd"); r.Pool != want || r.Resolver != want {
		t.Errorf("%q, want %q", r.Pool, want)
	}
	for _, c := range got[0][:len(got[0])-1] {
		if c < ' ' {
			t.Errorf("a control character in %q", got[0])
		}
	}
}

func BenchmarkLogClosed(b *testing.B) {
	UseLog(new(LogConfig), zap.NewNop())
	defer UseLog(nil, zap.NewNop())
	l := ListenerOf(b.Name())
	info := &relay.Info{ID: 7}
	b.ReportAllocs()
	for b.Loop() {
		l.logClosed(info, relay.ClientClose)
	}
}
