package wasm

import (
	"context"
	"crypto/sha256"
	"runtime"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"

	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
	"github.com/wayhouse-proxy/wayhouse/internal/wasmbin"
)

// What lives as long as the process, or as long as a config has a host.

// engines holds the one engine. Each host holds a reference.
var engines = caddy.NewUsagePool()

const engineKey = "wazero"

// limits are those of a call. They belong to a config.
type limits struct {
	timeout time.Duration
	memory  int // bytes, whole pages
}

// engine runs the modules of all configs.
type engine struct {
	runtime wazero.Runtime
	slots   chan struct{} // a call holds one; at most a core less than there are

	loading sync.Mutex // held while wazero compiles or closes a module
	modules map[[sha256.Size]byte]*module

	mu       sync.Mutex // held for moments only, as calls take it
	memories []*memory  // not in use, no more than slots
	live     []*sniffer // in the order in which they came

	files sync.Mutex // held by who changes files of modules
}

// module is a compiled module. It is found by the hash of what was compiled and
// not of the file: files that differ in custom sections only would be one
// module for wazero, and closing it for one of them would close it for all.
type module struct {
	key      [sha256.Size]byte
	compiled wazero.CompiledModule
	memory   uint64 // bytes it begins with

	refs int // guarded by engine.loading

	// Guarded by engine.mu.
	passed   map[limits]bool     // the limits under which it has been instantiated
	breakers map[string]*breaker // by name; another file under the name begins anew
}

func takeEngine() (*engine, error) {
	v, _, err := engines.LoadOrNew(engineKey, func() (caddy.Destructor, error) { return newEngine(), nil })
	if err != nil {
		return nil, err
	}
	return v.(*engine), nil
}

func (e *engine) give() error {
	_, err := engines.Delete(engineKey)
	return err
}

func newEngine() *engine {
	config := wazero.NewRuntimeConfig().
		WithCoreFeatures(api.CoreFeaturesV2).
		WithCloseOnContextDone(true).
		WithDebugInfoEnabled(false)
	return &engine{
		runtime: wazero.NewRuntimeWithConfig(context.Background(), config),
		slots:   make(chan struct{}, max(1, runtime.GOMAXPROCS(0)-1)),
		modules: make(map[[sha256.Size]byte]*module),
	}
}

// Destruct implements caddy.Destructor. All modules have been given back; the
// memory of the last calls may still be being cleared.
func (e *engine) Destruct() error {
	for range cap(e.slots) {
		e.slots <- struct{}{}
	}
	for _, m := range e.memories {
		_ = m.release()
	}
	return e.runtime.Close(context.Background())
}

// load checks a module in the order of the ABI and compiles it unless that is
// done. Who has loaded a module gives it back with unload.
func (e *engine) load(b []byte, l limits) (*module, error) {
	parsed, err := parse(b)
	if err != nil {
		return nil, err
	}
	m, err := e.compile(parsed)
	if err != nil {
		return nil, err
	}
	if err := e.try(m, l); err != nil {
		e.unload(m)
		return nil, err
	}
	return m, nil
}

// compile is one at a time: it takes a core, and the same module twice at once
// would be one module closed twice.
func (e *engine) compile(parsed *wasmbin.Module) (*module, error) {
	e.loading.Lock()
	defer e.loading.Unlock()
	ctx := context.Background()
	if len(parsed.Imports) > 0 {
		if err := valid(ctx, e.runtime, parsed); err != nil {
			return nil, err
		}
		return nil, checkInterface(parsed)
	}
	b := parsed.Rewrite(maxStack)
	key := sha256.Sum256(b)
	if m := e.modules[key]; m != nil {
		m.refs++
		return m, nil
	}
	c, err := e.runtime.CompileModule(ctx, b)
	if err != nil {
		return nil, &Refusal{Compile, err}
	}
	if err := checkInterface(parsed); err != nil {
		_ = c.Close(ctx)
		return nil, err
	}
	m := &module{
		key: key, compiled: c, memory: uint64(parsed.Memories[0].Min) * pageSize,
		refs: 1, passed: make(map[limits]bool), breakers: make(map[string]*breaker),
	}
	e.modules[key] = m
	return m, nil
}

// try instantiates a module once for each set of limits.
func (e *engine) try(m *module, l limits) error {
	if m.memory > uint64(l.memory) {
		return refuse(Instantiate, "it begins with %d bytes of memory, more than %d", m.memory, l.memory)
	}
	e.mu.Lock()
	passed := m.passed[l]
	e.mu.Unlock()
	if passed {
		return nil
	}
	if err := e.instantiate(m, l); err != nil {
		return &Refusal{Instantiate, err}
	}
	e.mu.Lock()
	m.passed[l] = true
	e.mu.Unlock()
	return nil
}

func (e *engine) unload(m *module) {
	e.loading.Lock()
	defer e.loading.Unlock()
	if m.refs--; m.refs == 0 {
		delete(e.modules, m.key)
		_ = m.compiled.Close(context.Background())
	}
}

// breaker is that of a module under a name.
func (e *engine) breaker(m *module, name string) *breaker {
	e.mu.Lock()
	defer e.mu.Unlock()
	b := m.breakers[name]
	if b == nil {
		b = new(breaker)
		m.breakers[name] = b
	}
	return b
}

// takeMemory is for who holds a slot.
func (e *engine) takeMemory(size int) (*memory, error) {
	e.mu.Lock()
	n := len(e.memories)
	if n == 0 {
		e.mu.Unlock()
		return newMemory(size)
	}
	m := e.memories[n-1]
	e.memories = e.memories[:n-1]
	e.mu.Unlock()
	if len(m.buf) == size {
		return m, nil
	}
	if err := m.release(); err != nil { // of a config with another max_memory
		return nil, err
	}
	return newMemory(size)
}

func (e *engine) giveMemory(m *memory) {
	if m.reset() != nil {
		_ = m.release()
		return
	}
	e.mu.Lock()
	e.memories = append(e.memories, m)
	e.mu.Unlock()
}

var breakerOpen = metrics.Desc("sniffer_breaker_open", "1 while a WASM sniffer is not called because it has failed too often.", "name")

func init() {
	metrics.Add(metrics.Func{Descs: []*prometheus.Desc{breakerOpen}, Send: func(ch chan<- prometheus.Metric) {
		open := make(map[string]float64)
		engines.Range(func(_, v any) bool {
			e := v.(*engine)
			e.mu.Lock()
			defer e.mu.Unlock()
			for _, s := range e.live {
				if v := open[s.name]; s.breaker.open() {
					open[s.name] = 1
				} else {
					open[s.name] = v
				}
			}
			return true
		})
		for name, v := range open {
			ch <- prometheus.MustNewConstMetric(breakerOpen, prometheus.GaugeValue, v, name)
		}
	}})
}
