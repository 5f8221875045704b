package resolver

import (
	"context"
	"net/netip"
	"runtime"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// BenchmarkHit is what a flow pays whose answer is kept, with a full cache, and
// what an answer costs there.
func BenchmarkHit(b *testing.B) {
	does.Store(b.Name(), resolve(func(context.Context, *Request) (Answer, error) {
		return Answer{Pool: "pool-a"}, nil
	}))
	ctx, cancel := caddy.NewContext(caddy.Context{Context: b.Context()})
	defer cancel()
	config := `{"resolver": "fake", "id": "` + b.Name() + `", "timeout": "1m", "cache": {"key": ["src_ip"], "positive_ttl": "1h"}}`
	h, err := Load(ctx, b.Name(), []byte(config), func(string) bool { return true })
	if err != nil {
		b.Fatal(err)
	}
	defer h.Cleanup()
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	r := from("203.0.113.7")
	for i := range defaultMaxEntries {
		r.Client = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 1)
		if _, err := h.Resolve(r); err != nil {
			b.Fatal(err)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := h.Resolve(r); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/defaultMaxEntries, "B/answer")
}
