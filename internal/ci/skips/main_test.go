package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const passing = `{"Action":"run","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Test":"TestOne"}
{"Action":"output","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Test":"TestOne","Output":"=== RUN   TestOne\n"}
{"Action":"pass","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Test":"TestOne"}
{"Action":"output","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Output":"PASS\n"}
{"Action":"output","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Output":"ok  \tgithub.com/wayhouse-proxy/wayhouse/a/b\t0.1s\n"}
{"Action":"pass","Package":"github.com/wayhouse-proxy/wayhouse/a/b"}
`

const skipping = `{"Action":"skip","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Test":"TestTwo"}
{"Action":"skip","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Test":"TestThree/with/slash"}
`

const failing = `{"Action":"output","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Test":"TestFour","Output":"    a_test.go:1: why\n"}
{"Action":"fail","Package":"github.com/wayhouse-proxy/wayhouse/a/b","Test":"TestFour"}
{"Action":"fail","Package":"github.com/wayhouse-proxy/wayhouse/a/b"}
`

const broken = `{"ImportPath":"github.com/wayhouse-proxy/wayhouse/c","Action":"build-output","Output":"c.go:1: no such thing\n"}
{"Action":"fail","Package":"github.com/wayhouse-proxy/wayhouse/c"}
`

func TestReport(t *testing.T) {
	for name, tc := range map[string]struct {
		in    string
		allow string
		ci    bool
		ok    bool
		want  []string // in what is printed
		not   string
	}{
		"passes":                 {in: passing, ci: true, ok: true, want: []string{"ok  \tgithub.com/", "1 passed, 0 failed, 0 skipped"}, not: "RUN"},
		"skips elsewhere":        {in: passing + skipping, ok: true, want: []string{"skipped: a/b.TestTwo\n", "1 passed, 0 failed, 2 skipped"}},
		"skips in CI":            {in: passing + skipping, ci: true, want: []string{"FAIL: 2 tests were skipped"}},
		"one skip is allowed":    {in: skipping, allow: "a/b.TestTwo", ci: true, want: []string{"FAIL: 1 tests were skipped"}, not: "skipped: a/b.TestTwo"},
		"both skips are allowed": {in: skipping, allow: "a/b.TestTwo a/b.TestThree", ci: true, ok: true},
		"fails":                  {in: passing + failing, want: []string{"a_test.go:1: why", "1 passed, 1 failed, 0 skipped"}},
		"does not build":         {in: broken, want: []string{"no such thing", "0 passed, 0 failed"}},
		"a line of another kind": {in: "go: downloading x\n" + passing, ok: true, want: []string{"go: downloading x"}},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			r := report{out: &out, output: make(map[string][]string)}
			if err := r.read(strings.NewReader(tc.in)); err != nil {
				t.Fatal(err)
			}
			allowed := make(map[string]bool)
			for _, a := range strings.Fields(tc.allow) {
				allowed[a] = true
			}
			if ok := r.finish(allowed, tc.ci); ok != tc.ok {
				t.Errorf("finish() = %v, want %v", ok, tc.ok)
			}
			for _, w := range tc.want {
				if !strings.Contains(out.String(), w) {
					t.Errorf("not printed: %q", w)
				}
			}
			if tc.not != "" && strings.Contains(out.String(), tc.not) {
				t.Errorf("printed: %q", tc.not)
			}
			if t.Failed() {
				t.Log(out.String())
			}
		})
	}
}

func TestReadAllowed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "skips")
	for content, want := range map[string]string{
		"# why\n\na/b.TestOne needs a second machine\n": "",
		"a/b.TestOne\n": "skips:1: a/b.TestOne has no reason",
	} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		allowed, err := readAllowed(file)
		if want == "" && (err != nil || !allowed["a/b.TestOne"] || len(allowed) != 1) {
			t.Errorf("%q: %v, %v", content, allowed, err)
		}
		if want != "" && (err == nil || !strings.HasSuffix(err.Error(), want)) {
			t.Errorf("%q: error %v, want %s", content, err, want)
		}
	}
}
