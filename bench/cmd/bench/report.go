package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/wayhouse-proxy/wayhouse/bench/stats"
)

const product = "wayhouse"

// peers are what the product is measured by.
var peers = []string{"nginx", "haproxy"}

// Report is all of a run.
type Report struct {
	Env       Environment      `json:"environment"`
	Args      []string         `json:"args"`
	Rounds    int              `json:"rounds"`
	Scenarios []ScenarioReport `json:"scenarios"`
}

// ScenarioReport is the rounds of a scenario.
type ScenarioReport struct {
	scenario Scenario
	Name     string    `json:"name"`
	About    string    `json:"about"`
	Runs     []Round   `json:"runs"`
	Summary  []Summary `json:"summary"` // filled by JSON
	Goals    []Verdict `json:"goals"`   // filled by JSON
}

// Summary is the medians of one proxy, and the medians of its ratios to peers.
type Summary struct {
	Proxy  string                        `json:"proxy"`
	Rounds int                           `json:"rounds"` // that came to an end
	Median map[string]float64            `json:"median"`
	Ratio  map[string]map[string]float64 `json:"ratio"` // by peer and figure
	Failed string                        `json:"failed,omitempty"`
}

// Verdict is a goal beside what was measured.
type Verdict struct {
	Goal     string   `json:"goal"`
	Measured *float64 `json:"measured"` // nil: it was not
	Met      bool     `json:"met"`
}

// series is a figure of a proxy by round.
func (sr *ScenarioReport) series(proxy, figure string) map[int]float64 {
	m := map[int]float64{}
	for _, r := range sr.Runs {
		if v, ok := r.Figures[figure]; ok && r.Proxy == proxy {
			m[r.Round] = v
		}
	}
	return m
}

// typical is the median of a series; of what must not happen at all, the sum.
func typical(figure string, m map[int]float64) float64 {
	if figure != lost && figure != wrong {
		return stats.Median(slices.Collect(maps.Values(m)))
	}
	sum := 0.0
	for _, v := range m {
		sum += v
	}
	return sum
}

func (sr *ScenarioReport) summaries() []Summary {
	var all []Summary
	for _, r := range sr.Runs {
		i := slices.IndexFunc(all, func(s Summary) bool { return s.Proxy == r.Proxy })
		if i < 0 {
			i = len(all)
			all = append(all, Summary{Proxy: r.Proxy, Median: map[string]float64{}, Ratio: map[string]map[string]float64{}})
		}
		if r.Error != "" {
			all[i].Failed = r.Error
			continue
		}
		all[i].Rounds++
	}
	for _, s := range all {
		for _, figure := range append(slices.Clone(sr.scenario.Columns), busy) {
			if m := sr.series(s.Proxy, figure); len(m) > 0 {
				s.Median[figure] = typical(figure, m)
			}
			for _, peer := range peers {
				v := stats.Ratio(sr.series(s.Proxy, figure), sr.series(peer, figure))
				if math.IsNaN(v) {
					continue
				}
				if s.Ratio[peer] == nil {
					s.Ratio[peer] = map[string]float64{}
				}
				s.Ratio[peer][figure] = v
			}
		}
	}
	return all
}

// verdicts hold the product's figures against the scenario's goals.
func (sr *ScenarioReport) verdicts(all []Summary) []Verdict {
	var own Summary
	if i := slices.IndexFunc(all, func(s Summary) bool { return s.Proxy == product }); i >= 0 {
		own = all[i]
	}
	var vs []Verdict
	for _, g := range sr.scenario.Goals {
		v := Verdict{Goal: g.String()}
		if got := g.measured(own); !math.IsNaN(got) {
			v.Measured, v.Met = &got, got <= g.Max && own.Failed == ""
		}
		vs = append(vs, v)
	}
	return vs
}

func (g Goal) String() string {
	switch g.Of {
	case "":
		return fmt.Sprintf("%s ≤ %s", g.Figure, number(g.Max))
	case best:
		return fmt.Sprintf("%s ≤ %s × the better of %s", g.Figure, number(g.Max), strings.Join(peers, " and "))
	}
	return fmt.Sprintf("%s ≤ %s × %s", g.Figure, number(g.Max), g.Of)
}

