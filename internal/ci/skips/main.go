// Command skips stands behind "go test -json": it prints what "go test" would,
// and at the end which tests were skipped. Where CI is true, a skipped test
// that no list names is a failure, for there everything a test may want has to
// be installed.
//
//	go test -json ./... | go run ./internal/ci/skips [-v] [-allow FILE]
//
// A line of FILE is a test, as package.Test with the package below the
// module's root, and the reason why it may be skipped. Subtests go with their
// test. An empty line or one that begins with # says nothing.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

const module = "github.com/wayhouse-proxy/wayhouse"

func main() {
	allow := flag.String("allow", "", "file with the tests that may be skipped")
	verbose := flag.Bool("v", false, "print what every test prints")
	flag.Parse()
	allowed, err := readAllowed(*allow)
	if err != nil {
		fmt.Fprintln(os.Stderr, "skips:", err)
		os.Exit(2)
	}
	r := report{out: os.Stdout, verbose: *verbose, output: make(map[string][]string)}
	if err := r.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "skips:", err)
		os.Exit(2)
	}
	if !r.finish(allowed, os.Getenv("CI") == "true") {
		os.Exit(1)
	}
}

func readAllowed(file string) (map[string]bool, error) {
	allowed := make(map[string]bool)
	if file == "" {
		return allowed, nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	for n, line := range strings.Split(string(b), "\n") {
		if line = strings.TrimSpace(line); line == "" || line[0] == '#' {
			continue
		}
		name, reason, _ := strings.Cut(line, " ")
		if strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("%s:%d: %s has no reason", file, n+1, name)
		}
		allowed[name] = true
	}
	return allowed, nil
}

// event is a line of test2json.
type event struct {
	Action, Package, Test, Output, ImportPath string
}

// report adds up the events.
type report struct {
	out                     io.Writer
	verbose                 bool
	output                  map[string][]string // of tests that run
	passed, failed, skipped int
	brokenPackages          int
	skips                   []string // package.Test
}

func (r *report) read(in io.Reader) error {
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			r.line(line)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *report) line(line string) {
	var e event
	if err := json.Unmarshal([]byte(line), &e); err != nil || e.Action == "" {
		fmt.Fprint(r.out, line) // not from a test: what the toolchain says
		return
	}
	name := strings.TrimPrefix(strings.TrimPrefix(e.Package, module), "/") + "." + e.Test
	switch e.Action {
	case "output", "build-output":
		switch {
		case e.Test == "" || r.verbose:
			if e.Output != "PASS\n" || r.verbose {
				fmt.Fprint(r.out, e.Output)
			}
		default:
			r.output[name] = append(r.output[name], e.Output)
		}
	case "pass", "fail", "skip":
		r.ended(name, e)
	}
}

func (r *report) ended(name string, e event) {
	defer delete(r.output, name)
	if e.Test == "" {
		if e.Action == "fail" {
			r.brokenPackages++
		}
		return
	}
	switch e.Action {
	case "pass":
		r.passed++
		return
	case "fail":
		r.failed++
	case "skip":
		r.skipped++
		r.skips = append(r.skips, name)
	}
	if e.Action == "fail" && !r.verbose {
		for _, s := range r.output[name] {
			fmt.Fprint(r.out, s)
		}
	}
}

// finish prints the end of the report and says whether all is well.
func (r *report) finish(allowed map[string]bool, ci bool) bool {
	unexpected := 0
	slices.Sort(r.skips)
	for _, name := range r.skips {
		if allowed[withoutSubtest(name)] {
			continue
		}
		unexpected++
		fmt.Fprintf(r.out, "skipped: %s\n", name)
	}
	// A test that the end of its process has cut off has neither passed nor failed.
	for name, lines := range r.output {
		if r.brokenPackages > 0 && !r.verbose {
			fmt.Fprintf(r.out, "cut off: %s\n%s", name, strings.Join(lines, ""))
		}
	}
	fmt.Fprintf(r.out, "%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
	if ci && unexpected > 0 {
		fmt.Fprintf(r.out, "FAIL: %d tests were skipped that no list of skips names\n", unexpected)
		return false
	}
	return r.failed == 0 && r.brokenPackages == 0
}

// withoutSubtest is package.Test without the subtests after it. Slashes of the
// package stand before the last dot in front of a test's name.
func withoutSubtest(name string) string {
	i := strings.Index(name, ".Test")
	if i < 0 {
		return name
	}
	if j := strings.IndexByte(name[i:], '/'); j >= 0 {
		return name[:i+j]
	}
	return name
}
