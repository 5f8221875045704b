package wasmbin

import (
	"errors"
	"fmt"
)

// body is what Rewrite needs to know of a function's code.
type body struct {
	code   []byte // with its declaration of locals
	checks []int  // offsets in code of instructions that can take long
	weight int64  // bytes of stack that a call may take, by a cautious estimate
}

// frame is a block that is open.
type frame struct {
	base    int // values on the stack below the block's own
	results int
	loop    bool
}

// walk is the state of reading one body. Values on the operand stack are
// counted and not typed: the compiler validates, here only a bound is needed.
type walk struct {
	*reader
	m      *Module
	body   *body
	locals int
	height int // values on the operand stack
	most   int // the highest height
	loops  int // loops that are open
	tally
}

var errNesting = errors.New("code goes on after its end")

func (w *walk) push(n int) {
	w.height += n
	w.most = max(w.most, w.height)
}

// pop takes values of the innermost block; code that cannot be reached may
// take more than there are.
func (w *walk) pop(n int) {
	w.height = max(w.height-n, w.m.frames[len(w.m.frames)-1].base)
}

func (w *walk) unreachable() { w.height = w.m.frames[len(w.m.frames)-1].base }

func (m *Module) readBody(r *reader, number int) {
	m.bodies = append(m.bodies, body{code: r.b})
	t := m.Types[m.funcs[m.imported[Function]+number]]
	w := walk{reader: r, m: m, body: &m.bodies[len(m.bodies)-1]}
	locals := len(t.Params)
	weight := valueSizes(t.Params) + valueSizes(t.Results)
	for range r.count(m.limits.Locals, "declarations of locals") {
		n := r.u32()
		v := valueType(r, r.byte())
		if uint64(n) > uint64(m.limits.Locals-min(locals, m.limits.Locals)) {
			r.fail(tooMany("locals", uint64(n)+uint64(locals), m.limits.Locals))
		}
		if r.err != nil {
			return
		}
		locals += int(n)
		weight += int64(n) * valueSize(v)
	}
	w.locals = locals
	if m.allLocals += locals; m.allLocals > m.limits.AllLocals {
		r.fail(tooMany("locals together", uint64(m.allLocals), m.limits.AllLocals))
	}
	m.frames = append(m.frames[:0], frame{results: len(t.Results)})
	for len(m.frames) > 0 && r.err == nil {
		w.instruction()
	}
	if r.err == nil && r.left() > 0 {
		r.fail(errNesting)
	}
	// A compiler keeps what is alive across a call on the stack: locals, operands
	// and the intermediate results of an inlined address, a few bytes of stack for
	// each byte of code at the very worst.
	w.body.weight = 128 + weight + int64(w.most)*16 + int64(len(r.b))
	if m.cost += w.cost(len(t.Params)+len(t.Results), w.locals+w.most); m.cost > m.limits.Cost {
		r.fail(errCost)
	}
}

func valueSize(v byte) int64 {
	if v == V128 {
		return 16
	}
	return 8
}

func valueSizes(list []byte) (n int64) {
	for _, v := range list {
		n += valueSize(v)
	}
	return n
}

// block reads the type of a block and opens it.
func (w *walk) block() {
	params, results := 0, 0
	switch t := w.signed(33); {
	case t >= 0:
		if t >= int64(len(w.m.Types)) {
			w.fail(fmt.Errorf("there is no type %d", t))
			return
		}
		params, results = len(w.m.Types[t].Params), len(w.m.Types[t].Results)
	case t != -64: // -64: neither parameters nor results
		valueType(w.reader, byte(t)&0x7f)
		results = 1
	}
	w.pop(params)
	w.m.frames = append(w.m.frames, frame{base: w.height, results: results})
	w.push(params)
	w.edges++
	if len(w.m.frames) > w.m.limits.Nesting {
		w.fail(tooMany("nested blocks", uint64(len(w.m.frames)), w.m.limits.Nesting))
	}
	w.depths += len(w.m.frames)
}

func (w *walk) branch() {
	w.label()
	w.edges++
}

func (w *walk) label() {
	if l := w.u32(); w.err == nil && uint64(l) >= uint64(len(w.m.frames)) {
		w.fail(fmt.Errorf("there is no block %d to branch to", l))
	}
}

// call has the effect of a call of a function of type t.
func (w *walk) call(t *Type) {
	w.pop(len(t.Params))
	w.push(len(t.Results))
}

// memarg reads alignment and offset.
func (w *walk) memarg() {
	if align := w.u32(); align > 31 {
		w.fail(errors.New("alignment out of range"))
	}
	w.u32()
	w.heavy += costMemory
}

// long notes that the instruction at offset at can take long in one go.
func (w *walk) long(at int) {
	w.body.checks = append(w.body.checks, at)
	w.heavy += costRange
}

