package wasmbin

import "slices"

// checkEvery is how many calls pass between two looks at the deadline. It is a
// power of two.
const checkEvery = 512

// Rewrite returns the module in a form that cannot overflow the stack and that
// a deadline stops soon, for a compiler that checks its deadline at the head of
// loops only:
//
//   - Every function becomes a wrapper under its old number and, behind all
//     wrappers, its code. The wrapper adds the weight of the function to a
//     counter, traps above stack, calls the code and takes the weight off
//     again. The counter is a new global, which no code of the module can name,
//     as Walk has refused numbers that did not exist. After a trap it is not put
//     right: an instance that has trapped is not to be called again.
//   - A second counter sends every so many calls through an empty loop, and so
//     does a call put before each instruction that works on a whole range of
//     memory or of a table. No other instruction is changed.
//   - Tables get a maximum, so that they cannot grow beyond the limit.
//   - Custom sections are left out.
//
// A module that imports functions or globals keeps its code as it is, fit for
// finding out whether it is valid and not for running.
func (m *Module) Rewrite(stack int64) []byte {
	return m.rewrite(len(m.bodies) > 0 && m.imported[Function] == 0 && m.imported[Global] == 0, stack)
}

func (m *Module) rewrite(wrap bool, stack int64) []byte {
	out := slices.Clone(header)
	for id := secType; id < sectionIDs; id++ {
		at := sectionAt[id]
		content := m.sections[at]
		switch {
		case at == secTable && content != nil:
			content = m.newTables()
		case wrap && at == secType:
			content = appendU32(nil, uint32(len(m.Types)+1))
			content = append(content, afterCount(m.sections[at])...)
			content = append(content, 0x60, 0, 0)
		case wrap && at == secFunction:
			content = m.newFunctions()
		case wrap && at == secGlobal:
			content = appendU32(nil, uint32(m.globals+2))
			content = append(content, afterCount(m.sections[at])...)
			for range 2 {
				content = append(content, I32, 1, opI32Const, 0, opEnd)
			}
		case wrap && at == secCode:
			content = m.newCode(stack)
		}
		if content != nil {
			out = append(out, byte(at))
			out = appendU32(out, uint32(len(content)))
			out = append(out, content...)
		}
	}
	return out
}

// sectionAt is the inverse of order.
var sectionAt = func() (ids [sectionIDs]int) {
	for id, at := range order {
		ids[at] = id
	}
	return ids
}()

// afterCount is a section without the number it begins with.
func afterCount(section []byte) []byte {
	if section == nil {
		return nil
	}
	r := reader{b: section}
	r.u32()
	return section[r.off:]
}

// newTables gives each table an even share of what the minima leave.
func (m *Module) newTables() []byte {
	out := appendU32(nil, uint32(len(m.tables)))
	for _, t := range m.tables {
		most := max(t.Min, uint32((uint64(m.limits.TableEntries)-m.entries)/uint64(len(m.tables)))+t.Min)
		if t.HasMax {
			most = min(most, t.Max)
		}
		out = append(out, t.elem, 1)
		out = appendU32(out, t.Min)
		out = appendU32(out, most)
	}
	return out
}

// newFunctions are the wrappers, the old functions, and the check.
func (m *Module) newFunctions() []byte {
	out := appendU32(nil, uint32(2*len(m.funcs)+1))
	for range 2 {
		for _, t := range m.funcs {
			out = appendU32(out, t)
		}
	}
	return appendU32(out, uint32(len(m.Types)))
}

func (m *Module) newCode(stack int64) []byte {
	n := len(m.funcs)
	out := appendU32(make([]byte, 0, m.bodySize+64*n), uint32(2*n+1))
	var code []byte
	add := func() {
		out = appendU32(out, uint32(len(code)))
		out = append(out, code...)
	}
	for i := range m.bodies {
		code = m.wrapper(code[:0], i, stack)
		add()
	}
	check := appendU32([]byte{opCall}, uint32(2*n))
	for i := range m.bodies {
		b, from := &m.bodies[i], 0
		code = code[:0]
		for _, at := range b.checks {
			code = append(code, b.code[from:at]...)
			code = append(code, check...)
			from = at
		}
		code = append(code, b.code[from:]...)
		add()
	}
	// The compiler checks the deadline at the head of this loop.
	code = append(code[:0], 0, opLoop, blockEmpty, opEnd, opEnd)
	add()
	return out
}

const blockEmpty = 0x40

// wrapper appends the code of the wrapper of function i.
func (m *Module) wrapper(c []byte, i int, stack int64) []byte {
	depth, calls := uint32(m.globals), uint32(m.globals+1)
	weight := int32(min(m.bodies[i].weight, stack+1))
	get := func(g uint32) { c = appendU32(append(c, opGlobalGet), g) }
	set := func(g uint32) { c = appendU32(append(c, opGlobalSet), g) }
	num := func(n int32) { c = appendS32(append(c, opI32Const), n) }

	c = append(c, 0) // no locals
	get(depth)
	num(weight)
	c = append(c, opI32Add)
	set(depth)
	get(depth)
	num(int32(stack))
	c = append(c, opI32GtU, opIf, blockEmpty, opUnreachable, opEnd)

	get(calls)
	num(1)
	c = append(c, opI32Add)
	set(calls)
	get(calls)
	num(checkEvery - 1)
	c = append(c, opI32And, opI32Eqz, opIf, blockEmpty, opLoop, blockEmpty, opEnd, opEnd)

	for p := range m.Types[m.funcs[i]].Params {
		c = appendU32(append(c, opLocalGet), uint32(p))
	}
	c = appendU32(append(c, opCall), uint32(len(m.funcs)+i))

	get(depth)
	num(weight)
	c = append(c, opI32Sub)
	set(depth)
	return append(c, opEnd)
}
