package testkit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Options are what tests may want of a process beside its config.
type Options struct {
	Package string   // what to build; "": ./cmd/wayhouse
	Netns   *Netns   // where to run
	Wrap    []string // command that runs it
	Env     []string
	Broken  bool // panics in its log are meant
	Plain   bool // without the race detector, whatever the tests have
}

// Process is a running wayhouse with an admin endpoint on a socket of its own.
type Process struct {
	Dir    string // with config.json, log and the data directories
	Config string // the config file it was started with
	Admin  string // its admin address, as Caddy writes it

	t    testing.TB
	o    Options
	cmd  *exec.Cmd
	http *http.Client
	done chan struct{} // closed when it has ended
	err  error         // after done
}

// root is the directory of the module.
func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

var (
	builds   sync.Map // build → func() (string, error)
	buildDir = func() string {
		h := fnv.New32a()
		io.WriteString(h, root())
		return filepath.Join(os.TempDir(), fmt.Sprintf("wayhouse-test-%d-%08x", os.Getuid(), h.Sum32()))
	}
)

// Binary builds a command, "" for ./cmd/wayhouse, with the race detector when
// the tests have it, and returns where it is.
func Binary(t testing.TB, pkg string) string {
	t.Helper()
	if pkg == "" {
		pkg = "./cmd/wayhouse"
	}
	return built(t, build{pkg, Race})
}

// build is a way to build a command.
type build struct {
	pkg  string
	race bool
}

// built builds a command once per run. The linker is only run when something
// changed.
func built(t testing.TB, b build) string {
	t.Helper()
	once, _ := builds.LoadOrStore(b, sync.OnceValues(b.run))
	bin, err := once.(func() (string, error))()
	if err != nil {
		t.Fatalf("building %s: %v", b.pkg, err)
	}
	return bin
}

func (b build) run() (string, error) {
	dir := buildDir()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	bin := filepath.Join(dir, filepath.Base(b.pkg))
	args := []string{"build"}
	if b.race {
		bin += "-race"
		args = append(args, "-race")
	}
	// Packages are tested side by side.
	lock, err := os.OpenFile(bin+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", err
	}
	cmd := exec.Command("go", append(args, "-o", bin, b.pkg)...)
	cmd.Dir = root()
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	return bin, nil
}

// Start runs wayhouse with a config, waits until it is ready, and sees to its
// end and to what it has logged by then.
func Start(t testing.TB, config M, o Options) *Process {
	t.Helper()
	p := Prepare(t, config, o)
	p.Begin()
	p.WaitReady()
	return p
}

// Prepare makes the directory of a process and writes its config, but does not
// start it.
func Prepare(t testing.TB, config M, o Options) *Process {
	t.Helper()
	dir, err := os.MkdirTemp("", "wh") // not t.TempDir: the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "admin.sock")
	p := &Process{Dir: dir, Config: filepath.Join(dir, "config.json"), Admin: "unix/" + socket, t: t, o: o}
	p.http = &http.Client{Timeout: Long, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
		DisableKeepAlives: true, // a reload moves the endpoint to a new server
	}}
	if config != nil {
		p.WriteConfig(config)
	}
	return p
}

// WriteConfig replaces the config file, as an editor would that writes a new
// one and renames it.
func (p *Process) WriteConfig(config M) {
	p.t.Helper()
	p.WriteDocument(p.Document(config))
}

// WriteDocument is WriteConfig of bytes.
func (p *Process) WriteDocument(doc []byte) {
	p.t.Helper()
	tmp := p.Config + ".new"
	if err := os.WriteFile(tmp, doc, 0o600); err != nil {
		p.t.Fatal(err)
	}
	if err := os.Rename(tmp, p.Config); err != nil {
		p.t.Fatal(err)
	}
}

// Document is the config with the admin endpoint of the process in it.
func (p *Process) Document(config M) []byte {
	p.t.Helper()
	doc := M{
		"admin": M{"listen": p.Admin, "config": M{"persist": false}},
		// Without a line for every request of a test that polls.
		"logging": M{"logs": M{"default": M{"level": "INFO", "exclude": A{"admin.api"}}}},
	}
	for k, v := range config {
		doc[k] = v
	}
	b, err := json.Marshal(doc)
	if err != nil {
		p.t.Fatal(err)
	}
	return b
}

