package wasmbin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/sys"

	"github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestNumbers(t *testing.T) {
	for in, want := range map[string]int64{
		"\x00": 0, "\x3f": 63, "\x40": -64, "\x7f": -1, "\x80\x01": 128, "\xff\x7e": -129,
		"\xff\xff\xff\xff\x07": 1<<31 - 1, "\x80\x80\x80\x80\x78": -1 << 31, "\x80\x80\x80\x80\x00": 0,
	} {
		r := reader{b: []byte(in)}
		if got := r.signed(32); got != want || r.err != nil || r.left() != 0 {
			t.Errorf("signed(% x) = %d, %v with %d left, want %d", in, got, r.err, r.left(), want)
		}
	}
	for _, in := range []string{"", "\x80", "\x80\x80\x80\x80\x08", "\xff\xff\xff\xff\x4f", "\x80\x80\x80\x80\x80\x00"} {
		r := reader{b: []byte(in)}
		if got := r.signed(32); r.err == nil {
			t.Errorf("signed(% x) = %d, want an error", in, got)
		}
	}
	for _, v := range []uint32{0, 127, 128, 1 << 31, 1<<32 - 1} {
		r := reader{b: appendU32(nil, v)}
		if got := r.u32(); got != v || r.err != nil || r.left() != 0 {
			t.Errorf("u32(% x) = %d, %v", r.b, got, r.err)
		}
	}
	for _, v := range []int32{0, 63, 64, -64, -65, 1<<31 - 1, -1 << 31} {
		r := reader{b: appendS32(nil, v)}
		if got := r.signed(32); got != int64(v) || r.err != nil || r.left() != 0 {
			t.Errorf("signed(% x) = %d, %v, want %d", r.b, got, r.err, v)
		}
	}
	for _, in := range []string{"\x80\x80\x80\x80\x10", "\xff\xff\xff\xff\xff\x01"} {
		r := reader{b: []byte(in)}
		if got := r.u32(); r.err == nil {
			t.Errorf("u32(% x) = %d, want an error", in, got)
		}
	}
}

// withLocals is a module of one function with n locals.
func withLocals(n int, code ...[]byte) []byte {
	b := cat([]byte{1}, u(n), []byte{I32}, cat(code...), []byte{opEnd})
	return module(oneType, section(secFunction, vec([]byte{0})), section(secMemory, []byte{1, 0, 1}), section(secCode, vec(sized(b))))
}

func nested(n int) []byte { return cat(repeat(n, opBlock, 0x40), repeat(n, opEnd)) }

// fills are n instructions in a row that fill 16 MiB of memory each.
func fills(n int) []byte {
	return repeat(n, cat([]byte{opI32Const, 0, opI32Const, 0, opI32Const}, appendS32(nil, 16<<20), []byte{opMisc, 11, 0})...)
}

// withMemory is a module whose function f, of this code, has 16 MiB of memory.
func withMemory(code []byte) []byte {
	body := cat([]byte{0}, code, []byte{opEnd})
	return module(oneType, section(secFunction, vec([]byte{0})), section(secMemory, []byte{1, 0, 0x80, 0x02}), exporting, section(secCode, vec(sized(body))))
}

func ifs(n int) []byte { return repeat(n, opI32Const, 0, opIf, 0x40, opElse, opEnd) }

