package docs

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"mvdan.cc/sh/v3/syntax"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestStartHere and TestReadme do what the page says, command by command, in a
// shell, with the ports of the page.
func TestStartHere(t *testing.T) { walk(t, "docs/start-here.md", "") }

func TestReadme(t *testing.T) { walk(t, "README.md", "wayhouse") }

// leftOut are commands of these pages that are not run: they test or build
// everything, this among it.
var leftOut = regexp.MustCompile(`(?m)^make (build test lint|xcaddy)( .*)?$`)

// reader is somebody who follows a page: with one terminal for what stays in
// the foreground, and one for everything else.
type reader struct {
	t       *testing.T
	dir     string
	env     []string
	shell   *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	blocks  int
	running *exec.Cmd // in the first terminal
	log     *os.File
}

func walk(t *testing.T, path, cwd string) {
	if os.Getenv("WAYHOUSE_TEST_NETWORK") == "" {
		testkit.Require(t, errors.New("no right to make one"), "network of its own")
	}
	for _, command := range []string{"bash", "curl", "make"} {
		_, err := exec.LookPath(command)
		testkit.Require(t, err, command)
	}
	text, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	p := readPage(path, string(text))
	r := newReader(t, cwd)
	ran := 0
	for i, b := range p.blocks {
		where := fmt.Sprintf("%s:%d", path, b.line)
		switch b.kind {
		case "caddyfile": // saved by the reader, as the page says
			if err := os.WriteFile(filepath.Join(r.pwd(), "Caddyfile"), []byte(b.text), 0o600); err != nil {
				t.Fatal(err)
			}
		case "sh":
			ran++
			script := leftOut.ReplaceAllString(b.text, "")
			if stays(t, script) {
				r.start(script)
				continue
			}
			got := r.run(where, script)
			if i+1 < len(p.blocks) && p.blocks[i+1].kind == "text" {
				compare(t, where, p.blocks[i+1].text, got)
			}
		case "console", "indented":
			t.Errorf("%s: commands of this page have to be a block of sh", where)
		}
	}
	if ran < 3 {
		t.Errorf("only %d blocks were run", ran)
	}
}

// newReader makes a checkout, by what is here, and a shell in cwd.
func newReader(t *testing.T, cwd string) *reader {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	source := filepath.Join(dir, "source")
	copyTree(t, source)
	shims := filepath.Join(dir, "shims")
	shim(t, filepath.Join(shims, "git"), fmt.Sprintf(`
[ "$1 $2" = "clone https://github.com/wayhouse-proxy/wayhouse" ] || { echo "git $*: not what the page clones" >&2; exit 1; }
exec cp -r %q wayhouse`, source))
	if !testkit.Soak() { // what the tests have built is as good
		shim(t, filepath.Join(shims, "go"), fmt.Sprintf(`
[ "$*" = "build -o bin/wayhouse ./cmd/wayhouse" ] || { echo "go $*: not how the Makefile builds" >&2; exit 1; }
[ -d cmd/wayhouse ] && mkdir -p bin && exec ln -sf %q bin/wayhouse`, testkit.Binary(t, "")))
	}
	if cwd != "" {
		if err := os.Rename(source, filepath.Join(dir, cwd)); err != nil {
			t.Fatal(err)
		}
	}
	r := &reader{t: t, dir: dir, env: append(os.Environ(), "PATH="+shims+":"+os.Getenv("PATH"), "XDG_DATA_HOME="+dir+"/data", "XDG_CONFIG_HOME="+dir+"/config")}
	if testkit.Soak() { // the tools of Go keep theirs where they always do
		r.env = append(r.env, "XDG_CACHE_HOME="+filepath.Join(os.Getenv("HOME"), ".cache"))
	}
	r.shell = r.bash(filepath.Join(dir, cwd))
	if r.in, err = r.shell.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := r.shell.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.out = bufio.NewReader(out)
	if r.log, err = os.Create(filepath.Join(dir, "log")); err != nil {
		t.Fatal(err)
	}
	if err := r.shell.Start(); err != nil {
		t.Fatal(err)
	}
	// A block that never ends is ended.
	limit := time.AfterFunc(testkit.Long, func() { syscall.Kill(-r.shell.Process.Pid, syscall.SIGKILL) })
	t.Cleanup(func() {
		limit.Stop()
		syscall.Kill(-r.shell.Process.Pid, syscall.SIGKILL)
		r.shell.Wait()
		r.stop()
		r.log.Close()
		if log, _ := os.ReadFile(r.log.Name()); t.Failed() || bytes.Contains(log, []byte(`"level":"error"`)) || bytes.Contains(log, []byte("panic")) {
			t.Errorf("what ran has logged\n%s", log)
		}
	})
	return r
}

