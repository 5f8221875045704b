package wasm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/tetratelabs/wazero"

	"github.com/wayhouse-proxy/wayhouse/internal/wasmbin"
)

// MaxSize is the largest module in bytes.
const MaxSize = 8 << 20

// abiSection holds the version of the ABI that a module is built for.
const abiSection = "wayhouse.abi"

// The version of the ABI that this host speaks. While the major number is 0, a
// module has to have the same.
const (
	abiMajor = 0
	abiMinor = 1
)

// Reason names the check that a module has failed.
type Reason string

// The reasons, in the order of the checks.
const (
	Empty            Reason = "empty"
	TooLarge         Reason = "too_large"
	Compile          Reason = "compile"
	ABIMissing       Reason = "abi_missing"
	ABIMalformed     Reason = "abi_malformed"
	ABIIncompatible  Reason = "abi_incompatible"
	UnexpectedImport Reason = "unexpected_import"
	MissingExport    Reason = "missing_export"
	WrongSignature   Reason = "wrong_signature"
	Instantiate      Reason = "instantiate"
)

// Refusal is the error of a module that cannot be loaded.
type Refusal struct {
	Reason Reason
	err    error
}

func (r *Refusal) Error() string { return string(r.Reason) + ": " + r.err.Error() }
func (r *Refusal) Unwrap() error { return r.err }

func refuse(reason Reason, format string, args ...any) error {
	return &Refusal{reason, fmt.Errorf(format, args...)}
}

// bounds hold for every module, so that what is compiled takes at most half a
// second and 256 MiB.
var bounds = wasmbin.Limits{
	Types: 4096, Values: 128, AllValues: 65536, Functions: 8192, Imports: 1000, Exports: 4096, Globals: 4096,
	DataSegments: 4096, ElementSegments: 1024, Elements: maxEntries, Tables: 16, TableEntries: maxEntries,
	Locals: 4096, AllLocals: 200_000, Nesting: 1024, Body: 256 << 10, AllBodies: 2 << 20, Targets: 4096,
	Cost: 500e6,
}

const (
	maxEntries = 16384   // of all tables of an instance
	maxStack   = 1 << 20 // bytes of a call's stack, roughly
	pageSize   = 64 << 10
)

// parse makes the checks that need no compiler, and leaves those of imports
// and exports to checkInterface, as they come after the compiler's.
func parse(b []byte) (*wasmbin.Module, error) {
	switch {
	case len(b) == 0:
		return nil, refuse(Empty, "the file is empty")
	case len(b) > MaxSize:
		return nil, refuse(TooLarge, "%d bytes are more than %d", len(b), MaxSize)
	}
	customs, err := wasmbin.Customs(b)
	if err != nil {
		return nil, &Refusal{Compile, err}
	}
	if err := checkABI(customs); err != nil {
		return nil, err
	}
	m, err := wasmbin.Walk(b, &bounds)
	if err != nil {
		return nil, &Refusal{Compile, err}
	}
	return m, nil
}

func checkABI(customs []wasmbin.Custom) error {
	var found []byte
	n := 0
	for _, c := range customs {
		if c.Name == abiSection {
			found = c.Content
			n++
		}
	}
	switch {
	case n == 0:
		return refuse(ABIMissing, "there is no section %s, which names the ABI version", abiSection)
	case n > 1:
		return refuse(ABIMalformed, "there are %d sections %s, want one", n, abiSection)
	case len(found) != 4:
		return refuse(ABIMalformed, "the section %s has %d bytes, want 4", abiSection, len(found))
	}
	major, minor := binary.LittleEndian.Uint16(found), binary.LittleEndian.Uint16(found[2:])
	if major != abiMajor || minor != abiMinor {
		return refuse(ABIIncompatible, "built for ABI %d.%d, this proxy speaks %d.%d", major, minor, abiMajor, abiMinor)
	}
	return nil
}

// exports are what a module has to show, in the order of the checks.
var exports = []struct {
	name            string
	kind            byte
	params, results []byte
}{
	{name: "memory", kind: wasmbin.Memory},
	{name: "alloc", kind: wasmbin.Function, params: []byte{wasmbin.I32}, results: []byte{wasmbin.I32}},
	{name: "sniff", kind: wasmbin.Function, params: []byte{wasmbin.I32, wasmbin.I32, wasmbin.I32, wasmbin.I32}, results: []byte{wasmbin.I64}},
}

func checkInterface(m *wasmbin.Module) error {
	if len(m.Imports) > 0 {
		i := m.Imports[0]
		return refuse(UnexpectedImport, "%s::%s", i.Module, i.Name)
	}
	find := func(name string) int {
		return slices.IndexFunc(m.Exports, func(e wasmbin.Export) bool { return e.Name == name })
	}
	for _, want := range exports {
		if find(want.name) < 0 {
			return refuse(MissingExport, "there is no %s", want.name)
		}
	}
	for _, want := range exports {
		e := m.Exports[find(want.name)]
		if e.Kind != want.kind {
			return refuse(WrongSignature, "%s is of another kind", want.name)
		}
		if want.kind != wasmbin.Function {
			continue
		}
		if t := m.FuncType(e.Index); !slices.Equal(t.Params, want.params) || !slices.Equal(t.Results, want.results) {
			return refuse(WrongSignature, "%s takes and gives other values", want.name)
		}
	}
	return nil
}

// valid compiles a module that imports something, only to find out whether it
// is valid.
func valid(ctx context.Context, r wazero.Runtime, m *wasmbin.Module) error {
	c, err := r.CompileModule(ctx, m.Rewrite(maxStack))
	if err != nil {
		return &Refusal{Compile, err}
	}
	return c.Close(ctx)
}

// reasonOf is why a module was refused, empty when err is of something else.
func reasonOf(err error) Reason {
	var r *Refusal
	if errors.As(err, &r) {
		return r.Reason
	}
	return ""
}