// Each of these would cost a compiler seconds or gigabytes.
func TestBombsAreRefused(t *testing.T) {
	var gets []byte
	for i := range 1000 {
		gets = cat(gets, []byte{opLocalGet}, u(i), []byte{0x1a})
	}
	for name, tc := range map[string]struct {
		in   []byte
		want string
	}{
		"50 M locals":               {withLocals(50_000_000), "locals"},
		"locals over all functions": {module(oneType, section(secFunction, u(100), repeat(100, 0)), section(secCode, u(100), repeat(100, sized(cat([]byte{1}, u(4000), []byte{I32, opEnd}))...))), "locals together"},
		"locals that wrap":          {module(oneType, section(secFunction, vec([]byte{0})), section(secCode, vec(sized(cat([]byte{2}, u(4000), []byte{I32}, u(1<<32-1), []byte{I32, opEnd}))))), "locals"},
		"20k nested blocks":         {withLocals(1, nested(20_000)), "nested blocks"},
		"the most nested blocks":    {withLocals(1, nested(80_000)), "nested blocks"},
		"200k nested blocks":        {withLocals(1, nested(200_000)), "bytes of code"},
		"nested blocks often":       {module(oneType, funcs(100, nested(1000))), "too long"},
		"1 M functions":             {module(oneType, funcs(1_000_000)), "functions"},
		"1 M types":                 {module(section(secType, u(1_000_000), repeat(1_000_000, 0x60, 0, 0))), "types"},
		"1 M globals":               {module(section(secGlobal, u(1_000_000), repeat(1_000_000, I32, 0, opI32Const, 0, opEnd))), "globals"},
		"8 MiB of code":             {module(oneType, funcs(1, repeat(8<<20-100, 0x01))), "bytes of code"},
		"2 MiB of loads":            {module(oneType, section(secFunction, u(8), repeat(8, 0)), section(secMemory, []byte{1, 0, 1}), section(secCode, u(8), repeat(8, sized(cat([]byte{1, 1, I32}, repeat(28_000, opLocalGet, 0, 0x28, 2, 0, opLocalSet, 0), []byte{opEnd}))...))), "too long"},
		"10^6 fills of 16 MiB":      {withMemory(fills(1_000_000)), "bytes of code"},
		"a br_table of 1 M":         {withLocals(1, []byte{opI32Const, 0, opBrTable}, u(1_000_000), repeat(1_000_001, 0)), "bytes of code"},
		"a br_table of 100,000":     {withLocals(1, []byte{opI32Const, 0, opBrTable}, u(100_000), repeat(100_001, 0)), "targets"},
		"1 M data segments":         {module(section(secMemory, []byte{1, 0, 1}), section(secData, u(1_000_000), repeat(1_000_000, 1, 0))), "data segments"},
		"announced data segments":   {module(section(secDataCount, u(1_000_000))), "data segments"},
		"elements":                  {module(oneType, section(secFunction, vec([]byte{0})), section(secElement, u(1), []byte{1, 0}, u(100_000), repeat(100_000, 0))), "elements"},
		"branches":                  {withLocals(1, ifs(10_000)), "too long"},
		"branches over locals":      {withLocals(1000, ifs(2000), gets), "too long"},
		"loops over locals":         {withLocals(1000, repeat(500, opLoop, 0x40), gets, repeat(500, opEnd)), "too long"},
		"values of types":           {module(section(secType, u(4000), repeat(4000, cat([]byte{0x60, 100}, repeat(100, I32), []byte{0})...))), "values"},
		"a table of 10^5":           {module(section(secTable, vec(cat([]byte{FuncRef, 0}, u(100_000))))), "table entries"},
		"a table of 10^8":           {module(section(secTable, vec(cat([]byte{FuncRef, 0}, u(100_000_000))))), "table entries"},
		"100 tables":                {module(section(secTable, u(100), repeat(100, FuncRef, 0, 1))), "tables"},
		"tables that wrap":          {module(section(secTable, u(2), repeat(2, FuncRef, 0, 0xff, 0xff, 0xff, 0xff, 0x0f))), "table entries"},
		"exports":                   {module(section(secExport, u(10_000), repeat(10_000, 0, 0, 0))), "exports"},
		"imports":                   {module(section(secImport, u(10_000), repeat(10_000, 0, 0, 3, I32, 0))), "imports"},

		"two memories":       {module(section(secMemory, []byte{2, 0, 1, 0, 1})), "memories"},
		"a memory64":         {module(section(secMemory, []byte{1, 4, 1})), "64 bits"},
		"a shared memory":    {module(section(secMemory, []byte{1, 3, 1, 1})), "shared"},
		"threads":            {withLocals(1, []byte{0xfe, 0x03, 0}), "opcode 0xfe"},
		"a tail call":        {withLocals(1, []byte{0x12, 0}), "opcode 0x12"},
		"exceptions":         {module(section(13, []byte{0})), "section with id 13"},
		"relaxed SIMD":       {withLocals(1, []byte{0xfd, 0x80, 0x02}), "opcode 0xfd"},
		"sections twice":     {module(oneType, oneType), "twice"},
		"sections reversed":  {module(section(secMemory, []byte{1, 0, 1}), oneType), "out of order"},
		"no end":             {module(oneType, section(secFunction, vec([]byte{0})), section(secCode, vec(sized([]byte{0, 0x01})))), "cut short"},
		"code after end":     {module(oneType, funcs(1, []byte{opEnd})), "after its end"},
		"the new global":     {withLocals(1, []byte{opI32Const, 0, opGlobalSet, 0}), "no global"},
		"the inner function": {withLocals(1, []byte{opCall, 1}), "no function 1"},
		"a function by ref":  {withLocals(1, []byte{opRefFunc, 1, 0x1a}), "no function 1"},
		"an inner export":    {module(oneType, section(secFunction, vec([]byte{0})), section(secExport, vec([]byte{1, 'f', 0, 1})), section(secCode, vec(sized([]byte{0, opEnd})))), "shows number 1 of 1"},
		"an inner element":   {module(oneType, section(secFunction, vec([]byte{0})), section(secElement, vec([]byte{1, 0, 1, 1}))), "no function 1"},
		"an inner start":     {module(oneType, section(secFunction, vec([]byte{0})), section(secStart, []byte{1})), "no function 1"},
	} {
		t.Run(name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			began := time.Now()
			_, err := Walk(tc.in, &testLimits)
			took := time.Since(began)
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Walk = %v, want an error with %q", err, tc.want)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 100*uint64(len(tc.in))+64<<10 {
				t.Errorf("%d bytes were allocated for %d", n, len(tc.in))
			}
			t.Logf("%d bytes refused in %v", len(tc.in), took)
			if testkit.Soak() && !testkit.Race && took > 50*time.Millisecond {
				t.Errorf("refused after %v", took)
			}
		})
	}
}

