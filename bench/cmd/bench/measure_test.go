package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/bench/load"
)

func newHarness(t *testing.T) *harness {
	t.Helper()
	dir := t.TempDir()
	bin, err := build(t.Context(), dir, "load", "./bench/cmd/load")
	if err != nil {
		t.Fatal(err)
	}
	h := &harness{dir: dir, load: bin, bins: map[string]string{}}
	files, routines := openFiles(t), runtime.NumGoroutine()
	t.Cleanup(func() {
		if left := h.children(t); len(left) > 0 {
			t.Errorf("processes are left: %v", left)
		}
		if n := openFiles(t); n != files {
			t.Errorf("%d files are open at the end, %d before", n, files)
		}
		for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > routines; runtime.Gosched() {
			if time.Now().After(end) {
				t.Errorf("%d goroutines at the end, %d before", runtime.NumGoroutine(), routines)
				break
			}
		}
	})
	return h
}

func openFiles(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// children are the processes that run the harness's load binary.
func (h *harness) children(t *testing.T) (left []string) {
	t.Helper()
	exes, err := filepath.Glob("/proc/[0-9]*/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, exe := range exes {
		if to, _ := os.Readlink(exe); strings.HasPrefix(to, h.dir) {
			left = append(left, exe)
		}
	}
	return left
}

// startTestBackend starts a backend process on a free port.
func startTestBackend(t *testing.T, h *harness) (port uint16) {
	t.Helper()
	ports, err := freePorts(1)
	if err != nil {
		t.Fatal(err)
	}
	c, err := h.startBackend(t.Context(), ports[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.stop)
	return ports[0]
}

func TestJobInAProcess(t *testing.T) {
	h := newHarness(t)
	job := load.Job{Kind: "udp", Target: loopback(1, startTestBackend(t, h)), Sessions: 10, Size: 64, Rate: 1000, Window: 50 * time.Millisecond}
	var points []string
	res, err := h.run(t.Context(), job, func(p load.Point) error { points = append(points, p.Name); return nil })
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(points, []string{"start", "end"}) || res.Units == 0 || res.Lost != 0 {
		t.Errorf("points %v, result %+v", points, res)
	}
}

func TestJobFails(t *testing.T) {
	h := newHarness(t)
	errMeasure := errors.New("cannot measure")
	good := load.Job{Kind: "udp", Target: loopback(1, startTestBackend(t, h)), Sessions: 1, Size: 64, Rate: 10, Window: time.Hour}
	for name, tc := range map[string]struct {
		job  load.Job
		at   func(context.CancelCauseFunc) error
		want string
	}{
		"in the generator": {load.Job{Kind: "no-such", Target: good.Target}, nil, `there is no job "no-such"`},
		"in measuring":     {good, func(context.CancelCauseFunc) error { return errMeasure }, errMeasure.Error()},
		"by its deadline": {good, func(cancel context.CancelCauseFunc) error {
			cancel(errors.New("took too long"))
			return nil
		}, "took too long"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			_, err := h.run(ctx, tc.job, func(load.Point) error { return tc.at(cancel) })
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %s", err, tc.want)
			}
		})
	}
}
