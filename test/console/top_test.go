package console

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// tty is a terminal with a command on it.
type tty struct {
	t             testing.TB
	master, slave *os.File
	cmd           *exec.Cmd
	was           unix.Termios

	mu   sync.Mutex // guards seen
	seen strings.Builder
	read chan struct{} // closed when nobody writes to it any more
	err  error         // of the command, after done
	done chan struct{}
}

// onTerminal starts a command on a terminal of its own.
func (s *shell) onTerminal(width, height uint16, args ...string) *tty {
	s.t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		s.t.Fatal(err)
	}
	fd := int(master.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		s.t.Fatal(err)
	}
	y := &tty{t: s.t, master: master, slave: slave, read: make(chan struct{}), done: make(chan struct{})}
	y.resize(width, height)
	y.was = y.settings()
	y.cmd = s.command(args...)
	y.cmd.Env = append(y.cmd.Env, "TERM=xterm", "NO_COLOR=")
	y.cmd.Env = append(y.cmd.Env, s.env...)
	y.cmd.Stdin, y.cmd.Stdout, y.cmd.Stderr = slave, slave, slave
	y.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := y.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go func() {
		defer close(y.read)
		buf := make([]byte, 4<<10)
		for {
			n, err := master.Read(buf)
			y.mu.Lock()
			y.seen.Write(buf[:n])
			y.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	go func() {
		defer close(y.done)
		y.err = y.cmd.Wait()
	}()
	s.t.Cleanup(func() {
		y.cmd.Process.Kill()
		<-y.done
		slave.Close()
		<-y.read // the last writer has gone
		master.Close()
	})
	return y
}

func (y *tty) resize(width, height uint16) {
	y.t.Helper()
	if err := unix.IoctlSetWinsize(int(y.slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Col: width, Row: height}); err != nil {
		y.t.Fatal(err)
	}
}

func (y *tty) settings() unix.Termios {
	y.t.Helper()
	s, err := unix.IoctlGetTermios(int(y.slave.Fd()), unix.TCGETS)
	if err != nil {
		y.t.Fatal(err)
	}
	return *s
}

func (y *tty) text() string {
	y.mu.Lock()
	defer y.mu.Unlock()
	return y.seen.String()
}

// page is what the last whole drawing has.
func (y *tty) page() string {
	const end = "\x1b[J"
	all := y.text()
	last := strings.LastIndex(all, end)
	if last < 0 {
		return ""
	}
	all = all[:last]
	if before := strings.LastIndex(all, end); before >= 0 {
		all = all[before:]
	}
	return all
}

func (y *tty) shows(what string, has func(page string) bool) {
	y.t.Helper()
	if !kit.Poll(kit.Long, func() bool { return has(y.page()) }) {
		y.t.Fatalf("there is no %s in\n%q", what, y.page())
	}
}

func (y *tty) press(keys string) {
	y.t.Helper()
	if _, err := y.master.WriteString(keys); err != nil {
		y.t.Fatal(err)
	}
}

// ends waits for the end of the command and wants the terminal to be as it was.
func (y *tty) ends(status int) {
	y.t.Helper()
	kit.Eventually(y.t, "the command ends", func() bool {
		select {
		case <-y.done:
			return true
		default:
			return false
		}
	})
	var failed *exec.ExitError
	if y.err != nil && !errors.As(y.err, &failed) || y.cmd.ProcessState.ExitCode() != status {
		y.t.Errorf("it ends with %v, want status %d", y.err, status)
	}
	if now := y.settings(); now != y.was {
		y.t.Errorf("the terminal is %+v, was %+v", now, y.was)
	}
	const shown, left = "\x1b[?25h", "\x1b[?1049l"
	kit.Eventually(y.t, "the cursor and the page before are back", func() bool {
		all := y.text()
		return strings.LastIndex(all, shown) > strings.LastIndex(all, "\x1b[?25l") && strings.LastIndex(all, left) > strings.LastIndex(all, "\x1b[?1049h")
	})
}

// TestTop looks at a live instance on a terminal, by every key.
func TestTop(t *testing.T) {
	backend := kit.NewTCPBackend(t, 1, "127.0.0.1:0")
	addr := kit.Local(kit.Port(t))
	p := kit.Start(t, kit.App(kit.M{"front": kit.ToPool("lobby", "tcp/"+addr)}, kit.M{"lobby": kit.Pool(backend.Addr)}), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, Conns: 12, Rate: 200})
	sh := shellOf(t, p)
	y := sh.onTerminal(120, 40, "top", "--interval", "250ms")
	has := func(words ...string) func(string) bool {
		return func(page string) bool {
			for _, w := range words {
				if !strings.Contains(page, w) {
					return false
				}
			}
			return true
		}
	}
	y.shows("a listener, a backend, a session and their rates", func(page string) bool {
		return has("12 connections", "front", backend.Addr, "\x1b[32menabled", "q quit", "sorted by rate", "127.0.0.1:")(page) && !strings.Contains(page, " 0 B/s in")
	})
	if now := y.settings(); now.Lflag&unix.ICANON != 0 || now.Lflag&unix.ECHO != 0 {
		t.Error("the terminal waits for lines or echoes keys")
	}
	if !strings.Contains(y.text(), "\x1b[?1049h") {
		t.Error("it draws over what was there")
	}
	y.press("s")
	y.shows("sessions by bytes", has("sorted by bytes"))
	y.press("\x1b[A") // an arrow, which means nothing
	y.press("p")
	y.shows("a pause", has("paused"))
	y.press("p")
	y.shows("the end of the pause", has("every 250ms"))
	y.press("+")
	y.shows("a longer interval", has("every 500ms"))
	y.resize(40, 10)
	y.shows("a narrow page", func(page string) bool {
		for _, l := range strings.Split(page, "\r\n") {
			if l = strings.NewReplacer("\x1b[H", "", "\x1b[K", "", "\x1b[J", "", "\x1b[32m", "", "\x1b[0m", "").Replace(l); len(l) > 40 {
				return false
			}
		}
		return strings.Count(page, "\r\n") <= 9 && has("12 connections", "front")(page)
	})
	y.press("q")
	y.ends(0)
	perfect(t, load)
}

