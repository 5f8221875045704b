package tracing

import (
	"net/netip"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// TestOffAllocatesNothing has the whole set-up of a flow while tracing is off.
func TestOffAllocatesNothing(t *testing.T) {
	client, path, at := netip.MustParseAddrPort("192.0.2.1:7"), new(relay.Path), time.Now()
	if n := testing.AllocsPerRun(100, func() {
		s := Begin(at, Flow{Listener: "l", Client: client, Local: client})
		s.Step(Peek, at, at)
		parent, end := s.Call("r")
		end("ok")
		s.Tried(path, at, at, "")
		s.End(at, path, Established)
		if On() || s != nil || parent != "" || s.TraceParent() != nil {
			t.Error("it is on")
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestUses keeps tracing on as long as somebody uses it, with one provider.
func TestUses(t *testing.T) {
	t.Setenv("OTEL_TRACES_EXPORTER", "none")
	for range 2 {
		if err := Acquire(zap.NewNop()); err != nil {
			t.Fatal(err)
		}
	}
	first := current.Load()
	if err := Release(); err != nil || current.Load() != first || first == nil {
		t.Errorf("after one of two uses: %v, %v", current.Load(), err)
	}
	s := Begin(time.Now(), Flow{})
	if p := string(s.TraceParent()); len(p) != 55 || p[:3] != "00-" || p[52:] != "-01" {
		t.Errorf("traceparent is %q", p)
	}
	s.End(time.Now(), nil, Established)
	if err := Release(); err != nil || On() {
		t.Errorf("after both: on %v, %v", On(), err)
	}
}
