package console

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// moment makes a sample of an instance after so many seconds.
func moment(sec int) *sample {
	n := uint64(sec)
	s := &sample{
		at: time.Unix(1_000_000+int64(sec), 0), ready: "ready",
		listeners: []listenerView{
			{Name: "game", Configured: true, Connections: 2, Sessions: 3, ConnectionsTotal: 10 * n, SessionsTotal: 5 * n, BytesC2S: 1000 * n, BytesS2C: 3_000_000 * n, PacketsC2S: 7 * n, Dropped: 2 * n},
			{Name: "idle", Configured: true},
		},
		pools: []poolView{{Name: "lobby", Backends: []backendView{
			{Addr: "10.0.0.1:7", State: "enabled", Healthy: true, Active: 1, Total: 4 * n},
			{Addr: "10.0.0.2:7", State: "enabled", Healthy: true, Active: 9},
			{Addr: "10.0.0.3:7", State: "draining", Healthy: true},
			{Addr: "10.0.0.4:7", State: "enabled", LastError: "refused\x1b[2J"},
		}}},
	}
	for i := range 5 {
		u := uint64(i)
		s.sessions = append(s.sessions, sessionView{ID: fmt.Sprintf("u-%d", i), Peer: "203.0.113.7:1", AgeMS: int64(1000 * (10 - i + sec)), IdleMS: int64(100 * i), BytesC2S: u * n * 1000, BytesS2C: 100 - u})
	}
	return s
}

// TestTop looks at two moments, two seconds apart.
func TestTop(t *testing.T) {
	v := &view{name: "here\x1b[2J", interval: 2 * time.Second}
	v.take(moment(10), nil)
	v.take(moment(12), nil)
	page := strings.Join(v.lines(0, 0), "\n")
	for _, want := range []string{
		`here\u001b[2J`,
		"2 connections  3 sessions  15 new/s  1.00k B/s in  3.00M B/s out  7 packets/s  2 dropped/s",
		`(?m)^game +2 +3 +15 +1.00k +3.00M +7 +2$`,
		`(?m)^lobby +10.0.0.1:7 +enabled +healthy +1 +4 +-$`,
		`refused\\u001b\[2J`,
		`(?m)^u-4 .* 4.00k +0 +48.1k$`,
		"sorted by rate",
	} {
		if !strings.Contains(page, want) && !regexp.MustCompile(want).MatchString(page) {
			t.Errorf("there is no %s in\n%s", want, page)
		}
	}
	inOrder(t, page, "10.0.0.3:7", "10.0.0.4:7", "10.0.0.2:7", "10.0.0.1:7")
	inOrder(t, page, "u-4", "u-3", "u-2", "u-1", "u-0")
	for by, first := range map[order]string{byTotal: "u-4", byAge: "u-0", byIdle: "u-4"} {
		if got := busiest(v.before, v.now, by)[0].ID; got != first {
			t.Errorf("the first by %s is %s, want %s", orderNames[by], got, first)
		}
	}
}

func inOrder(t *testing.T, page string, words ...string) {
	t.Helper()
	rest := page
	for _, w := range words {
		_, after, ok := strings.Cut(rest, w)
		if !ok {
			t.Fatalf("%s is not where it should be, want %q in\n%s", w, words, page)
		}
		rest = after
	}
}

// TestTopFits draws on terminals of every size.
func TestTopFits(t *testing.T) {
	v := &view{name: "localhost:2019", interval: 2 * time.Second, colours: true, keys: true}
	v.take(moment(10), nil)
	v.take(moment(12), nil)
	for i := range 200 {
		v.now.sessions = append(v.now.sessions, sessionView{ID: fmt.Sprintf("u-%d", 100+i), Peer: "203.0.113.7:1"})
	}
	escape := regexp.MustCompile("\x1b\\[[0-9]*m")
	for width := 1; width < 150; width += 7 {
		for height := 1; height < 60; height++ {
			lines := v.lines(width, height)
			if len(lines) > height {
				t.Fatalf("%d lines on %d", len(lines), height)
			}
			for _, l := range lines {
				bare := escape.ReplaceAllString(l, "")
				if utf8.RuneCountInString(bare) > width || strings.ContainsRune(bare, '\x1b') {
					t.Fatalf("%q on a width of %d", l, width)
				}
				if strings.Count(l, plain)*2 != strings.Count(l, "\x1b") {
					t.Fatalf("%q leaves its colour on", l)
				}
			}
		}
	}
	if page := strings.Join(v.lines(150, 24), "\n"); !strings.Contains(page, "q quit") || !strings.Contains(page, "of 205)") {
		t.Errorf("on 24 lines it is\n%s", page)
	}
}

// TestTopSees has another process behind the address, no first sample, sessions
// that have just begun, and an instance that does not answer.
func TestTopSees(t *testing.T) {
	v := &view{interval: time.Second}
	v.take(moment(10), nil)
	if page := strings.Join(v.lines(0, 0), "\n"); !strings.Contains(page, "0 new/s") {
		t.Errorf("without a sample before:\n%s", page)
	}
	v.take(moment(1), nil)
	v.now.at = v.before.at.Add(time.Second)
	if page := strings.Join(v.lines(0, 0), "\n"); !strings.Contains(page, " 0 new/s  0 B/s in  0 B/s out") {
		t.Errorf("counters that have fallen:\n%s", page)
	}
	v.now.sessions = append(v.now.sessions, sessionView{ID: "u-new", AgeMS: 500, BytesC2S: 70_000}, sessionView{ID: "u-old", AgeMS: 5000, BytesC2S: 80_000})
	if b := busiest(v.before, v.now, byRate)[0]; b.ID != "u-new" || b.c2s != 70_000 {
		t.Errorf("the busiest is %s with %v", b.ID, b.c2s)
	}
	v.take(nil, errors.New("no route\nto host"))
	if page := strings.Join(v.lines(0, 0), "\n"); !strings.Contains(page, `not answered: no route\u000ato host`) || !strings.Contains(page, "game") {
		t.Errorf("an instance that does not answer:\n%s", page)
	}
}

func TestKeys(t *testing.T) {
	v := &view{interval: 2 * time.Second}
	for _, k := range "sspp +-?x" {
		if !v.press(byte(k)) {
			t.Errorf("%c ends it", k)
		}
	}
	if v.by != byAge || !v.paused || v.interval != 2*time.Second {
		t.Errorf("after the keys: %+v", v)
	}
	for range 20 {
		v.press('+')
	}
	if v.interval != longestTop {
		t.Errorf("the longest interval is %v", v.interval)
	}
	for range 20 {
		v.press('-')
	}
	if v.interval != shortestTop {
		t.Errorf("the shortest interval is %v", v.interval)
	}
	for _, k := range []byte{'q', 'Q', 3, 4} {
		if v.press(k) {
			t.Errorf("%q does not end it", k)
		}
	}
}

// TestEscapes wants keys that send several bytes to be none of ours.
func TestEscapes(t *testing.T) {
	for in, want := range map[string]string{
		"q": "q", "\x1b[Ap": "p", "\x1bOPs": "s", "\x1b[1;5Cq": "q", "\x1b[15~p\x1b[": "p", "\x1b\x1b[Bs": "s", "\x1bq": "q", "[A": "[A",
	} {
		var esc escapes
		got := ""
		for i := range len(in) {
			if !esc.has(in[i]) {
				got += in[i : i+1]
			}
		}
		if got != want {
			t.Errorf("of %q the keys are %q, want %q", in, got, want)
		}
	}
}
