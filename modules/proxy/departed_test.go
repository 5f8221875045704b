package proxy

import (
	"fmt"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

func TestDepartedSee(t *testing.T) {
	a, b, c := name{"pool", "a"}, name{"pool", "b"}, name{"listener", "a"}
	d, start := make(departed), time.Unix(1e9, 0)
	for i, step := range []struct {
		now    []name
		at     time.Duration
		forget []name
	}{
		{[]name{a, b, c}, 0, nil},
		{[]name{b, c}, time.Minute, nil},
		{[]name{b}, 2 * time.Minute, nil},
		{[]name{a, b}, 10*time.Minute + 59*time.Second, nil}, // a is back
		{[]name{b}, 11 * time.Minute, nil},
		{[]name{b}, 12 * time.Minute, []name{c}},
		{[]name{b}, 20 * time.Minute, nil},
		{[]name{b}, 21 * time.Minute, []name{a}},
		{nil, time.Hour, nil},
		{nil, 2 * time.Hour, []name{b}},
	} {
		now := make(map[name]bool)
		for _, n := range step.now {
			now[n] = true
		}
		forget := d.see(now, start.Add(step.at))
		if fmt.Sprint(forget) != fmt.Sprint(step.forget) {
			t.Errorf("step %d: forget %v, want %v", i, forget, step.forget)
		}
		for _, n := range forget {
			delete(d, n)
		}
	}
	if len(d) != 0 {
		t.Errorf("left: %v", d)
	}
}

// TestDepartedMost has more names leave at once than are kept.
func TestDepartedMost(t *testing.T) {
	d, start := make(departed), time.Unix(1e9, 0)
	now := make(map[name]bool)
	for i := range mostDeparted + 10 {
		now[name{"pool", fmt.Sprintf("%04d", i)}] = true
	}
	d.see(now, start)
	for n := range now {
		if n.value < "0010" {
			delete(now, n)
		}
	}
	if forget := d.see(now, start.Add(1)); forget != nil {
		t.Errorf("forget %v", forget)
	}
	forget := d.see(nil, start.Add(2))
	if len(forget) != 10 || forget[0].value != "0000" || forget[9].value != "0009" {
		t.Errorf("forget %v, want the ten that left first", forget)
	}
}

// TestNamesAreForgotten loads configs in which every name is new, and counts the
// series.
func TestNamesAreForgotten(t *testing.T) {
	load := func(n int) {
		t.Helper()
		config := fmt.Appendf(nil, `{"admin": {"disabled": true}, "apps": {"wayhouse": {
			"pools": {"p%d": {"targets": ["127.0.0.1:1"], "health": {"check": "none"}}},
			"resolvers": {"r%d": {"resolver": "http", "endpoint": "http://127.0.0.1:1/"}},
			"listeners": {"l%d": {"bind": ["tcp/127.0.0.1:0"], "routes": [
				{"match": [{"first_bytes": {"prefix": "hex:00"}}], "handle": [{"handler": "resolve", "resolver": "r%d"}, {"handler": "pool", "pool": "p%d"}]},
				{"handle": [{"handler": "pool", "pool": "p%d"}]}]}}}}}`, n, n, n, n, n, n)
		if err := caddy.Load(config, true); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
	})
	count := func() (series int) {
		t.Helper()
		reg := prometheus.NewRegistry()
		if err := metrics.Register(reg); err != nil {
			t.Fatal(err)
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			series += len(f.GetMetric())
		}
		return series
	}
	for n := range mostDeparted { // three names leave with each
		load(n)
	}
	full := count()
	for n := range 20 {
		load(mostDeparted + n)
	}
	// A load or two more or less of a kind with many series.
	if now := count(); now > full+full/50 {
		t.Errorf("%d series after %d loads, %d after 20 more", full, mostDeparted, now)
	}
}
