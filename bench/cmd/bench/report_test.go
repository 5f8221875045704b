package main

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/bench/load"
)

// runs makes a round for each value of a figure.
func runs(proxy, figure string, vs ...float64) []Round {
	var rs []Round
	for i, v := range vs {
		rs = append(rs, Round{Proxy: proxy, Round: i, Figures: Figures{figure: v}})
	}
	return rs
}

func report(goals []Goal, rs ...[]Round) *ScenarioReport {
	s := Scenario{Name: "x", About: "a test", Unit: "µs", Columns: []string{cpu, lost}, Goals: goals}
	sr := &ScenarioReport{scenario: s, Name: s.Name}
	for _, r := range rs {
		sr.Runs = append(sr.Runs, r...)
	}
	return sr
}

func TestVerdicts(t *testing.T) {
	nginx, haproxy := runs("nginx", cpu, 10, 20, 10), runs("haproxy", cpu, 5, 10, 5)
	failed := append(runs(product, cpu, 1, 1), Round{Proxy: product, Round: 2, Error: "it fell over"})
	for name, tc := range map[string]struct {
		goal     Goal
		runs     [][]Round
		measured float64 // NaN: not measured
		met      bool
	}{
		"met, round by round":    {Goal{cpu, "nginx", 0.9}, [][]Round{nginx, runs(product, cpu, 8, 16, 8)}, 0.8, true},
		"missed":                 {Goal{cpu, "nginx", 0.7}, [][]Round{nginx, runs(product, cpu, 8, 16, 8)}, 0.8, false},
		"the better of two":      {Goal{cpu, best, 1}, [][]Round{nginx, haproxy, runs(product, cpu, 8, 16, 8)}, 1.6, false},
		"better than both":       {Goal{cpu, best, 1}, [][]Round{nginx, haproxy, runs(product, cpu, 4, 8, 4)}, 0.8, true},
		"one peer is missing":    {Goal{cpu, best, 1}, [][]Round{nginx, runs(product, cpu, 4, 8, 4)}, math.NaN(), false},
		"the product is missing": {Goal{cpu, "nginx", 1}, [][]Round{nginx}, math.NaN(), false},
		"a round failed":         {Goal{cpu, "nginx", 1}, [][]Round{nginx, failed}, 0.075, false},
		"nothing lost":           {Goal{lost, "", 0}, [][]Round{runs(product, lost, 0, 0, 0)}, 0, true},
		"one lost in one round":  {Goal{lost, "", 0}, [][]Round{runs(product, lost, 0, 1, 0)}, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			sr := report([]Goal{tc.goal}, tc.runs...)
			v := sr.verdicts(sr.summaries())[0]
			got := math.NaN()
			if v.Measured != nil {
				got = *v.Measured
			}
			if v.Met != tc.met || !(math.Abs(got-tc.measured) < 1e-9 || math.IsNaN(got) && math.IsNaN(tc.measured)) {
				t.Errorf("measured %v, met %v; want %v, %v", got, v.Met, tc.measured, tc.met)
			}
		})
	}
}

func TestReportForms(t *testing.T) {
	sr := report([]Goal{{cpu, "nginx", 0.9}, {cpu, "haproxy", 1}},
		runs("nginx", cpu, 10, 20, 12), runs(product, cpu, 8, 16, 9),
		[]Round{{Proxy: "caddyl4", Error: "would not\nstart"}})
	rep := &Report{Scenarios: []ScenarioReport{*sr}, Env: Environment{Sysctls: map[string]string{"a.b": "1"}, Versions: map[string]string{"nginx": "v1"}, Missing: []string{"haproxy: none"}}}
	md := rep.Markdown()
	for _, want := range []string{
		"`a.b = 1`", "- nginx: v1", "- missing: haproxy: none",
		"| proxy | CPU µs | × nginx | × haproxy | lost |",
		"| nginx | 12 | 1 | – | – | – | 3 |\n",
		"| wayhouse | 9 | 0.800 | – | – | – | 3 |\n",
		"| caddyl4 | – | – | – | – | – | 0 |\n",
		"caddyl4 failed: would not start",
		"- cpu ≤ 0.900 × nginx: met, 0.800\n", "- cpu ≤ 1 × haproxy: not measured\n",
	} {
		if !strings.Contains(md, want) {
			t.Errorf("%q is not in\n%s", want, md)
		}
	}
	b, err := rep.JSON()
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if s := back.Scenarios[0]; len(s.Runs) != 7 || len(s.Summary) != 3 || len(s.Goals) != 2 || !s.Goals[0].Met {
		t.Errorf("JSON holds %d runs, %d summaries, goals %+v", len(s.Runs), len(s.Summary), s.Goals)
	}
}

func TestScenariosAreWhole(t *testing.T) {
	names := map[string]bool{}
	for _, s := range scenarios(time.Second, 1<<20, 1) {
		if names[s.Name] {
			t.Errorf("two scenarios are named %s", s.Name)
		}
		names[s.Name] = true
		if load.Kinds[s.Job.Kind] == nil {
			t.Errorf("%s: no job %q", s.Name, s.Job.Kind)
		}
		if s.Job.Steps == nil && (s.PerUnit == nil || s.Rate == nil || s.Unit == "") {
			t.Errorf("%s has no unit", s.Name)
		}
		for _, g := range s.Goals {
			if !strings.Contains(strings.Join(s.Columns, " "), g.Figure) {
				t.Errorf("%s: goal %v is of no column", s.Name, g)
			}
		}
	}
}

func TestUnits(t *testing.T) {
	all := scenarios(time.Second, 1<<20, 1)
	chosen, err := choose(all, "udp-64-1000,tcp-bulk-up,tcp-connect")
	if err != nil {
		t.Fatal(err)
	}
	res := load.Result{Sent: 600, Received: 400, Units: 250, Bytes: 2e9, Elapsed: 2 * time.Second}
	for i, want := range []struct{ cpu, rate float64 }{{1000, 500}, {0.5, 1}, {4000, 125}} {
		s := chosen[i]
		if c, r := s.PerUnit(time.Second, res), s.Rate(res); c != want.cpu || r != want.rate {
			t.Errorf("%s: a second is %v %s at %v %s, want %v at %v", s.Name, c, s.Unit, r, s.RateUnit, want.cpu, want.rate)
		}
	}
	if _, err := choose(all, "no-such"); err == nil {
		t.Error("an unknown scenario is no error")
	}
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 1: "1", 0.0123: "0.012", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 39991.2: "39991"} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %s, want %s", v, got, want)
		}
	}
}

func TestFreePortsAreFree(t *testing.T) {
	ports, err := freePorts(5)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[uint16]bool{}
	for _, p := range ports {
		if seen[p] || p < 20_000 || p >= 32_000 {
			t.Errorf("ports %v", ports)
		}
		seen[p] = true
	}
}

func TestCalmerCounts(t *testing.T) {
	calm, disturbed, failed := Round{Figures: Figures{busy: 1}}, Round{Figures: Figures{busy: 50}}, Round{Error: "it fell over"}
	for name, tc := range map[string]struct {
		r, before Round
		want      bool
	}{
		"calmer":                {calm, disturbed, true},
		"more disturbed":        {disturbed, calm, false},
		"a failure counts":      {failed, calm, true},
		"no success hides it":   {calm, failed, false},
		"as calm as the former": {calm, calm, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := calmer(tc.r, tc.before); got != tc.want {
				t.Errorf("calmer = %v, want %v", got, tc.want)
			}
		})
	}
}
