package main

import (
	"time"

	"github.com/wayhouse-proxy/wayhouse/bench/load"
	"github.com/wayhouse-proxy/wayhouse/bench/proxies"
)

// The figures of a round, by name. Which there are depends on the scenario.
const (
	cpu   = "cpu"   // of the proxy, per unit of work, in the scenario's unit
	p50   = "p50"   // µs
	p99   = "p99"   // µs
	rate  = "rate"  // work done, in the scenario's unit of rate
	rss   = "rss"   // KiB per session held
	fds   = "fds"   // open files per session held
	lost  = "lost"  // messages, connections or sessions
	wrong = "wrong" // messages that came back changed, twice or to another
	busy  = "busy"  // share of the proxy's CPU that others used, in percent
)

// Scenario is one kind of load and what is asked of the product under it.
type Scenario struct {
	Name  string
	About string
	Job   load.Job
	UDP   bool

	Unit     string                                   // of cpu
	PerUnit  func(time.Duration, load.Result) float64 // cpu of a round
	RateUnit string
	Rate     func(load.Result) float64

	Columns []string
	Goals   []Goal
}

// Goal bounds a figure of the product, by a multiple of a peer's or as it is.
type Goal struct {
	Figure string
	Of     string // a peer; best: whichever peer is better; "": the figure itself
	Max    float64
}

const best = "best"

func microsPer(units func(load.Result) uint64) func(time.Duration, load.Result) float64 {
	return func(d time.Duration, r load.Result) float64 {
		return d.Seconds() * 1e6 / float64(max(units(r), 1))
	}
}

func perSecond(units func(load.Result) uint64) func(load.Result) float64 {
	return func(r load.Result) float64 { return float64(units(r)) / max(r.Elapsed.Seconds(), 1e-9) }
}

func datagrams(r load.Result) uint64 { return r.Sent + r.Received }
func units(r load.Result) uint64     { return r.Units }

// scenarios are all there are, in the order in which they run.
func scenarios(window time.Duration, bytes, seed uint64) []Scenario {
	const warm = 500 * time.Millisecond
	udp := func(name, about string, sessions int) Scenario {
		return Scenario{
			Name: name, About: about, UDP: true,
			Job:  load.Job{Kind: "udp", Sessions: sessions, Size: 64, Rate: 20_000, Warm: warm, Window: window, Seed: seed},
			Unit: "µs/datagram", PerUnit: microsPer(datagrams), RateUnit: "datagrams/s", Rate: perSecond(datagrams),
			Columns: []string{cpu, p50, p99, rate, lost, wrong},
			Goals:   []Goal{{cpu, "nginx", 0.9}, {lost, "", 0}, {wrong, "", 0}},
		}
	}
	burst := udp("udp-burst", "bursts of 16 datagrams of 1,000 B, each burst of one of 50 sessions, 1,000 bursts/s, echoed", 50)
	burst.Job.Size, burst.Job.Burst, burst.Job.Rate = 1000, 16, 1000
	burst.Goals = []Goal{{cpu, "nginx", 0.6}, {wrong, "", 0}}

	bulk := func(name, about, kind string) Scenario {
		return Scenario{
			Name: name, About: about,
			Job:  load.Job{Kind: kind, Sessions: 8, Bytes: bytes},
			Unit: "s/GB",
			PerUnit: func(d time.Duration, r load.Result) float64 {
				return d.Seconds() / (float64(max(r.Bytes, 1)) / 1e9)
			},
			RateUnit: "GB/s", Rate: func(r load.Result) float64 { return float64(r.Bytes) / 1e9 / max(r.Elapsed.Seconds(), 1e-9) },
			Columns: []string{cpu, rate, wrong},
			Goals:   []Goal{{cpu, "haproxy", 0.55}, {cpu, "nginx", 0.4}, {wrong, "", 0}},
		}
	}
	rr := func(name, about string, rps float64) Scenario {
		return Scenario{
			Name: name, About: about,
			Job:  load.Job{Kind: "tcp-rr", Sessions: 100, Size: 64, Rate: rps, Warm: warm, Window: window},
			Unit: "µs/round trip", PerUnit: microsPer(units), RateUnit: "round trips/s", Rate: perSecond(units),
			Columns: []string{cpu, p50, p99, rate, lost, wrong},
			Goals:   []Goal{{cpu, best, 1}, {p50, best, 1.1}, {p99, best, 1.1}, {wrong, "", 0}},
		}
	}
	idle := func(name, about, kind string, udp bool, most float64, steps ...int) Scenario {
		return Scenario{
			Name: name, About: about, UDP: udp,
			Job:     load.Job{Kind: kind, Size: 64, Steps: steps},
			Columns: []string{rss, fds, lost},
			Goals:   []Goal{{rss, "", 1}, {fds, "", most}, {lost, "", 0}},
		}
	}
	return []Scenario{
		udp("udp-64-1000", "64 B datagrams, 1,000 sessions, 20,000 round trips/s", 1000),
		udp("udp-64-10000", "64 B datagrams, 10,000 sessions, 20,000 round trips/s", 10_000),
		burst,
		bulk("tcp-bulk-down", "8 streams from the backend", "tcp-down"),
		bulk("tcp-bulk-up", "8 streams to the backend", "tcp-up"),
		rr("tcp-rr", "64 B round trips, 100 connections, 20,000 round trips/s", 20_000),
		rr("tcp-rr-full", "64 B round trips, 100 connections, each as fast as it is answered", 0),
		{
			Name: "tcp-connect", About: "connect, 1 byte there and back, close: 2,000/s, at most 16 at once",
			Job:  load.Job{Kind: "tcp-connect", Sessions: 16, Rate: 2000, Warm: warm, Window: window},
			Unit: "µs/connection", PerUnit: microsPer(units), RateUnit: "connections/s", Rate: perSecond(units),
			Columns: []string{cpu, p50, p99, rate, lost, wrong},
			Goals:   []Goal{{cpu, "nginx", 1}, {lost, "", 0}, {wrong, "", 0}},
		},
		idle("idle-tcp", "held connections, slope from 1,000 to 9,000", "tcp-idle", false, 2.05, 1000, 9000),
		idle("idle-udp", "held sessions, slope from 1,000 to 15,000", "udp-idle", true, 1, 1000, 15_000),
	}
}

// runs reports whether p takes part in s.
func (s *Scenario) runs(p *proxies.Proxy) bool { return !s.UDP || p.UDP }
