package overload

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// TestNext plays the use of what is fullest against the clock.
func TestNext(t *testing.T) {
	s := new(Config).settings() // 80, 95, 10 points, 10s
	now := time.Now()
	level, calm := 0, time.Time{}
	for i, step := range []struct {
		after time.Duration
		use   int
		want  int
	}{
		{0, 79, 0}, {0, 80, 1}, {0, 94, 1}, {0, 95, 2}, {time.Hour, 90, 2}, // not well below
		{0, 85, 2}, {9 * time.Second, 85, 2}, {0, 86, 2}, // calm no more
		{time.Second, 85, 2}, {10 * time.Second, 85, 1}, // well below for long enough
		{0, 71, 1}, {time.Hour, 71, 1}, {0, 70, 1}, {10 * time.Second, 70, 0},
		{0, 100, 2}, {0, 10, 2}, {10 * time.Second, 10, 0}, // from the highest to none
	} {
		now = now.Add(step.after)
		if level, calm = s.next(level, step.use, calm, now); level != step.want {
			t.Fatalf("step %d: level %d, want %d", i, level, step.want)
		}
	}
}

func TestMistakes(t *testing.T) {
	n := func(i int) *int { return &i }
	minus := caddy.Duration(-1)
	for want, c := range map[string]*Config{
		"":                           {},
		"level1_at: 0 is not from 1": {Level1At: n(0)},
		"level1_at: 101 is not":      {Level1At: n(101)},
		"level2_at: 50 is not from level1_at, 80, to 100": {Level2At: n(50)},
		"release: 0 is not from 1 to 50":                  {Release: n(0)},
		"hold: -1ns is negative":                          {Hold: &minus},
	} {
		if err := c.Validate(); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestMeasure wants limits to be found full, and memory and descriptors to be
// found at all.
func TestMeasure(t *testing.T) {
	use, reason := measure(0, 0)
	if use < 0 || use > 100 || reason != None && reason != Memory && reason != Descriptors {
		t.Errorf("%d percent of %s", use, reason)
	}
	if n, err := resident(); err != nil || n < 1<<20 || memoryLimit(groupsFile, groupsDir) < n {
		t.Errorf("%d bytes of %d, %v", n, memoryLimit(groupsFile, groupsDir), err)
	}
}

// TestRecord reads what is logged of a change as JSON, in which "level" is that
// of the record.
func TestRecord(t *testing.T) {
	var b bytes.Buffer
	logger := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(&b), zap.InfoLevel))
	g := &governor{state: State{Reason: None, Auto: true}}
	g.follow(&Use{settings: new(Config).settings(), auto: true, logger: logger}, 97, Memory, time.Now())
	var got map[string]any
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatalf("%s: %v", b.Bytes(), err)
	}
	for key, want := range map[string]any{"level": "warn", "now": 2.0, "before": 0.0, "reason": Memory, "use_percent": 97.0} {
		if got[key] != want {
			t.Errorf("%s is %v, want %v, in %s", key, got[key], want, b.Bytes())
		}
	}
}