// Begin starts a prepared process, with these arguments instead of those that
// run it with its config.
func (p *Process) Begin(args ...string) {
	p.t.Helper()
	argv := append([]string{}, p.o.Wrap...)
	b := build{"./cmd/wayhouse", Race && !p.o.Plain}
	if p.o.Package != "" {
		b.pkg = p.o.Package
	}
	argv = append(argv, built(p.t, b))
	if len(args) == 0 {
		args = []string{"run", "--config", p.Config}
	}
	argv = append(argv, args...)
	if p.o.Netns != nil {
		argv = append([]string{"ip", "netns", "exec", p.o.Netns.Name}, argv...)
	}
	log, err := os.OpenFile(filepath.Join(p.Dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = p.Dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "HOME="+p.Dir, "XDG_DATA_HOME="+p.Dir+"/data", "XDG_CONFIG_HOME="+p.Dir+"/config", "GORACE=atexit_sleep_ms=0")
	cmd.Env = append(cmd.Env, p.o.Env...)
	if err := cmd.Start(); err != nil {
		p.t.Fatalf("starting %s: %v", argv[0], err)
	}
	done := make(chan struct{})
	p.cmd, p.done = cmd, done
	go func() {
		p.err = cmd.Wait()
		close(done)
	}()
	p.t.Cleanup(p.finish)
}

// finish ends the process and looks through its log.
func (p *Process) finish() {
	if !p.Ended() {
		p.Signal(syscall.SIGTERM)
		if !Poll(3*time.Second, p.Ended) {
			p.cmd.Process.Kill()
			<-p.done
		}
	}
	log := p.Log()
	for _, bad := range []string{"WARNING: DATA RACE", "\npanic: ", "\nfatal error: ", "goroutine 1 ["} {
		if strings.Contains(log, bad) && !p.o.Broken {
			p.t.Errorf("the log has %q", strings.TrimSpace(bad))
		}
	}
	if p.t.Failed() {
		const tail = 8 << 10
		p.t.Logf("the end of the log of %d:\n%s", p.cmd.Process.Pid, log[max(0, len(log)-tail):])
	}
}

// WaitReady waits until /readyz says yes.
func (p *Process) WaitReady() {
	p.t.Helper()
	ready := Poll(Long, func() bool {
		status, _ := p.Get("/readyz")
		return status == http.StatusOK || p.Ended()
	})
	if !ready || p.Ended() {
		p.t.Fatalf("the process is not ready: ended %v; log:\n%s", p.Ended(), p.Log())
	}
}

// Ended reports whether the process has.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Exit waits for the end and returns the exit code.
func (p *Process) Exit() int {
	p.t.Helper()
	Eventually(p.t, "the process ends", p.Ended)
	return p.cmd.ProcessState.ExitCode()
}

// Signal sends a signal.
func (p *Process) Signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("sending %v: %v", s, err)
	}
}

// PID is the process's, or that of what runs it.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Log is all it has logged.
func (p *Process) Log() string {
	b, _ := os.ReadFile(filepath.Join(p.Dir, "log"))
	return string(b)
}

// Do sends a request to the admin endpoint; status 0 is no answer. Whoever asks
// while a load moves the endpoint to a new server may find the connection
// closed: a GET is tried again.
func (p *Process) Do(method, path string, body []byte) (status int, answer string) {
	return p.DoAs(method, path, "application/json", body)
}

// DoAs is Do with a body of that type.
func (p *Process) DoAs(method, path, contentType string, body []byte) (status int, answer string) {
	status, answer, _ = p.do(method, path, contentType, body)
	return status, answer
}

// Header is a header of the answer to GET.
func (p *Process) Header(path, name string) string {
	_, _, header := p.do(http.MethodGet, path, "application/json", nil)
	return header.Get(name)
}

func (p *Process) do(method, path, contentType string, body []byte) (status int, answer string, header http.Header) {
	req, err := http.NewRequest(method, "http://localhost"+path, bytes.NewReader(body))
	if err != nil {
		return 0, err.Error(), nil
	}
	req.Header.Set("Content-Type", contentType)
	res, err := p.http.Do(req)
	for range 10 {
		if method != http.MethodGet || !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
			break
		}
		res, err = p.http.Do(req)
	}
	if err != nil {
		return 0, err.Error(), nil
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err.Error(), nil
	}
	return res.StatusCode, string(b), res.Header
}

// Get is Do with GET.
func (p *Process) Get(path string) (status int, answer string) {
	return p.Do(http.MethodGet, path, nil)
}

