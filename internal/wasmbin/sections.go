package wasmbin

import (
	"errors"
	"fmt"
)

func (m *Module) section(id byte, r *reader) error {
	switch id {
	case secType:
		return m.readTypes(r)
	case secImport:
		return m.readImports(r)
	case secFunction:
		for range r.count(m.limits.Functions, "functions") {
			m.addFunc(r)
		}
	case secTable:
		return m.readTables(r)
	case secMemory:
		for range r.count(1, "memories") {
			m.addMemory(r)
		}
	case secGlobal:
		for range r.count(m.limits.Globals, "globals") {
			valueType(r, r.byte())
			if mutable := r.byte(); mutable > 1 {
				r.fail(fmt.Errorf("%#x is no mutability", mutable))
			}
			m.constant(r)
			m.globals++
			if r.err != nil {
				break
			}
		}
	case secExport:
		return m.readExports(r)
	case secStart:
		m.Start = true
		m.funcIndex(r)
	case secElement:
		return m.readElements(r)
	case secCode:
		return m.readCode(r)
	case secData:
		return m.readData(r)
	case secDataCount:
		n := r.u32()
		if uint64(n) > uint64(m.limits.DataSegments) {
			return tooMany("data segments", uint64(n), m.limits.DataSegments)
		}
		m.dataCount = int(n)
	}
	return nil
}

func valueType(r *reader, t byte) byte {
	switch t {
	case I32, I64, F32, F64, V128, FuncRef, ExternRef:
	default:
		r.fail(fmt.Errorf("%#x is no value type", t))
	}
	return t
}

func refType(r *reader) byte {
	t := r.byte()
	if t != FuncRef && t != ExternRef {
		r.fail(fmt.Errorf("%#x is no reference type", t))
	}
	return t
}

func (m *Module) readTypes(r *reader) error {
	for range r.count(m.limits.Types, "types") {
		if form := r.byte(); r.err == nil && form != 0x60 {
			return fmt.Errorf("%#x is no function type", form)
		}
		var t Type
		for _, to := range []*[]byte{&t.Params, &t.Results} {
			*to = r.bytes(r.count(m.limits.Values, "values of a type"))
			if m.values += len(*to); m.values > m.limits.AllValues {
				return tooMany("values of types", uint64(m.values), m.limits.AllValues)
			}
			for _, v := range *to {
				valueType(r, v)
			}
		}
		if r.err != nil {
			return r.err
		}
		m.Types = append(m.Types, t)
	}
	return nil
}

func (m *Module) addFunc(r *reader) {
	t := r.u32()
	if r.err == nil && uint64(t) >= uint64(len(m.Types)) {
		r.fail(fmt.Errorf("there is no type %d", t))
	}
	if r.err == nil {
		m.funcs = append(m.funcs, t)
	}
}

func limitsOf(r *reader) (l Range) {
	switch flags := r.byte(); flags {
	case 0:
	case 1:
		l.HasMax = true
	default:
		r.fail(fmt.Errorf("limits of kind %#x: neither shared nor of 64 bits is supported", flags))
	}
	if l.Min = r.u32(); l.HasMax {
		if l.Max = r.u32(); r.err == nil && l.Max < l.Min {
			r.fail(fmt.Errorf("the maximum %d is less than the minimum %d", l.Max, l.Min))
		}
	}
	return l
}

func (m *Module) addMemory(r *reader) {
	l := limitsOf(r)
	if r.err == nil && len(m.Memories) == 1 {
		r.fail(errors.New("a second memory"))
	}
	if r.err == nil {
		m.Memories = append(m.Memories, l)
	}
}

func (m *Module) tableRange(r *reader) table {
	t := table{elem: refType(r), Range: limitsOf(r)}
	m.entries += uint64(t.Min)
	if m.entries > uint64(m.limits.TableEntries) {
		r.fail(tooMany("table entries", m.entries, m.limits.TableEntries))
	}
	return t
}

func (m *Module) readTables(r *reader) error {
	for range r.count(m.limits.Tables, "tables") {
		if t := m.tableRange(r); r.err == nil {
			m.tables = append(m.tables, t)
		}
	}
	return nil
}

func (m *Module) readImports(r *reader) error {
	for range r.count(m.limits.Imports, "imports") {
		i := Import{Module: r.name(), Name: r.name(), Kind: r.byte()}
		if r.err != nil {
			return r.err
		}
		switch i.Kind {
		case Function:
			m.addFunc(r)
		case Table:
			m.tableRange(r)
		case Memory:
			m.addMemory(r)
		case Global:
			valueType(r, r.byte())
			r.byte()
			m.globals++
		default:
			return fmt.Errorf("%s::%s is of the unknown kind %#x", i.Module, i.Name, i.Kind)
		}
		m.imported[i.Kind]++
		m.Imports = append(m.Imports, i)
	}
	return nil
}

