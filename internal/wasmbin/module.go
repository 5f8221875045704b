// Package wasmbin reads WebAssembly modules from people who are not trusted,
// before a compiler sees them. Walk reads a whole module and refuses one that
// would cost a compiler or an instance more than Limits allow; what it accepts
// is not valid yet, only small enough to find out. Rewrite then makes the
// module one that a deadline can stop and that cannot overflow the stack.
//
// Knows WebAssembly 2.0: SIMD, bulk memory, reference types, several results.
// Threads, tail calls, exceptions, several memories and 64-bit memories are
// refused.
package wasmbin

import (
	"bytes"
	"errors"
	"fmt"
)

// Limits are what a module may have at most.
type Limits struct {
	Types, Functions, Imports, Exports, Globals int
	Values, AllValues                           int // parameters and results of a type, and of all
	DataSegments, ElementSegments, Elements     int
	Tables, TableEntries                        int // entries: of all tables together
	Locals, AllLocals                           int // of a function with its parameters, and of all
	Nesting                                     int // blocks in blocks
	Body, AllBodies                             int // bytes of code
	Targets                                     int // of one br_table

	// Cost bounds what a compiler may spend, in nanoseconds by the estimate of
	// cost.go, which is on the high side.
	Cost int
}

// Kinds of what is imported and exported.
const (
	Function byte = iota
	Table
	Memory
	Global
)

// Type is the type of a function; each byte is a value type.
type Type struct{ Params, Results []byte }

// Value types.
const (
	I32       byte = 0x7f
	I64       byte = 0x7e
	F32       byte = 0x7d
	F64       byte = 0x7c
	V128      byte = 0x7b
	FuncRef   byte = 0x70
	ExternRef byte = 0x6f
)

// Import is something the module asks for.
type Import struct {
	Module, Name string
	Kind         byte
}

// Export is something the module shows.
type Export struct {
	Name  string
	Kind  byte
	Index uint32
}

// Custom is a custom section. Content is part of the module's bytes.
type Custom struct {
	Name    string
	Content []byte
}

// Range is the declared size of a table or a memory.
type Range struct {
	Min, Max uint32
	HasMax   bool
}

// Module is what Walk has found.
type Module struct {
	Types    []Type
	Imports  []Import
	Exports  []Export
	Memories []Range // declared and imported, at most one
	Start    bool    // has a start function

	funcs    []uint32 // the type of each function, imported ones first
	imported [4]int   // how many of each kind
	tables   []table  // declared ones
	globals  int      // imported ones too
	bodies   []body
	sections [sectionIDs][]byte // contents, nil where there is none

	limits              *Limits
	elements, values    int
	entries             uint64
	allLocals, bodySize int
	cost                int
	dataCount           int // -1 without the section
	frames              []frame
}

type table struct {
	elem byte
	Range
}

// FuncType is the type of the function with that index, nil when there is no
// such function.
func (m *Module) FuncType(index uint32) *Type {
	if uint64(index) >= uint64(len(m.funcs)) {
		return nil
	}
	return &m.Types[m.funcs[index]]
}

// Section IDs.
const (
	secCustom = iota
	secType
	secImport
	secFunction
	secTable
	secMemory
	secGlobal
	secExport
	secStart
	secElement
	secCode
	secData
	secDataCount
	sectionIDs
)

var sectionNames = [sectionIDs]string{"custom", "type", "import", "function", "table", "memory", "global", "export", "start", "element", "code", "data", "data count"}

// order is the place of each section; custom ones stand anywhere.
var order = [sectionIDs]int{
	secType: 1, secImport: 2, secFunction: 3, secTable: 4, secMemory: 5, secGlobal: 6, secExport: 7,
	secStart: 8, secElement: 9, secDataCount: 10, secCode: 11, secData: 12,
}

var header = []byte("\x00asm\x01\x00\x00\x00")

var errHeader = errors.New("not a WebAssembly module of version 1")

func tooMany(what string, n uint64, max int) error {
	return fmt.Errorf("%d %s, more than %d", n, what, max)
}

// scan calls each for every section until it fails.
func scan(b []byte, each func(id byte, content []byte) error) error {
	if !bytes.HasPrefix(b, header) {
		return errHeader
	}
	r := reader{b: b, off: len(header)}
	for r.left() > 0 {
		id := r.byte()
		size := r.u32()
		if r.err == nil && uint64(size) > uint64(r.left()) {
			r.fail(errShort)
		}
		content := r.bytes(int(size))
		if r.err != nil {
			return fmt.Errorf("section with id %d: %w", id, r.err)
		}
		if err := each(id, content); err != nil {
			return err
		}
	}
	return nil
}

// Customs lists the custom sections. It reads no other section.
func Customs(b []byte) ([]Custom, error) {
	var list []Custom
	err := scan(b, func(id byte, content []byte) error {
		if id != secCustom {
			return nil
		}
		if len(list) == maxCustoms {
			return tooMany("custom sections", maxCustoms+1, maxCustoms)
		}
		r := reader{b: content}
		c := Custom{Name: r.name()}
		if r.err != nil {
			return fmt.Errorf("custom section: %w", r.err)
		}
		c.Content = r.bytes(r.left())
		list = append(list, c)
		return nil
	})
	return list, err
}

const maxCustoms = 1000

// Walk reads a module to its last instruction.
func Walk(b []byte, limits *Limits) (*Module, error) {
	m := &Module{limits: limits, dataCount: -1}
	last := 0
	err := scan(b, func(id byte, content []byte) error {
		if id == secCustom {
			return nil
		}
		if int(id) >= sectionIDs {
			return fmt.Errorf("section with id %d is not of WebAssembly 2.0", id)
		}
		if order[id] <= last {
			return fmt.Errorf("section %s is given twice or out of order", sectionNames[id])
		}
		last = order[id]
		m.sections[id] = content
		r := &reader{b: content}
		err := m.section(id, r)
		if err == nil {
			err = r.err
		}
		if err == nil && r.left() > 0 {
			err = fmt.Errorf("%d bytes too many", r.left())
		}
		if err != nil {
			return fmt.Errorf("section %s: %w", sectionNames[id], err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if want := len(m.funcs) - m.imported[Function]; len(m.bodies) != want {
		return nil, fmt.Errorf("%d functions are declared and %d have code", want, len(m.bodies))
	}
	m.frames = nil
	return m, nil
}
