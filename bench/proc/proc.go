// Package proc starts, measures and ends the processes of a benchmark. All
// figures are of a process and everything it has started.
package proc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Proc is a running process.
type Proc struct {
	cmd  *exec.Cmd
	done chan struct{} // closed once the process has been waited for
	err  error         // how it ended, after done
}

// Command says what to start.
type Command struct {
	Argv   []string
	Dir    string
	Env    []string // added to this process's
	CPU    int      // the one CPU it may use
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
}

// Start starts c. Whoever starts a process calls Stop.
func Start(c Command) (*Proc, error) {
	cmd := exec.Command(c.Argv[0], c.Argv[1:]...)
	cmd.Dir, cmd.Env = c.Dir, append(os.Environ(), c.Env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.Stdin, c.Stdout, c.Stderr
	cmd.WaitDelay = time.Second
	if err := startOn(cmd, c.CPU); err != nil {
		return nil, fmt.Errorf("starting %s: %w", filepath.Base(c.Argv[0]), err)
	}
	p := &Proc{cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// startOn starts cmd from a thread that may only use cpu: the child inherits
// that before it runs its first instruction, so a Go program counts one CPU.
func startOn(cmd *exec.Cmd, cpu int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var was, set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &was); err != nil {
		return os.NewSyscallError("sched_getaffinity", err)
	}
	set.Set(cpu)
	if err := unix.SchedSetaffinity(0, &set); err != nil {
		return os.NewSyscallError("sched_setaffinity", err)
	}
	err := cmd.Start()
	return errors.Join(err, os.NewSyscallError("sched_setaffinity", unix.SchedSetaffinity(0, &was)))
}

// Done is closed when the process has ended.
func (p *Proc) Done() <-chan struct{} { return p.done }

// Wait waits for the process to end by itself.
func (p *Proc) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Stop ends the process: SIGTERM, and after grace SIGKILL. What it has started
// and left behind is killed with it. It returns when the process has ended.
func (p *Proc) Stop(grace time.Duration) {
	select {
	case <-p.done:
		return
	default:
	}
	tree := p.pids()
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
		tree = tree[1:] // its number may be another's by now
	case <-time.After(grace):
	}
	for _, pid := range tree {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	<-p.done
}

// pids are the process and its descendants.
func (p *Proc) pids() []int {
	pids := []int{p.cmd.Process.Pid}
	for i := 0; i < len(pids); i++ {
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pids[i]))
		for _, name := range lists {
			b, _ := os.ReadFile(name)
			for f := range strings.FieldsSeq(string(b)) {
				if pid, err := strconv.Atoi(f); err == nil {
					pids = append(pids, pid)
				}
			}
		}
	}
	return pids
}

// CPU is the processor time used so far, to the nanosecond the scheduler
// counts, with that of threads that have ended. Work the kernel does in a
// thread's name, loopback delivery among it, is counted to that thread.
func (p *Proc) CPU() (time.Duration, error) {
	var sum time.Duration
	for _, pid := range p.pids() {
		d, err := cpuOf(pid)
		if err != nil {
			return 0, fmt.Errorf("cpu clock of process %d: %w", pid, err)
		}
		sum += d
	}
	return sum, nil
}

// cpuOf reads the CPU clock of a process; its number is made as
// clock_getcpuclockid(3) does.
func cpuOf(pid int) (time.Duration, error) {
	const schedClock = 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedClock), &ts); err != nil {
		return 0, os.NewSyscallError("clock_gettime", err)
	}
	return time.Duration(ts.Nano()), nil
}

// Memory is the resident set in bytes and the number of open files.
func (p *Proc) Memory() (rss int64, fds int, err error) {
	for _, pid := range p.pids() {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, 0, err
		}
		kib, err := rollupRSS(string(b))
		if err != nil {
			return 0, 0, err
		}
		rss += kib << 10
		n, err := countDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			return 0, 0, err
		}
		fds += n
	}
	return rss, fds, nil
}

func rollupRSS(s string) (kib int64, err error) {
	for line := range strings.Lines(s) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "Rss:" {
			return strconv.ParseInt(f[1], 10, 64)
		}
	}
	return 0, errors.New("smaps_rollup has no Rss line")
}

func countDir(name string) (int, error) {
	d, err := os.Open(name)
	if err != nil {
		return 0, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	return len(names), err
}

// CPUBusy is how long a CPU has not been idle since boot, to a clock tick.
func CPUBusy(cpu int) (time.Duration, error) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, err
	}
	return busyOf(string(b), cpu)
}

func busyOf(stat string, cpu int) (time.Duration, error) {
	const (
		tick     = 10 * time.Millisecond // of USER_HZ
		idle     = 3
		iowait   = 4
		guest    = 8 // guest times are in user times already
		minTimes = 5
	)
	for line := range strings.Lines(stat) {
		f := strings.Fields(line)
		if len(f) <= minTimes || f[0] != "cpu"+strconv.Itoa(cpu) {
			continue
		}
		var sum time.Duration
		for i, s := range f[1:] {
			n, err := strconv.ParseInt(s, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("/proc/stat: %w", err)
			}
			if i != idle && i != iowait && i < guest {
				sum += time.Duration(n) * tick
			}
		}
		return sum, nil
	}
	return 0, fmt.Errorf("/proc/stat has no cpu%d", cpu)
}
