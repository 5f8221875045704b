// Package metrics keeps the collectors that live as long as the process and
// puts them into the fresh registry that every config has.
package metrics

import (
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Namespace begins the name of every series.
const Namespace = "wayhouse"

var (
	mu         sync.Mutex
	collectors []prometheus.Collector
)

// Add makes collectors part of what Register registers. Packages call it from
// init, so that a series exists once however often the config is loaded.
func Add(cs ...prometheus.Collector) {
	mu.Lock()
	defer mu.Unlock()
	collectors = append(collectors, cs...)
}

// All returns the collectors added so far.
func All() []prometheus.Collector {
	mu.Lock()
	defer mu.Unlock()
	return slices.Clone(collectors)
}

// Register puts the collectors into the registry of a config. One that is
// there already is left alone: several modules of a config may call this.
func Register(reg prometheus.Registerer) error {
	for _, c := range All() {
		if err := reg.Register(c); err != nil {
			if _, ok := err.(prometheus.AlreadyRegisteredError); ok {
				continue
			}
			return err
		}
	}
	return nil
}

// Counter makes a counter vector and adds it.
func Counter(name, help string, labels ...string) *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: Namespace, Name: name, Help: help}, labels)
	Add(c)
	return c
}

// Gauge makes a gauge vector and adds it.
func Gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: Namespace, Name: name, Help: help}, labels)
	Add(g)
	return g
}

// Desc describes a series of a collector that reads its values elsewhere.
func Desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(Namespace, "", name), help, labels, nil)
}

// Func is a collector made of descriptions and a function that sends the
// values they have now.
type Func struct {
	Descs []*prometheus.Desc
	Send  func(chan<- prometheus.Metric)
}

// Describe implements prometheus.Collector.
func (f Func) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range f.Descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (f Func) Collect(ch chan<- prometheus.Metric) { f.Send(ch) }