func TestCustoms(t *testing.T) {
	in := module(section(0, sized([]byte("a")), []byte("xyz")), oneType, section(0, sized([]byte("b"))), section(0, sized([]byte("a"))))
	list, err := Customs(in)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range list {
		got = append(got, c.Name+"="+string(c.Content))
	}
	if s := strings.Join(got, " "); s != "a=xyz b= a=" {
		t.Errorf("Customs = %s", s)
	}
	for name, in := range map[string][]byte{
		"empty": {}, "header": header[:7], "version 2": []byte("\x00asm\x02\x00\x00\x00"), "component": []byte("\x00asm\x0d\x00\x01\x00"),
		"cut": in[:len(in)-1], "a bad name": module(section(0, sized([]byte{0xff}))), "no name": module(section(0)),
		"1001": module(bytes.Repeat(section(0, []byte{0}), 1001)),
	} {
		if _, err := Customs(in); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func newRuntime(t testing.TB) (context.Context, wazero.Runtime) {
	ctx := context.Background()
	r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithCloseOnContextDone(true))
	t.Cleanup(func() { r.Close(ctx) })
	return ctx, r
}

func rewritten(t testing.TB, in []byte) []byte {
	t.Helper()
	m, err := Walk(in, &testLimits)
	if err != nil {
		t.Fatal(err)
	}
	return m.Rewrite(1 << 20)
}

// run has a module's export "f" called after Rewrite, for at most a second.
func run(t *testing.T, in []byte, args ...uint64) ([]uint64, error) {
	t.Helper()
	ctx, r := newRuntime(t)
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	mod, err := r.Instantiate(ctx, rewritten(t, in))
	if err != nil {
		t.Fatal(err)
	}
	return mod.ExportedFunction("f").Call(ctx, args...)
}

// exporting shows function 0 as f.
var exporting = section(secExport, vec([]byte{1, 'f', 0, 0}))

func TestEndlessRecursionTraps(t *testing.T) {
	for name, in := range map[string][]byte{
		"itself": module(oneType, section(secFunction, vec([]byte{0})), exporting, section(secCode, vec(sized([]byte{0, opCall, 0, opEnd})))),
		"mutual": module(oneType, section(secFunction, vec([]byte{0}, []byte{0})), exporting,
			section(secCode, vec(sized([]byte{0, opCall, 1, opEnd}), sized([]byte{0, opCall, 0, opEnd})))),
		"through a table": module(oneType, section(secFunction, vec([]byte{0})), section(secTable, vec([]byte{FuncRef, 0, 1})), exporting,
			section(secElement, vec([]byte{0, opI32Const, 0, opEnd, 1, 0})),
			section(secCode, vec(sized([]byte{0, opI32Const, 0, opCallIndirect, 0, 0, opEnd})))),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := run(t, in); err == nil || !strings.Contains(err.Error(), "unreachable") {
				t.Errorf("the call ended with %v, want the trap of the wrapper", err)
			}
		})
	}
}

