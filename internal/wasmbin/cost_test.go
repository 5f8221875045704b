package wasmbin

import (
	"runtime"
	"sort"
	"syscall"
	"testing"
	"time"
)

// ingredients are modules with n of something that is dear to compile.
var ingredients = map[string]func(n int) []byte{
	"functions":   func(n int) []byte { return module(oneType, funcs(n)) },
	"nesting":     func(n int) []byte { return module(oneType, funcs(n, nested(900))) },
	"ifs":         func(n int) []byte { return withLocals(1, ifs(n)) },
	"ifs, short":  func(n int) []byte { return module(oneType, funcs(n, ifs(20))) },
	"loops":       func(n int) []byte { return withLocals(1, repeat(n, opLoop, 0x40, opEnd)) },
	"loops, deep": func(n int) []byte { return withLocals(100, repeat(n, opLoop, 0x40), gets(100), repeat(n, opEnd)) },
	"joins":       func(n int) []byte { return withLocals(1000, ifs(n), gets(1000)) },
	"targets": func(n int) []byte {
		return withLocals(1, cat(repeat(n, cat([]byte{opBlock, 0x40, opLocalGet, 0, opBrTable}, u(50), repeat(51, 0), []byte{opEnd})...)))
	},
	"loads":        func(n int) []byte { return withLocals(1, repeat(n, opLocalGet, 0, 0x28, 2, 0, opLocalSet, 0)) },
	"loads, short": func(n int) []byte { return short(n, repeat(50, opLocalGet, 0, 0x28, 2, 0, opLocalSet, 0)) },
	"copies": func(n int) []byte {
		return withLocals(1, repeat(n, opLocalGet, 0, opLocalGet, 0, opLocalGet, 0, opMisc, 10, 0, 0))
	},
	"fills": func(n int) []byte {
		return withLocals(1, repeat(n, opLocalGet, 0, opLocalGet, 0, opLocalGet, 0, opMisc, 11, 0))
	},
	"divisions":   func(n int) []byte { return withLocals(1, repeat(n, opLocalGet, 0, opLocalGet, 0, 0x6d, opLocalSet, 0)) },
	"conversions": func(n int) []byte { return withLocals(1, repeat(n, opF32Const, 0, 0, 0, 1, 0xa8, opLocalSet, 0)) },
	"calls":       func(n int) []byte { return withLocals(1, repeat(n, opCall, 0)) },
	"additions": func(n int) []byte {
		return withLocals(1, repeat(n, opLocalGet, 0, opLocalGet, 0, opI32Add, opLocalSet, 0))
	},
	"indirect": func(n int) []byte {
		code := sized(cat([]byte{0}, repeat(n, opI32Const, 0, opCallIndirect, 0, 0), []byte{opEnd}))
		return module(oneType, section(secFunction, vec([]byte{0})), section(secTable, vec([]byte{FuncRef, 0, 1})), section(secCode, vec(code)))
	},
}

func gets(n int) (code []byte) {
	for i := range n {
		code = cat(code, []byte{opLocalGet}, u(i), []byte{0x1a})
	}
	return code
}

// short is n functions with a local and a memory.
func short(n int, code []byte) []byte {
	b := sized(cat([]byte{1, 1, I32}, code, []byte{opEnd}))
	return module(oneType, section(secFunction, u(n), repeat(n, 0)), section(secMemory, []byte{1, 0, 1}), section(secCode, u(n), repeat(n, b...)))
}

// The most of each ingredient that Walk accepts: what does a compiler spend on
// it? No more than half a second and 256 MiB is what Limits.Cost is there for.
func BenchmarkCompileAtTheLimit(b *testing.B) {
	for name, make := range ingredients {
		b.Run(name, func(b *testing.B) {
			n := sort.Search(300_000, func(n int) bool {
				_, err := Walk(make(n+1), &testLimits)
				return err != nil
			})
			out := rewritten(b, make(n))
			var before, after runtime.MemStats
			var cpu time.Duration // machines are shared
			for b.Loop() {
				ctx, r := newRuntime(b)
				runtime.ReadMemStats(&before)
				start := used(b)
				if _, err := r.CompileModule(ctx, out); err != nil {
					b.Fatal(err)
				}
				cpu = used(b) - start
				runtime.ReadMemStats(&after)
			}
			b.ReportMetric(cpu.Seconds()*1e3, "cpu-ms")
			b.ReportMetric(float64(n), "things")
			b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc)/(1<<20), "MiB")
		})
	}
}

// used is the CPU time of the process so far.
func used(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