func (w *walk) instruction() {
	m, at := w.m, w.off
	switch op := w.byte(); op {
	case opBlock:
		w.block()
	case opLoop:
		if w.block(); w.err == nil {
			m.frames[len(m.frames)-1].loop = true
			w.loops++
			w.loopDepths += w.loops
		}
	case opIf:
		w.pop(1)
		w.block()
	case opElse:
		// Its parameters were counted when the block opened; no more than most.
		w.unreachable()
		w.edges++
	case opEnd:
		f := m.frames[len(m.frames)-1]
		m.frames = m.frames[:len(m.frames)-1]
		if f.loop {
			w.loops--
		}
		w.height = f.base
		w.push(f.results)
	case opBr:
		w.branch()
		w.unreachable()
	case opBrIf:
		w.pop(1)
		w.branch()
	case opBrTable:
		w.pop(1)
		for range w.count(m.limits.Targets, "targets of a branch") {
			w.label()
			w.targets++
		}
		w.branch()
		w.unreachable()
	case opReturn, opUnreachable:
		w.unreachable()
	case opCall:
		w.heavy += costCall
		if i := m.funcIndex(w.reader); w.err == nil {
			w.call(&m.Types[m.funcs[i]])
		}
	case opCallIndirect:
		t := w.u32()
		w.u32() // table
		if w.err == nil && uint64(t) >= uint64(len(m.Types)) {
			w.fail(fmt.Errorf("there is no type %d", t))
		}
		if w.err == nil {
			w.heavy += costIndirect
			w.pop(1)
			w.call(&m.Types[t])
		}
	case opSelectT:
		for range w.count(m.limits.Values, "types of a select") {
			valueType(w.reader, w.byte())
		}
		w.pop(3)
		w.push(1)
	case opLocalGet, opLocalSet, opLocalTee:
		if i := w.u32(); w.err == nil && uint64(i) >= uint64(w.locals) {
			w.fail(fmt.Errorf("there is no local %d", i))
		}
		w.effect(simple[op])
	case opGlobalGet, opGlobalSet:
		m.globalIndex(w.reader)
		w.effect(simple[op])
	case opTableGet, opTableSet:
		w.u32()
		w.heavy += costTable
		w.effect(simple[op])
	case opMemorySize, opMemoryGrow:
		if w.byte() != 0 {
			w.fail(errors.New("a second memory"))
		}
		w.heavy += costGrow
		w.effect(simple[op])
	case opI32Const:
		w.signed(32)
		w.push(1)
	case opI64Const:
		w.signed(64)
		w.push(1)
	case opF32Const:
		w.bytes(4)
		w.push(1)
	case opF64Const:
		w.bytes(8)
		w.push(1)
	case opRefNull:
		refType(w.reader)
		w.push(1)
	case opRefFunc:
		m.funcIndex(w.reader)
		w.heavy += costOther
		w.push(1)
	case opMisc:
		w.misc(at)
	case opVector:
		w.vector()
	default:
		e := simple[op]
		if e == none {
			w.fail(fmt.Errorf("opcode %#x is not of WebAssembly 2.0", op))
			return
		}
		if op >= firstLoad && op <= lastStore {
			w.memarg()
		}
		w.heavy += simpleCost[op]
		w.effect(e)
	}
}

// misc reads what stands behind the prefix 0xfc.
func (w *walk) misc(at int) {
	op := w.u32()
	switch {
	case w.err != nil:
	case op <= 7: // saturating conversions
		w.effect(unary)
	case op == 8: // memory.init
		w.u32()
		w.byte()
		w.long(at)
		w.pop(3)
	case op == 9 || op == 13: // data.drop, elem.drop
		w.u32()
		w.heavy += costOther
	case op == 10: // memory.copy
		w.byte()
		w.byte()
		w.long(at)
		w.pop(3)
	case op == 11: // memory.fill
		w.byte()
		w.long(at)
		w.edges += fillEdges
		w.pop(3)
	case op == 12 || op == 14: // table.init, table.copy
		w.u32()
		w.u32()
		w.long(at)
		w.pop(3)
	case op == 15: // table.grow
		w.u32()
		w.long(at)
		w.effect(binary)
	case op == 16: // table.size
		w.u32()
		w.push(1)
	case op == 17: // table.fill
		w.u32()
		w.long(at)
		w.edges += fillEdges
		w.pop(3)
	default:
		w.fail(fmt.Errorf("opcode 0xfc %d is not of WebAssembly 2.0", op))
	}
}

// vector reads what stands behind the prefix 0xfd.
func (w *walk) vector() {
	op := w.u32()
	switch {
	case w.err != nil:
	case op <= 11: // loads and the store
		w.memarg()
		if op == 11 {
			w.pop(2)
		} else {
			w.effect(unary)
		}
	case op == vecConst:
		w.bytes(16)
		w.push(1)
	case op == 13: // shuffle
		w.bytes(16)
		w.effect(binary)
	case op >= 21 && op <= 34: // lanes
		w.byte()
		if vectorReplaces[op] {
			w.effect(binary)
		} else {
			w.effect(unary)
		}
	case op >= 84 && op <= 91: // loads and stores of a lane
		w.memarg()
		w.byte()
		w.pop(2)
		if op <= 87 {
			w.push(1)
		}
	case op == 92 || op == 93: // loads that fill up with zeros
		w.memarg()
		w.effect(unary)
	case op > 255:
		w.fail(fmt.Errorf("opcode 0xfd %d is not of WebAssembly 2.0", op))
	case op == 82: // bitselect
		w.pop(3)
		w.push(1)
	case vectorUnary[op]:
		w.effect(unary)
	default:
		w.effect(binary)
	}
}