// A tree of calls without a loop, or a row of long instructions, never comes to
// the head of a loop by itself.
func TestDeadlineStopsCodeWithoutLoops(t *testing.T) {
	var bodies [][]byte
	for i := range 60 {
		bodies = append(bodies, sized(cat([]byte{0, opCall}, u(i+1), []byte{opCall}, u(i+1), []byte{opEnd})))
	}
	bodies = append(bodies, sized([]byte{0, opEnd}))
	most := 1 << 20
	for ; most > 1; most /= 2 { // that are let through
		if _, err := Walk(withMemory(fills(most)), &testLimits); err == nil {
			break
		}
	}
	if t.Logf("%d fills in a row", most); most < 1000 {
		t.Errorf("no more than %d fills in a row are let through", most)
	}
	for name, in := range map[string][]byte{
		"calls": module(oneType, section(secFunction, u(61), repeat(61, 0)), exporting, section(secCode, vec(bodies...))),
		"fills": withMemory(fills(most)),
	} {
		t.Run(name, func(t *testing.T) {
			ctx, r := newRuntime(t)
			mod, err := r.Instantiate(ctx, rewritten(t, in))
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			_, err = mod.ExportedFunction("f").Call(ctx)
			var exit *sys.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != sys.ExitCodeDeadlineExceeded {
				t.Errorf("the call ended with %v, want the deadline", err)
			}
		})
	}
}

func TestTablesCannotGrow(t *testing.T) {
	for name, tc := range map[string]struct {
		table []byte
		grow  int32
		want  int32
	}{
		"within":          {[]byte{FuncRef, 0, 1}, 100, 1},
		"beyond":          {[]byte{FuncRef, 0, 1}, 16384, -1},
		"its own limit":   {[]byte{FuncRef, 1, 1, 2}, 2, -1},
		"a large limit":   {cat([]byte{FuncRef, 1, 1}, u(1<<30)), 20000, -1},
		"to the limit":    {[]byte{FuncRef, 0, 1}, 16383, 1},
		"an extern table": {[]byte{ExternRef, 0, 2}, 16383, -1},
	} {
		t.Run(name, func(t *testing.T) {
			code := cat([]byte{0, opRefNull, tc.table[0], opI32Const}, appendS32(nil, tc.grow), []byte{opMisc, 15, 0, opEnd})
			got, err := run(t, module(section(secType, vec([]byte{0x60, 0, 1, I32})), section(secFunction, vec([]byte{0})), section(secTable, vec(tc.table)), exporting, section(secCode, vec(sized(code)))))
			if err != nil || int32(got[0]) != tc.want {
				t.Errorf("table.grow = %v, %v, want %d", got, err, tc.want)
			}
		})
	}
}

