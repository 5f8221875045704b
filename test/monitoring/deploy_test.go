package monitoring

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

const (
	prometheusDir = "../../deploy/prometheus"
	dashboardFile = "../../deploy/grafana/wayhouse.json"
)

// rules are the parts of a file of rules that tests look at.
type rules struct {
	Groups []struct {
		Rules []struct{ Record, Alert, Expr string }
	}
}

func readRules(t *testing.T, name string) (r rules) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(prometheusDir, name))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(b, &r); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return r
}

// dashboard is what tests look at of it.
type dashboard struct {
	Templating struct {
		List []struct{ Name, Type, Definition string }
	}
	Annotations struct{ List []struct{ Expr string } }
	Panels      []struct {
		ID      int
		Type    string
		Title   string
		GridPos struct{ X, Y, W, H int } `json:"gridPos"`
		Targets []struct {
			RefID      string `json:"refId"`
			Datasource struct{ Type, UID string }
			Expr       string
		}
	}
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	b, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// expressions are all that the dashboard asks for, with values for Grafana's
// variables.
func (d *dashboard) expressions() (all []string) {
	vars := strings.NewReplacer("$__rate_interval", "5m", "$instance", ".*", "$listener", ".*", "$pool", ".*")
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			all = append(all, vars.Replace(target.Expr))
		}
	}
	for _, a := range d.Annotations.List {
		all = append(all, vars.Replace(a.Expr))
	}
	return all
}

// page are the series of docs/metrics.md, which another test compares with those
// there are, by name with their type and labels.
func page(t *testing.T) map[string][2]string {
	t.Helper()
	b, err := os.ReadFile("../../docs/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	series := make(map[string][2]string)
	row := regexp.MustCompile("(?m)^\\| `(wayhouse_[a-z_0-9]+)` \\| (counter|gauge|histogram) \\|([^|]*)\\|")
	for _, m := range row.FindAllStringSubmatch(string(b), -1) {
		series[m[1]] = [2]string{m[2], strings.NewReplacer("`", "", " ", "").Replace(m[3])}
	}
	return series
}

var (
	selector = regexp.MustCompile(`\b(wayhouse_[a-z0-9_]+)\b(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`([a-z_]+)(?:=~|!~|!=|=)"`)
)

// speaksOf checks the series of an expression, and what it selects them by.
func speaksOf(t *testing.T, where, expr string, series map[string][2]string) (names []string) {
	t.Helper()
	for _, m := range selector.FindAllStringSubmatch(expr, -1) {
		name, known := m[1], series[m[1]]
		for _, suffix := range []string{"_bucket", "_count", "_sum"} {
			if base, ok := strings.CutSuffix(name, suffix); ok && series[base][0] == "histogram" {
				name, known = base, series[base]
			}
		}
		if known[0] == "" {
			t.Errorf("%s: there is no %s", where, name)
			continue
		}
		names = append(names, name)
		labels := strings.Split(known[1], ",")
		for _, by := range matcher.FindAllStringSubmatch(m[2], -1) {
			if by[1] != "instance" && by[1] != "job" && !slices.Contains(labels, by[1]) {
				t.Errorf("%s: %s has no label %s", where, name, by[1])
			}
		}
	}
	return names
}

// TestSeriesOfDashboardAndAlerts holds that the dashboard and the rules speak of
// series that there are, by labels that they have.
func TestSeriesOfDashboardAndAlerts(t *testing.T) {
	series := page(t)
	recorded := make(map[string]bool)
	for _, g := range readRules(t, "rules.yml").Groups {
		for _, r := range g.Rules {
			recorded[r.Record] = true
			if names := speaksOf(t, r.Record, r.Expr, series); len(names) == 0 {
				t.Errorf("%s speaks of no series", r.Record)
			}
		}
	}
	ours := regexp.MustCompile(`wayhouse:[a-z0-9_:]+`)
	docs, err := os.ReadFile("../../docs/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range readRules(t, "alerts.yml").Groups {
		for _, r := range g.Rules {
			speaksOf(t, r.Alert, r.Expr, series)
			for _, name := range ours.FindAllString(r.Expr, -1) {
				if !recorded[name] {
					t.Errorf("%s: no rule records %s", r.Alert, name)
				}
			}
			if !strings.Contains(string(docs), "| `"+r.Alert+"` |") {
				t.Errorf("docs/monitoring.md lacks %s", r.Alert)
			}
		}
	}
	d := readDashboard(t)
	for _, expr := range d.expressions() {
		speaksOf(t, "dashboard", expr, series)
	}
	for _, v := range d.Templating.List {
		speaksOf(t, "variable "+v.Name, v.Definition, series)
	}
}

// TestDashboard holds what Grafana would only show when somebody looks.
func TestDashboard(t *testing.T) {
	d := readDashboard(t)
	ids := make(map[int]bool)
	cells := make(map[[2]int]string)
	for _, p := range d.Panels {
		if ids[p.ID] || p.ID == 0 || p.Title == "" {
			t.Errorf("panel %q has the ID %d, which is none or another's", p.Title, p.ID)
		}
		ids[p.ID] = true
		if p.GridPos.X+p.GridPos.W > 24 || p.GridPos.H == 0 {
			t.Errorf("panel %q does not fit: %+v", p.Title, p.GridPos)
		}
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := cells[[2]int{x, y}]; other != "" {
					t.Fatalf("panels %q and %q lie on each other", p.Title, other)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			if target.Datasource.UID != "${datasource}" || target.RefID == "" || target.Expr == "" {
				t.Errorf("panel %q: %+v", p.Title, target)
			}
		}
	}
	var names []string
	for _, v := range d.Templating.List {
		names = append(names, v.Name)
	}
	if got := strings.Join(names, " "); got != "datasource instance listener pool" {
		t.Errorf("the variables are %s", got)
	}
}

// TestPromtool has Prometheus' own tool look at the rules, at what the dashboard
// asks for and at the metrics of a process.
func TestPromtool(t *testing.T) {
	_, err := exec.LookPath("promtool")
	kit.Require(t, err, "promtool")
	promtool := func(stdin string, args ...string) {
		t.Helper()
		cmd := exec.Command("promtool", args...)
		cmd.Dir, cmd.Stdin = prometheusDir, strings.NewReader(stdin)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	promtool("", "check", "rules", "rules.yml", "alerts.yml")
	promtool("", "test", "rules", "alerts_test.yml")

	d := readDashboard(t)
	var asked strings.Builder
	asked.WriteString("groups:\n  - name: dashboard\n    rules:\n")
	for i, expr := range d.expressions() {
		fmt.Fprintf(&asked, "      - record: asked:%d\n        expr: %q\n", i, expr)
	}
	file := filepath.Join(t.TempDir(), "dashboard.yml")
	if err := os.WriteFile(file, []byte(asked.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	promtool("", "check", "rules", file)

	p := kit.Start(t, everything(t, kit.Ports(t, 2)), kit.Options{})
	_, body := p.Get("/metrics")
	var ours strings.Builder
	for line := range strings.Lines(body) {
		if strings.HasPrefix(strings.TrimPrefix(strings.TrimPrefix(line, "# HELP "), "# TYPE "), "wayhouse_") {
			ours.WriteString(line)
		}
	}
	if strings.Count(ours.String(), "# TYPE ") < 20 {
		t.Fatalf("the process has few series:\n%s", ours.String())
	}
	promtool(ours.String(), "check", "metrics")
}