// measured is what the goal bounds, NaN where it was not measured. The ratio
// to the better of two peers is the larger of the ratios.
func (g Goal) measured(s Summary) float64 {
	if g.Of == "" {
		if v, ok := s.Median[g.Figure]; ok {
			return v
		}
		return math.NaN()
	}
	of := []string{g.Of}
	if g.Of == best {
		of = peers
	}
	most := math.NaN()
	for _, peer := range of {
		v, ok := s.Ratio[peer][g.Figure]
		if !ok {
			return math.NaN() // without one of them nobody knows which is better
		}
		if !(most > v) {
			most = v
		}
	}
	return most
}

// JSON is the report with every round in it.
func (rep *Report) JSON() ([]byte, error) {
	for i := range rep.Scenarios {
		sr := &rep.Scenarios[i]
		sr.Summary = sr.summaries()
		sr.Goals = sr.verdicts(sr.Summary)
	}
	return json.MarshalIndent(rep, "", "\t")
}

// Markdown is the report for people.
func (rep *Report) Markdown() string {
	var b strings.Builder
	e := rep.Env
	fmt.Fprintf(&b, "Linux %s, %d × %s, %s, %d files a process, commit %s.\n", e.Kernel, e.CPUs, e.CPU, e.Go, e.MaxFiles, e.Commit)
	for _, name := range slices.Sorted(maps.Keys(e.Sysctls)) {
		fmt.Fprintf(&b, "`%s = %s` ", name, e.Sysctls[name])
	}
	b.WriteString("\n\n")
	for _, name := range slices.Sorted(maps.Keys(e.Versions)) {
		fmt.Fprintf(&b, "- %s: %s\n", name, e.Versions[name])
	}
	for _, m := range e.Missing {
		fmt.Fprintf(&b, "- missing: %s\n", strings.ReplaceAll(m, "\n", " "))
	}
	for i := range rep.Scenarios {
		rep.Scenarios[i].markdown(&b)
	}
	return b.String()
}

func (sr *ScenarioReport) markdown(b *strings.Builder) {
	s := sr.scenario
	fmt.Fprintf(b, "\n### %s\n\n%s.\n\n", s.Name, s.About)
	lead := s.Columns[0] // the figure whose ratios are shown
	fmt.Fprint(b, "| proxy |")
	for _, c := range s.Columns {
		fmt.Fprintf(b, " %s |", s.heading(c))
		if c == lead {
			fmt.Fprint(b, " × nginx | × haproxy |")
		}
	}
	fmt.Fprint(b, " CPU used by others, % | rounds |\n|---|")
	fmt.Fprint(b, strings.Repeat("---:|", len(s.Columns)+4), "\n")
	all := sr.summaries()
	for _, p := range all {
		fmt.Fprintf(b, "| %s |", p.Proxy)
		for _, c := range s.Columns {
			fmt.Fprintf(b, " %s |", cell(p.Median, c))
			if c == lead {
				fmt.Fprintf(b, " %s | %s |", cell(p.Ratio["nginx"], c), cell(p.Ratio["haproxy"], c))
			}
		}
		fmt.Fprintf(b, " %s | %d |\n", cell(p.Median, busy), p.Rounds)
	}
	b.WriteString("\n")
	for _, p := range all {
		if p.Failed != "" {
			fmt.Fprintf(b, "%s failed: %s\n\n", p.Proxy, strings.ReplaceAll(p.Failed, "\n", " "))
		}
	}
	for _, v := range sr.verdicts(all) {
		switch {
		case v.Measured == nil:
			fmt.Fprintf(b, "- %s: not measured\n", v.Goal)
		case v.Met:
			fmt.Fprintf(b, "- %s: met, %s\n", v.Goal, number(*v.Measured))
		default:
			fmt.Fprintf(b, "- %s: **missed**, %s\n", v.Goal, number(*v.Measured))
		}
	}
}

// heading is the title of a column.
func (s *Scenario) heading(figure string) string {
	switch figure {
	case cpu:
		return "CPU " + s.Unit
	case p50, p99:
		return figure + " µs"
	case rate:
		return s.RateUnit
	case rss:
		return "KiB RSS/session"
	case fds:
		return "files/session"
	}
	return figure
}

func cell(m map[string]float64, figure string) string {
	if v, ok := m[figure]; ok {
		return number(v)
	}
	return "–"
}

// number writes three digits that matter.
func number(v float64) string {
	switch a := math.Abs(v); {
	case a >= 100 || a == math.Trunc(a):
		return strconv.FormatFloat(v, 'f', 0, 64)
	case a >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case a >= 1:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}