// JSON gets a path and decodes the answer.
func (p *Process) JSON(path string, v any) {
	p.t.Helper()
	status, body := p.Get(path)
	if status != http.StatusOK {
		p.t.Fatalf("GET %s: %d %s", path, status, body)
	}
	if err := json.Unmarshal([]byte(body), v); err != nil {
		p.t.Fatalf("GET %s: %v in %.200s", path, err, body)
	}
}

// Load replaces the config by POST /load.
func (p *Process) Load(config M) error { return p.LoadDocument(p.Document(config)) }

// LoadDocument is Load of bytes.
func (p *Process) LoadDocument(doc []byte) error {
	status, answer := p.Do(http.MethodPost, "/load", doc)
	if status != http.StatusOK {
		return fmt.Errorf("%d %s", status, strings.TrimSpace(answer))
	}
	return nil
}

// MustLoad is Load of a config that must be taken.
func (p *Process) MustLoad(config M) {
	p.t.Helper()
	if err := p.Load(config); err != nil {
		p.t.Fatalf("loading: %v", err)
	}
}

// Usage is what a process holds.
type Usage struct {
	Files      int
	Goroutines int
	RSS        int // bytes
}

// Usage measures the process.
func (p *Process) Usage() Usage {
	p.t.Helper()
	return Usage{Files: openFiles(p.PID()), Goroutines: p.Goroutines(), RSS: p.RSS()}
}

var goroutineTotal = regexp.MustCompile(`^goroutine profile: total (\d+)`)

// Goroutines counts them, without those that answer the question.
func (p *Process) Goroutines() int {
	p.t.Helper()
	_, body := p.Get("/debug/pprof/goroutine?debug=1")
	m := goroutineTotal.FindStringSubmatch(body)
	if m == nil {
		p.t.Fatalf("no goroutine profile: %.200s", body)
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

// Files counts open descriptors.
func (p *Process) Files() int { return openFiles(p.PID()) }

// RSS is the resident memory in bytes.
func (p *Process) RSS() int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.PID()))
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(strings.Fields(string(b))[1])
	return n * os.Getpagesize()
}

// Collect runs the process's garbage collector, for steady figures.
func (p *Process) Collect() { p.Get("/debug/pprof/heap?gc=1") }

// LimitFiles sets how many descriptors the process may have, up to what it
// began with.
func (p *Process) LimitFiles(n uint64) {
	p.t.Helper()
	var lim unix.Rlimit
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, nil, &lim); err != nil {
		p.t.Fatal(err)
	}
	lim.Cur = min(n, lim.Max)
	if err := unix.Prlimit(p.PID(), unix.RLIMIT_NOFILE, &lim, nil); err != nil {
		p.t.Fatal(err)
	}
}

// Metrics are samples by the name and labels that stand in front of them.
type Metrics map[string]float64

// Metrics reads /metrics.
func (p *Process) Metrics() Metrics {
	p.t.Helper()
	status, body := p.Get("/metrics")
	if status != http.StatusOK {
		p.t.Fatalf("GET /metrics: %d %s", status, body)
	}
	m := Metrics{}
	for line := range strings.Lines(body) {
		line = strings.TrimSpace(line)
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' {
			continue
		}
		if v, err := strconv.ParseFloat(line[i+1:], 64); err == nil {
			m[line[:i]] = v
		}
	}
	return m
}

// Sum adds up the samples of a series, without its namespace, whose labels
// include these pairs of name and value.
func (m Metrics) Sum(name string, labels ...string) float64 {
	sum := 0.0
	for key, v := range m {
		series, rest, _ := strings.Cut(key, "{")
		if series != "wayhouse_"+name {
			continue
		}
		has := true
		for i := 0; i < len(labels); i += 2 {
			has = has && strings.Contains("{"+rest, labels[i]+`="`+labels[i+1]+`"`)
		}
		if has {
			sum += v
		}
	}
	return sum
}

// Metric reads one series.
func (p *Process) Metric(name string, labels ...string) float64 {
	p.t.Helper()
	return p.Metrics().Sum(name, labels...)
}

// Traced reports whether a debugger has every thread of the process.
func (p *Process) Traced() bool {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.PID()))
	for _, task := range tasks {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", p.PID(), task.Name()))
		if strings.Contains(string(b), "TracerPid:\t0\n") {
			return false
		}
	}
	return err == nil && len(tasks) > 0
}
