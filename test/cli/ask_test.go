package cli

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// exit runs a command in a directory and returns its exit status.
func exit(t *testing.T, dir string, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	cmd := exec.Command(testkit.Binary(t, ""), args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
	var out, log strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &log
	err := cmd.Run()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		t.Fatal(err)
	}
	return out.String(), log.String(), cmd.ProcessState.ExitCode()
}

const lintable = `{
	wayhouse {
		pool game {
			to 10.0.0.5:7777
			health none
		}
		listener game udp/127.0.0.1:7777 {
			route {
				pool game
			}
			MORE
		}
	}
}
`

// TestLint wants the exit statuses that CI tells apart.
func TestLint(t *testing.T) {
	for name, tc := range map[string]struct {
		more   string
		status int
		out    string
	}{
		"clean":    {"", 0, ""},
		"findings": {"route {\n\t\t\t\tpool game\n\t\t\t}", 1, "apps.wayhouse.listeners.game.routes[1]: "},
		"invalid":  {"route {\n\t\t\t\tpool gone\n\t\t\t}", 2, ""},
		"no such":  {"rout", 2, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "Caddyfile"), []byte(strings.ReplaceAll(lintable, "MORE", tc.more)), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]string{{"lint"}, {"lint", "--config", "Caddyfile"}} {
				out, log, status := exit(t, dir, args...)
				if status != tc.status || !strings.HasPrefix(out, tc.out) || tc.out == "" && out != "" {
					t.Errorf("%v ends with %d and prints %q, want %d and %q\n%s", args, status, out, tc.status, tc.out, log)
				}
			}
			out, log, status := exit(t, dir, "lint", "--json")
			var found []map[string]string
			if err := json.Unmarshal([]byte(out), &found); status != tc.status || status < 2 && (err != nil || len(found) != status) {
				t.Errorf("--json ends with %d and prints %q, %v\n%s", status, out, err, log)
			}
		})
	}
	if _, _, status := exit(t, t.TempDir(), "lint"); status != 2 {
		t.Errorf("without a config lint ends with %d, want 2", status)
	}
}

// TestExplain asks a running process by the command.
func TestExplain(t *testing.T) {
	ports := testkit.Ports(t, 1)
	p := testkit.Start(t, testkit.App(
		testkit.M{"game": testkit.ToPool("game", "tcp/"+testkit.Local(ports), "udp/"+testkit.Local(ports))},
		testkit.M{"game": testkit.Pool("10.0.0.5:7777")},
	), testkit.Options{})
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "packet"), []byte{0xff, 0xff, 0xff}, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"explain", "--address", p.Admin, "--listener", "game", "--src", "203.0.113.7:5"}
	for name, tc := range map[string]struct {
		more   []string
		status int
		out    string
	}{
		"tcp":         {[]string{"--tcp"}, 0, "end      goes to pool game, backend 10.0.0.5:7777, route 0"},
		"udp":         {[]string{"--udp", "--bytes", "@packet", "--bytes", "ascii:x"}, 0, "udp 203.0.113.7:5"},
		"json":        {[]string{"--tcp", "--json"}, 0, `"end":{"what":"pool","route":0,"pool":"game"`},
		"which":       {nil, 1, ""},
		"both":        {[]string{"--tcp", "--udp"}, 2, ""},
		"no file":     {[]string{"--udp", "--bytes", "@gone"}, 2, ""},
		"bad bytes":   {[]string{"--udp", "--bytes", "x"}, 1, ""},
		"no listener": {[]string{"--tcp", "--listener", "gone"}, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			out, log, status := exit(t, dir, append(args, tc.more...)...)
			if status != tc.status || !strings.Contains(out, tc.out) || status != 0 && (out != "" || !strings.HasPrefix(log, "wayhouse explain: ") || strings.Count(log, "\n") != 1) {
				t.Errorf("ends with %d and prints\n%s%s\nwant %d and %q", status, out, log, tc.status, tc.out)
			}
		})
	}
}