func (m *Module) readExports(r *reader) error {
	for range r.count(m.limits.Exports, "exports") {
		e := Export{Name: r.name(), Kind: r.byte(), Index: r.u32()}
		if r.err != nil {
			return r.err
		}
		if e.Kind > Global {
			return fmt.Errorf("%q is of the unknown kind %#x", e.Name, e.Kind)
		}
		// An index that does not exist here may exist after Rewrite.
		if n := m.count(e.Kind); uint64(e.Index) >= uint64(n) {
			return fmt.Errorf("%q shows number %d of %d", e.Name, e.Index, n)
		}
		m.Exports = append(m.Exports, e)
	}
	return nil
}

// count is how many there are of a kind.
func (m *Module) count(kind byte) int {
	switch kind {
	case Function:
		return len(m.funcs)
	case Table:
		return m.imported[Table] + len(m.tables)
	case Memory:
		return len(m.Memories)
	}
	return m.globals
}

func (m *Module) funcIndex(r *reader) uint32 {
	i := r.u32()
	if r.err == nil && uint64(i) >= uint64(len(m.funcs)) {
		r.fail(fmt.Errorf("there is no function %d", i))
	}
	return i
}

func (m *Module) globalIndex(r *reader) {
	if i := r.u32(); r.err == nil && uint64(i) >= uint64(m.globals) {
		r.fail(fmt.Errorf("there is no global %d", i))
	}
}

// constant reads a constant expression of one instruction.
func (m *Module) constant(r *reader) {
	switch op := r.byte(); op {
	case opI32Const:
		r.signed(32)
	case opI64Const:
		r.signed(64)
	case opF32Const:
		r.bytes(4)
	case opF64Const:
		r.bytes(8)
	case opGlobalGet:
		m.globalIndex(r)
	case opRefNull:
		refType(r)
	case opRefFunc:
		m.funcIndex(r)
	case opVector:
		if r.u32() != vecConst {
			r.fail(errors.New("a vector instruction in a constant"))
		}
		r.bytes(16)
	default:
		r.fail(fmt.Errorf("opcode %#x in a constant", op))
	}
	if end := r.byte(); r.err == nil && end != opEnd {
		r.fail(errors.New("a constant of more than one instruction"))
	}
}

func (m *Module) readElements(r *reader) error {
	for range r.count(m.limits.ElementSegments, "element segments") {
		flags := r.u32()
		if flags > 7 {
			return fmt.Errorf("element segment of the unknown kind %d", flags)
		}
		active, explicit, exprs := flags&1 == 0, flags&2 != 0, flags&4 != 0
		if active && explicit {
			r.u32() // table
		}
		if active {
			m.constant(r)
		}
		switch {
		case !active && exprs, active && explicit && exprs:
			refType(r)
		case !active, explicit:
			if kind := r.byte(); kind != 0 {
				r.fail(fmt.Errorf("elements of the unknown kind %#x", kind))
			}
		}
		n := r.count(m.limits.Elements-m.elements, "elements more")
		m.elements += n
		for range n {
			if exprs {
				m.constant(r)
			} else {
				m.funcIndex(r)
			}
			if r.err != nil {
				return r.err
			}
		}
	}
	return nil
}

func (m *Module) readData(r *reader) error {
	n := r.count(m.limits.DataSegments, "data segments")
	if m.dataCount >= 0 && n != m.dataCount {
		return fmt.Errorf("%d segments where %d were announced", n, m.dataCount)
	}
	for range n {
		flags := r.u32()
		if flags > 2 {
			return fmt.Errorf("data segment of the unknown kind %d", flags)
		}
		if flags == 2 {
			r.u32() // memory
		}
		if flags != 1 {
			m.constant(r)
		}
		r.bytes(r.count(len(r.b), "bytes"))
		if r.err != nil {
			return r.err
		}
	}
	return nil
}

func (m *Module) readCode(r *reader) error {
	want := len(m.funcs) - m.imported[Function]
	if n := r.count(m.limits.Functions, "functions"); r.err == nil && n != want {
		return fmt.Errorf("code of %d functions where %d are declared", n, want)
	}
	if r.err != nil {
		return r.err
	}
	m.bodies = make([]body, 0, want)
	for i := range want {
		size := r.u32()
		if r.err == nil && uint64(size) > uint64(m.limits.Body) {
			r.fail(tooMany("bytes of code", uint64(size), m.limits.Body))
		}
		if m.bodySize += int(size); r.err == nil && m.bodySize > m.limits.AllBodies {
			r.fail(tooMany("bytes of code together", uint64(m.bodySize), m.limits.AllBodies))
		}
		code := &reader{b: r.bytes(int(size))}
		if r.err == nil {
			m.readBody(code, i)
			r.fail(code.err)
		}
		if r.err != nil {
			return fmt.Errorf("function %d: %w", m.imported[Function]+i, r.err)
		}
	}
	return nil
}
