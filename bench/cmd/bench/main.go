// Command bench compares Wayhouse with its peers: the same load through each,
// in interleaved rounds, each proxy alone on one CPU and everything else on
// another. See ../../README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/wayhouse-proxy/wayhouse/bench/load"
	"github.com/wayhouse-proxy/wayhouse/bench/proxies"
)

func main() {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	fl := flag.NewFlagSet("bench", flag.ContinueOnError)
	var (
		scenario = fl.String("scenario", "all", "scenarios to run, separated by commas")
		names    = fl.String("proxies", "nginx,haproxy,caddyl4,wayhouse", "proxies to compare, separated by commas, in the order of a round")
		rounds   = fl.Int("rounds", 5, "rounds of each scenario")
		window   = fl.Duration("window", 5*time.Second, "how long a round measures")
		bytes    = fl.Uint64("bytes", 4<<30, "bytes of a round of the bulk scenarios")
		out      = fl.String("out", "", "directory for results.md and results.json (none: only print)")
		wayhouse = fl.String("wayhouse", "", "the product's binary (none: built from ./cmd/wayhouse)")
		caddyl4  = fl.String("caddyl4", "", "plain caddy-l4's binary (none: built from ./bench/cmd/caddyl4)")
		seed     = fl.Uint64("seed", 1, "of the order in which sessions send")
		genCPU   = fl.Int("gen-cpu", 0, "CPU of the load generator and the backend")
		proxyCPU = fl.Int("proxy-cpu", 1, "CPU of the proxy")
		others   = fl.Float64("others", 5, "percent of the proxy's CPU that others may use; a round with more is measured again")
		again    = fl.Int("again", 2, "how often a disturbed round is measured again; the calmest counts")
		list     = fl.Bool("list", false, "list the scenarios and end")
	)
	if err := fl.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	if fl.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", fl.Arg(0))
	}
	if *rounds < 1 || *window <= 0 || *bytes == 0 {
		return fmt.Errorf("rounds %d, window %v, bytes %d: all are at least 1", *rounds, *window, *bytes)
	}
	if n := runtime.NumCPU(); *genCPU == *proxyCPU || max(*genCPU, *proxyCPU) >= n || min(*genCPU, *proxyCPU) < 0 {
		return fmt.Errorf("gen-cpu %d, proxy-cpu %d: two different ones of the %d there are", *genCPU, *proxyCPU, n)
	}
	all := scenarios(*window, *bytes, *seed)
	if *list {
		for _, s := range all {
			fmt.Printf("%-14s %s\n", s.Name, s.About)
		}
		return nil
	}
	chosen, err := choose(all, *scenario)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	h := &harness{dir: dir, bins: map[string]string{}, genCPU: *genCPU, proxyCPU: *proxyCPU, others: *others, again: *again}
	rep := &Report{Env: environment(ctx), Args: args, Rounds: *rounds}
	given := map[string]string{"./cmd/wayhouse": *wayhouse, "./bench/cmd/caddyl4": *caddyl4}
	var field []*proxies.Proxy
	for name := range strings.SplitSeq(*names, ",") {
		p := proxies.ByName(name)
		if p == nil {
			return fmt.Errorf("proxies: there is no %q", name)
		}
		bin, err := find(ctx, dir, p, given[p.Program])
		if err == nil {
			h.bins[name] = bin
			rep.Env.Versions[name], err = p.Version(bin)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "without %s: %v\n", name, err)
			rep.Env.Missing = append(rep.Env.Missing, fmt.Sprintf("%s: %v", name, err))
			continue
		}
		field = append(field, p)
	}
	if h.load, err = build(ctx, dir, "load", "./bench/cmd/load"); err != nil {
		return err
	}
	for _, s := range chosen {
		if ctx.Err() != nil {
			break
		}
		rep.Scenarios = append(rep.Scenarios, h.rounds(ctx, s, field, *rounds))
	}
	md := rep.Markdown()
	fmt.Print(md)
	if *out != "" {
		if err := rep.write(*out, md); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

func choose(all []Scenario, names string) ([]Scenario, error) {
	if names == "all" {
		return all, nil
	}
	var chosen []Scenario
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(all, func(s Scenario) bool { return s.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("scenario: there is no %q (-list shows all)", name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// rounds runs a scenario: each round is once through every proxy.
func (h *harness) rounds(ctx context.Context, s Scenario, field []*proxies.Proxy, n int) ScenarioReport {
	sr := ScenarioReport{scenario: s, Name: s.Name, About: s.About}
	for round := range n {
		for _, p := range field {
			if !s.runs(p) || ctx.Err() != nil {
				continue
			}
			var best Round
			for try := 0; ; try++ {
				f, res, err := h.measure(ctx, s, p)
				r := Round{Proxy: p.Name, Round: round, Figures: f, Load: res}
				if err != nil {
					r.Error = err.Error()
				}
				fmt.Fprintln(os.Stderr, s.progress(r))
				if try == 0 || calmer(r, best) {
					best = r
				}
				if r.Error != "" || r.Figures[busy] <= h.others || try == h.again || ctx.Err() != nil {
					break
				}
			}
			sr.Runs = append(sr.Runs, best)
		}
	}
	return sr
}

// calmer reports whether r was less disturbed than the one before it. A
// failure counts whenever it comes: trying again is for calm, not for luck.
func calmer(r, before Round) bool {
	if r.Error != "" {
		return true
	}
	return before.Error == "" && r.Figures[busy] < before.Figures[busy]
}

// progress is a line for whoever waits.
func (s *Scenario) progress(r Round) string {
	line := fmt.Sprintf("%s %s, round %d:", s.Name, r.Proxy, r.Round+1)
	if r.Error != "" {
		return line + " " + r.Error
	}
	for _, c := range append(slices.Clone(s.Columns), busy) {
		if v, ok := r.Figures[c]; ok {
			line += fmt.Sprintf(" %s %s", c, number(v))
		}
	}
	if r.Load.Skipped > 0 {
		line += fmt.Sprintf(" skipped %d", r.Load.Skipped)
	}
	if r.Load.Why != "" {
		line += " (" + r.Load.Why + ")"
	}
	return line
}

// Round is one run of a scenario through one proxy.
type Round struct {
	Proxy   string      `json:"proxy"`
	Round   int         `json:"round"` // from 0
	Figures Figures     `json:"figures,omitempty"`
	Load    load.Result `json:"load"`
	Error   string      `json:"error,omitempty"`
}

func (rep *Report) write(dir, md string) error {
	b, err := rep.JSON()
	if err != nil {
		return err
	}
	return errors.Join(
		os.MkdirAll(dir, 0o755),
		os.WriteFile(filepath.Join(dir, "results.md"), []byte(md), 0o644),
		os.WriteFile(filepath.Join(dir, "results.json"), b, 0o644),
	)
}