func perfect(t *testing.T, l *kit.Load) {
	t.Helper()
	if r := l.Stop(); !r.Perfect() {
		t.Errorf("the load noticed: %v", &r)
	}
}

// TestTopEnds ends it by keys and signals, and with the instance gone.
func TestTopEnds(t *testing.T) {
	p := kit.Start(t, game(kit.Local(kit.Port(t)), "127.0.0.1:9"), kit.Options{})
	sh := shellOf(t, p)
	drawn := func(page string) bool { return strings.Contains(page, "q quit") }
	for name, tc := range map[string]struct {
		do     func(*tty)
		status int
	}{
		"ctrl-c":  {func(y *tty) { y.press("\x03") }, 0},
		"SIGTERM": {func(y *tty) { y.cmd.Process.Signal(syscall.SIGTERM) }, 128 + int(syscall.SIGTERM)},
		"SIGHUP":  {func(y *tty) { y.cmd.Process.Signal(syscall.SIGHUP) }, 128 + int(syscall.SIGHUP)},
	} {
		t.Run(name, func(t *testing.T) {
			y := (&shell{t, sh.env}).onTerminal(80, 24, "top")
			y.shows("a page", drawn)
			tc.do(y)
			y.ends(tc.status)
		})
	}
	t.Run("gone", func(t *testing.T) {
		y := (&shell{t, sh.env}).onTerminal(80, 24, "top", "--interval", "250ms")
		y.shows("a page", drawn)
		p.Signal(syscall.SIGTERM)
		p.Exit()
		y.shows("that nobody answers", func(page string) bool {
			return strings.Contains(page, "not answered: ") && strings.Contains(page, "game")
		})
		p.Begin()
		p.WaitReady()
		y.shows("that it is back", func(page string) bool { return strings.Contains(page, "every 250ms") })
		y.press("q")
		y.ends(0)
	})
	t.Run("nobody", func(t *testing.T) {
		y := (&shell{t, []string{"WAYHOUSE_ADDRESS=localhost:1"}}).onTerminal(80, 24, "top")
		<-y.done
		if y.cmd.ProcessState.ExitCode() != 1 || y.settings() != y.was || strings.Contains(y.text(), "\x1b[?1049h") {
			t.Errorf("without an instance it ends with %v: %q", y.err, y.text())
		}
	})
}

// TestColours has colours on a terminal alone, and not where they are unwanted.
func TestColours(t *testing.T) {
	p := kit.Start(t, game(kit.Local(kit.Port(t)), "127.0.0.1:9"), kit.Options{})
	sh := shellOf(t, p)
	if out := sh.must("show", "pools"); strings.Contains(out, "\x1b") {
		t.Errorf("without a terminal it prints %q", out)
	}
	for name, tc := range map[string]struct {
		env  string
		want bool
	}{"a terminal": {"X=", true}, "NO_COLOR": {"NO_COLOR=1", false}, "a dumb one": {"TERM=dumb", false}} {
		t.Run(name, func(t *testing.T) {
			y := (&shell{t, append([]string{tc.env}, sh.env...)}).onTerminal(80, 24, "show", "pools")
			kit.Eventually(t, "the backend is shown", func() bool { return strings.Contains(y.text(), "enabled") })
			<-y.done
			if got := strings.Contains(y.text(), "\x1b[32menabled\x1b[0m"); got != tc.want || !tc.want && strings.Contains(y.text(), "\x1b") {
				t.Errorf("it prints %q", y.text())
			}
		})
	}
}
