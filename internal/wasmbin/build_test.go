package wasmbin

import (
	"bytes"
	"os"
	"path/filepath"
)

// The tests make modules of parts.

var testLimits = Limits{
	Types: 4096, Functions: 8192, Imports: 1000, Exports: 4096, Globals: 4096, Values: 128, AllValues: 65536,
	DataSegments: 4096, ElementSegments: 1024, Elements: 16384, Tables: 16, TableEntries: 16384,
	Locals: 4096, AllLocals: 200_000, Nesting: 1024, Body: 256 << 10, AllBodies: 2 << 20, Targets: 4096,
	Cost: 500e6,
}

func cat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func u(v int) []byte { return appendU32(nil, uint32(v)) }

func sized(b []byte) []byte { return cat(u(len(b)), b) }

func section(id byte, content ...[]byte) []byte { return cat([]byte{id}, sized(cat(content...))) }

// vec is a list with its length in front.
func vec(items ...[]byte) []byte { return cat(u(len(items)), cat(items...)) }

func module(sections ...[]byte) []byte { return cat(header, cat(sections...)) }

// oneType is the section with () → () only.
var oneType = section(secType, vec([]byte{0x60, 0, 0}))

// funcs are n functions of type 0 with this code behind no locals.
func funcs(n int, code ...[]byte) []byte {
	return cat(section(secFunction, u(n), bytes.Repeat([]byte{0}, n)),
		section(secCode, u(n), bytes.Repeat(sized(cat([]byte{0}, cat(code...), []byte{opEnd})), n)))
}

func repeat(n int, b ...byte) []byte { return bytes.Repeat(b, n) }

// seeds are the guests of the sniffer host and modules of the tests.
func seeds() [][]byte {
	list := [][]byte{
		module(oneType, funcs(3)),
		module(oneType, section(secFunction, vec([]byte{0})), exporting, section(secCode, vec(sized([]byte{0, opCall, 0, opEnd})))),
		withLocals(3, nested(10), ifs(5), []byte{opI32Const, 1, opLocalTee, 0, 0x1a}),
		withLocals(1, []byte{opI32Const, 0, opBrTable, 2, 0, 0, 0}),
		withLocals(1, []byte{opI32Const, 0, opI32Const, 1, opI32Const, 64, opMisc, 11, 0}),
		withLocals(1, cat([]byte{opVector, vecConst}, repeat(16, 1), []byte{opVector, 99, opLocalSet, 0})),
		module(oneType, section(secFunction, vec([]byte{0})), section(secTable, vec([]byte{FuncRef, 0, 1})), exporting,
			section(secElement, vec([]byte{0, opI32Const, 0, opEnd, 1, 0})),
			section(secCode, vec(sized([]byte{0, opI32Const, 0, opCallIndirect, 0, 0, opEnd})))),
	}
	files, _ := filepath.Glob("../../modules/sniff/wasm/testdata/guests/*.wasm")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil {
			list = append(list, b)
		}
	}
	return list
}