// bash is a shell in a process group of its own.
func (r *reader) bash(dir string, args ...string) *exec.Cmd {
	cmd := exec.Command("bash", args...)
	cmd.Dir, cmd.Env = dir, r.env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// run has the second terminal do what a block says, and returns what it writes.
func (r *reader) run(where, script string) string {
	r.t.Helper()
	r.blocks++
	file := filepath.Join(r.dir, fmt.Sprintf("block-%d", r.blocks))
	if err := os.WriteFile(file, []byte("set -E\ntrap 'echo \"failed: $BASH_COMMAND\"' ERR\n"+script), 0o600); err != nil {
		r.t.Fatal(err)
	}
	end := fmt.Sprintf("end of block %d", r.blocks)
	fmt.Fprintf(r.in, ". %s </dev/null 2>&1; echo %s\n", file, end)
	var got strings.Builder
	for {
		line, err := r.out.ReadString('\n')
		if err != nil {
			r.t.Fatalf("%s: %v after\n%s", where, err, got.String())
		}
		if line == end+"\n" {
			break
		}
		if strings.HasPrefix(line, "failed: ") {
			r.t.Errorf("%s: %s", where, line)
			defer func() { r.t.Logf("%s has written\n%s", where, got.String()) }()
		}
		got.WriteString(line)
	}
	return got.String()
}

// pwd is the directory of the second terminal.
func (r *reader) pwd() string { return strings.TrimSpace(r.run("pwd", "pwd")) }

// start has the first terminal do what a block says, and waits until the admin
// endpoint says that new clients are taken.
func (r *reader) start(script string) {
	r.t.Helper()
	r.stop()
	r.running = r.bash(r.pwd(), "-c", script)
	r.running.Stdout, r.running.Stderr = r.log, r.log
	if err := r.running.Start(); err != nil {
		r.t.Fatal(err)
	}
	client := http.Client{Timeout: testkit.Long, Transport: &http.Transport{DisableKeepAlives: true}}
	testkit.Eventually(r.t, "ready after "+script, func() bool {
		resp, err := client.Get("http://localhost:2019/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
}

// stop is two times Ctrl-C in the first terminal: the second ends who plays.
func (r *reader) stop() {
	if r.running == nil {
		return
	}
	done := make(chan struct{})
	go func() {
		r.running.Wait()
		close(done)
	}()
	group := -r.running.Process.Pid
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for tries := 0; ; tries++ {
		select {
		case <-done:
			syscall.Kill(group, syscall.SIGKILL) // nobody is left, or should be
			r.running = nil
			return
		case <-tick.C:
			if tries < 2 {
				syscall.Kill(group, syscall.SIGINT)
			} else if tries > int(testkit.Long/(200*time.Millisecond)) {
				syscall.Kill(group, syscall.SIGKILL)
			}
		}
	}
}

// stays reports whether a script has a command that stays in the foreground.
func stays(t *testing.T, script string) (yes bool) {
	t.Helper()
	file, err := syntax.NewParser().Parse(strings.NewReader(script), "")
	if err != nil {
		t.Fatal(err)
	}
	syntax.Walk(file, func(n syntax.Node) bool {
		if call, ok := n.(*syntax.CallExpr); ok && len(call.Args) > 1 {
			words := wordText(script, call.Args[0]) + " " + wordText(script, call.Args[1])
			yes = yes || words == "bin/wayhouse run" || words == "make run"
		}
		return true
	})
	return yes
}

// What differs each time: the ports and sessions of clients, times, hashes.
var varies = []struct {
	pattern *regexp.Regexp
	to      string
}{
	{regexp.MustCompile(`\b\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d+)?Z?`), "TIME"},
	{regexp.MustCompile(`127\.0\.0\.1:[3-6]\d{4}\b`), "127.0.0.1:PORT"},
	{regexp.MustCompile(`\b([tu])-[0-9a-f]+\b`), "$1-ID"},
	{regexp.MustCompile(`\b\d+(\.\d+)?(s|ms|µs)\b`), "DURATION"},
	{regexp.MustCompile(`[\w.-]+@[\w.-]+`), "SOMEBODY"},
	{regexp.MustCompile(`[ \t]+`), " "},
}

func normal(text string) []string {
	for _, v := range varies {
		text = v.pattern.ReplaceAllString(text, v.to)
	}
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return lines
}

// compare wants an output to be what the page shows. A line of three dots
// there stands for any lines.
func compare(t *testing.T, where, page, got string) {
	t.Helper()
	if !like(normal(page), normal(got)) {
		t.Errorf("%s: the page shows\n%s\nand this has been written\n%s", where, page, got)
	}
}

func like(page, got []string) bool {
	for len(page) > 0 {
		if page[0] == "..." {
			for i := range len(got) + 1 {
				if like(page[1:], got[i:]) {
					return true
				}
			}
			return false
		}
		if len(got) == 0 || page[0] != got[0] {
			return false
		}
		page, got = page[1:], got[1:]
	}
	return len(got) == 0
}

func TestLike(t *testing.T) {
	for _, tc := range []struct {
		page, got string
		like      bool
	}{
		{"a\nb", "a\nb\n", true},
		{"a\nb", "a\nc", false},
		{"a", "a\nb", false},
		{"a\n...", "a\nb\nc", true},
		{"...\nc", "a\nb\nc", true},
		{"...\nb", "a\nb\nc", false},
		{"t-100000  127.0.0.1:40000 6s", "t-100000 127.0.0.1:40000  7s", true},
		{"t-100000000 127.0.0.1:40000 6s", "t-10000a000 127.0.0.1:50000 7.5ms", true},
		{"127.0.0.1:17001", "127.0.0.1:17002", false},
	} {
		if got := like(normal(tc.page), normal(tc.got)); got != tc.like {
			t.Errorf("%q and %q: %v, want %v", tc.page, tc.got, got, tc.like)
		}
	}
}

// copyTree copies what is in the repository, more or less.
func copyTree(t *testing.T, to string) {
	t.Helper()
	cmd := exec.Command("tar", "-C", root, "--exclude=./.git", "--exclude=./bin", "--exclude=./dist", "-cf", "-", ".")
	if err := os.Mkdir(to, 0o700); err != nil {
		t.Fatal(err)
	}
	extract := exec.Command("tar", "-C", to, "-xf", "-")
	var err error
	if extract.Stdin, err = cmd.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := extract.Start(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(cmd.Run(), extract.Wait()); err != nil {
		t.Fatal(err)
	}
}

// shim writes a command that stands for another.
func shim(t *testing.T, file, script string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("#!/bin/sh"+script+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
}
