package proc

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// start runs a shell script that says "ready" and waits until it has.
func start(t *testing.T, script string) (*Proc, *bufio.Reader) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p, err := Start(Command{Argv: []string{"/bin/sh", "-c", script}, Stdout: w})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(time.Second); r.Close() })
	r.SetReadDeadline(time.Now().Add(10 * time.Second))
	out := bufio.NewReader(r)
	if line, err := out.ReadString('\n'); line != "ready\n" {
		t.Fatalf("script says %q, %v", line, err)
	}
	return p, out
}

func TestChildIsPinnedAndParentIsNot(t *testing.T) {
	p, out := start(t, "echo ready; grep Cpus_allowed_list /proc/self/status")
	line, _ := out.ReadString('\n')
	if f := strings.Fields(line); len(f) != 2 || f[1] != "0" {
		t.Errorf("child may use %q, want CPU 0", line)
	}
	<-p.Done()
	b, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		t.Fatal(err)
	}
	own, _ := os.ReadFile("/proc/1/status")
	if allowed(string(b)) != allowed(string(own)) {
		t.Errorf("this thread may use %q afterwards, want %q", allowed(string(b)), allowed(string(own)))
	}
}

func allowed(status string) string {
	for line := range strings.Lines(status) {
		if v, ok := strings.CutPrefix(line, "Cpus_allowed_list:"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func TestFiguresIncludeDescendants(t *testing.T) {
	p, _ := start(t, "(i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo ready; sleep 100) & wait")
	if n := len(p.pids()); n < 2 {
		t.Fatalf("%d processes, want the shell and its child", n)
	}
	all, err := p.CPU()
	if err != nil {
		t.Fatal(err)
	}
	own, err := cpuOf(p.cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if all <= own {
		t.Errorf("CPU of all is %v, of the shell alone %v", all, own)
	}
	rss, fds, err := p.Memory()
	if err != nil || rss <= 0 || fds < 6 {
		t.Errorf("Memory = %d bytes, %d files, %v", rss, fds, err)
	}
}

func TestStopKillsWhatIgnoresSIGTERM(t *testing.T) {
	p, _ := start(t, "trap '' TERM; sleep 100 & echo ready; wait; wait")
	pids := p.pids()
	p.Stop(10 * time.Millisecond)
	for _, pid := range pids {
		// The kernel ends a process that was killed when it next runs it.
		testkit.Eventually(t, fmt.Sprintf("the end of process %d", pid), func() bool {
			b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
			return err != nil || strings.Contains(string(b), ") Z")
		})
	}
	p.Stop(0) // a second one does nothing
}

func TestBusyOf(t *testing.T) {
	const stat = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 1 1 1 1 1 1 1 1 1\ncpu1 100 20 30 4000 500 6 7 8 90 10\nintr 5\n"
	if got, err := busyOf(stat, 1); err != nil || got != 1710*time.Millisecond {
		t.Errorf("cpu1 was busy for %v, %v, want 1.71s", got, err)
	}
	for name, stat := range map[string]string{"no such cpu": "cpu0 1 1 1 1 1\n", "too short": "cpu1 1 1 1\n", "not a number": "cpu1 1 x 1 1 1 1\n"} {
		if got, err := busyOf(stat, 1); err == nil {
			t.Errorf("%s: %v and no error", name, got)
		}
	}
}

func TestRollupRSS(t *testing.T) {
	if kib, err := rollupRSS("00400000-7ffc rollup\nRss:                1234 kB\nPss: 5 kB\n"); err != nil || kib != 1234 {
		t.Errorf("Rss = %d, %v, want 1234", kib, err)
	}
	if _, err := rollupRSS("Pss: 5 kB\n"); err == nil {
		t.Error("no error without an Rss line")
	}
}
