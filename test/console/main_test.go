// Package console tests the commands that ask and change a running instance, by
// the shell: what they print, the status they end with, by every door of the
// API.
package console

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// A shell runs commands with an environment.
type shell struct {
	t   testing.TB
	env []string
}

// shellOf has the address of a process in its environment.
func shellOf(t testing.TB, p *kit.Process, env ...string) *shell {
	return &shell{t, append([]string{"WAYHOUSE_ADDRESS=" + p.Admin}, env...)}
}

// result is what a command has printed and how it has ended.
type result struct {
	out, errs string
	status    int
}

func (s *shell) command(args ...string) *exec.Cmd {
	s.t.Helper()
	cmd := exec.Command(kit.Binary(s.t, ""), args...)
	dir := s.t.TempDir()
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir, "WAYHOUSE_ACTOR=tester", "GORACE=atexit_sleep_ms=0")
	cmd.Env = append(cmd.Env, s.env...)
	return cmd
}

// run runs a command to its end.
func (s *shell) run(args ...string) result {
	s.t.Helper()
	cmd := s.command(args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		s.t.Fatal(err)
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// must runs a command that ends well and returns what it prints.
func (s *shell) must(args ...string) string {
	s.t.Helper()
	r := s.run(args...)
	if r.status != 0 {
		s.t.Fatalf("%q ends with %d: %s%s", args, r.status, r.out, r.errs)
	}
	return r.out
}

// refuses runs a command that must end with that status and say so on standard
// error.
func (s *shell) refuses(status int, text string, args ...string) result {
	s.t.Helper()
	r := s.run(args...)
	if r.status != status || !strings.Contains(r.errs, text) {
		s.t.Errorf("%q ends with %d and says %q, want %d and %q", args, r.status, r.errs, status, text)
	}
	if strings.Contains(r.out, text) {
		s.t.Errorf("%q says %q on standard output", args, text)
	}
	return r
}

// prints runs a command that ends well with these words in this order in what
// it prints.
func (s *shell) prints(args []string, words ...string) string {
	s.t.Helper()
	out := s.must(args...)
	rest := out
	for _, w := range words {
		_, after, ok := strings.Cut(rest, w)
		if !ok {
			s.t.Errorf("%q does not print %q, of %q, in\n%s", args, w, words, out)
			return out
		}
		rest = after
	}
	return out
}

func words(line string) []string { return strings.Fields(line) }