// The counter of the stack is right again after each call, also when calls
// have parameters and several results.
func TestCallsCanGoOn(t *testing.T) {
	types := section(secType, vec([]byte{0x60, 2, I64, I32, 2, I32, I64}, []byte{0x60, 1, I32, 1, I64}))
	swap := sized([]byte{0, opLocalGet, 1, opLocalGet, 0, opEnd})
	// Swaps (1, n) as often as asked and adds up what comes back.
	loop := sized([]byte{1, 1, I64, opLoop, 0x40,
		opI64Const, 1, opLocalGet, 0, opCall, 1, opLocalGet, 1, 0x7c, opLocalSet, 1, 0x1a,
		opLocalGet, 0, opI32Const, 1, opI32Sub, opLocalTee, 0, opBrIf, 0, opEnd, opLocalGet, 1, opEnd})
	in := module(types, section(secFunction, vec([]byte{1}, []byte{0})), exporting, section(secCode, vec(loop, swap)))
	got, err := run(t, in, 100_000)
	if err != nil || got[0] != 100_000 {
		t.Errorf("f = %v, %v, want 100000", got, err)
	}
}

// What Walk accepts is valid before Rewrite exactly when it is after, and does
// the same.
func FuzzWalk(f *testing.F) {
	for _, in := range seeds() {
		f.Add(in)
	}
	limits := testLimits
	limits.Cost = 20e6
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 64<<10 {
			return
		}
		customs, errCustoms := Customs(in)
		m, err := Walk(in, &limits)
		if err != nil {
			return
		}
		if errCustoms == nil && len(customs) > maxCustoms {
			t.Errorf("%d custom sections", len(customs))
		}
		if len(m.Memories) > 0 && m.Memories[0].Min > 256 {
			return
		}
		before := m.rewrite(false, 0)
		after := m.Rewrite(1 << 20)
		if _, err := Walk(after, &Limits{
			Types: 5000, Functions: 20000, Imports: 1000, Exports: 4096, Globals: 5000, Values: 128, AllValues: 1 << 20,
			DataSegments: 4096, ElementSegments: 1024, Elements: 16384, Tables: 16, TableEntries: 16384,
			Locals: 4096, AllLocals: 1 << 20, Nesting: 1025, Body: 1 << 20, AllBodies: 8 << 20, Targets: 4096, Cost: 1 << 60,
		}); err != nil {
			t.Fatalf("the rewritten module is refused: %v\n% x", err, after)
		}
		if len(m.Imports) > 0 {
			return
		}
		two, errTwo := observe(t, after)
		if two == late {
			return // nothing may stop the other one
		}
		one, errOne := observe(t, before)
		if (errOne == nil) != (errTwo == nil) {
			t.Fatalf("compiles %v, rewritten %v\n% x", errOne, errTwo, in)
		}
		if one != two && one != late {
			t.Errorf("it does %s, rewritten %s\n% x", one, two, in)
		}
	})
}

// observe compiles a module, calls what it shows without parameters, and says
// what came of it.
func observe(t *testing.T, in []byte) (string, error) {
	ctx := context.Background()
	r := wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithCloseOnContextDone(true).WithMemoryLimitPages(256))
	defer r.Close(ctx)
	c, err := r.CompileModule(ctx, in)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	mod, err := r.InstantiateModule(ctx, c, wazero.NewModuleConfig().WithStartFunctions())
	if err != nil {
		return outcome("", err), nil
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(c.ExportedFunctions())) {
		f := mod.ExportedFunction(name)
		types := slices.Concat(f.Definition().ParamTypes(), f.Definition().ResultTypes())
		if slices.ContainsFunc(types, func(t api.ValueType) bool { return t < api.ValueTypeF64 }) {
			continue // vectors take two places, and references are addresses
		}
		args := make([]uint64, len(f.Definition().ParamTypes()))
		got, err := f.Call(ctx, args...)
		if err != nil {
			return outcome(b.String(), err), nil
		}
		for i, v := range got {
			switch f.Definition().ResultTypes()[i] {
			case api.ValueTypeF32, api.ValueTypeF64:
				v = 0 // the bits of a NaN are not set by the standard
			}
			fmt.Fprintf(&b, "%x,", v)
		}
		b.WriteByte(';')
	}
	return b.String(), nil
}

// late is what is observed of a module that runs out of time.
const late = "late"

// outcome adds the end of a call, all kinds of which are alike: the wrapper
// makes a trap of an overflow of the stack.
func outcome(before string, err error) string {
	var exit *sys.ExitError
	if errors.As(err, &exit) {
		return late
	}
	return before + "fails"
}
