package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestEveryAlertHasAdvice finds a heading for each alert, and no other.
func TestEveryAlertHasAdvice(t *testing.T) {
	rules, err := os.ReadFile(filepath.Join(root, "deploy/prometheus/alerts.yml"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, "docs/operating/alerts.md"))
	if err != nil {
		t.Fatal(err)
	}
	names := func(pattern string, text []byte) map[string]bool {
		found := make(map[string]bool)
		for _, m := range regexp.MustCompile(pattern).FindAllSubmatch(text, -1) {
			found[string(m[1])] = true
		}
		return found
	}
	alerts, advice := names(`(?m)^ *- alert: (\w+)$`, rules), names(`(?m)^### (\w+)$`, text)
	if len(alerts) < 10 {
		t.Fatalf("only %d alerts were found", len(alerts))
	}
	for name := range alerts {
		if !advice[name] {
			t.Errorf("docs/operating/alerts.md says nothing of %s", name)
		}
	}
	for name := range advice {
		if !alerts[name] {
			t.Errorf("docs/operating/alerts.md has %s, which is no alert", name)
		}
	}
}

// TestCallsAreListed compares the table of docs/admin-api.md with the calls
// there are, both ways.
func TestCallsAreListed(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs/admin-api.md"))
	if err != nil {
		t.Fatal(err)
	}
	listed := make(map[string]bool)
	for _, m := range regexp.MustCompile("(?m)^\\| `([A-Z]+ /[^`?]*)").FindAllStringSubmatch(string(text), -1) {
		listed[m[1]] = true
	}
	c := newChecker(t)
	for pattern, methods := range c.routes {
		if _, caddys := caddyRoutes[pattern]; caddys {
			continue
		}
		for _, method := range methods {
			if !listed[method+" "+pattern] {
				t.Errorf("docs/admin-api.md lacks %s %s", method, pattern)
			}
		}
	}
	for call := range listed {
		if method, path, _ := strings.Cut(call, " "); !c.hasRoute(method, path) {
			t.Errorf("docs/admin-api.md has %s, which there is not", call)
		}
	}
}
