package proxy

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"
)

func init() { caddy.RegisterModule(new(memory)) }

// memory is a log writer that keeps what is written, by name.
type memory struct {
	Name string `json:"name"`
}

var written struct {
	mu sync.Mutex
	to map[string]*bytes.Buffer
}

func (*memory) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.logging.writers.test_memory", New: func() caddy.Module { return new(memory) }}
}

func (m *memory) String() string                      { return "memory " + m.Name }
func (m *memory) WriterKey() string                   { return m.String() }
func (m *memory) OpenWriter() (io.WriteCloser, error) { return m, nil }
func (m *memory) Close() error                        { return nil }

func (m *memory) Write(p []byte) (int, error) {
	written.mu.Lock()
	defer written.mu.Unlock()
	if written.to == nil {
		written.to = make(map[string]*bytes.Buffer)
	}
	b := written.to[m.Name]
	if b == nil {
		b = new(bytes.Buffer)
		written.to[m.Name] = b
	}
	return b.Write(p)
}

// TestProcessLogFollowsTheConfig logs after a reload that has moved the log.
func TestProcessLogFollowsTheConfig(t *testing.T) {
	defer caddy.Stop()
	log := processLog.Named("udp").With(zap.Int("worker", 3))
	for _, name := range []string{"first", "second"} {
		config := fmt.Sprintf(`{"admin": {"disabled": true, "config": {"persist": false}}, "apps": {"wayhouse": {}},
			"logging": {"logs": {"default": {"writer": {"output": "test_memory", "name": %q}}}}}`, name)
		if err := caddy.Load([]byte(config), true); err != nil {
			t.Fatal(err)
		}
		log.Error("panic of the test", zap.String("while", name))
	}
	written.mu.Lock()
	defer written.mu.Unlock()
	for _, name := range []string{"first", "second"} {
		got := written.to[name].String()
		for _, want := range []string{`"while":"` + name, `"wayhouse.udp"`, `"worker":3`} {
			if !strings.Contains(got, want) {
				t.Errorf("the %s log has no %s:\n%s", name, want, got)
			}
		}
	}
}
