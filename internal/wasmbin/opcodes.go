package wasmbin

// Opcodes that have immediates or open, end or leave a block.
const (
	opUnreachable  = 0x00
	opBlock        = 0x02
	opLoop         = 0x03
	opIf           = 0x04
	opElse         = 0x05
	opEnd          = 0x0b
	opBr           = 0x0c
	opBrIf         = 0x0d
	opBrTable      = 0x0e
	opReturn       = 0x0f
	opCall         = 0x10
	opCallIndirect = 0x11
	opSelectT      = 0x1c
	opLocalGet     = 0x20
	opLocalSet     = 0x21
	opLocalTee     = 0x22
	opGlobalGet    = 0x23
	opGlobalSet    = 0x24
	opTableGet     = 0x25
	opTableSet     = 0x26
	firstLoad      = 0x28
	lastStore      = 0x3e
	opMemorySize   = 0x3f
	opMemoryGrow   = 0x40
	opI32Const     = 0x41
	opI64Const     = 0x42
	opF32Const     = 0x43
	opF64Const     = 0x44
	opRefNull      = 0xd0
	opRefFunc      = 0xd2
	opMisc         = 0xfc
	opVector       = 0xfd

	opI32Eqz = 0x45
	opI32GtU = 0x4b
	opI32Add = 0x6a
	opI32Sub = 0x6b
	opI32And = 0x71

	vecConst = 12
)

// effect is how many values an instruction takes and gives.
type effect uint8

const (
	none   effect = iota // no such instruction
	keep                 // 0 → 0
	gives                // 0 → 1
	takes                // 1 → 0
	unary                // 1 → 1
	binary               // 2 → 1
	stores               // 2 → 0
	picks                // 3 → 1
)

func (w *walk) effect(e effect) {
	switch e {
	case gives:
		w.push(1)
	case takes:
		w.pop(1)
	case binary:
		w.pop(2)
		w.push(1)
	case unary:
		w.pop(1)
		w.push(1)
	case stores:
		w.pop(2)
	case picks:
		w.pop(3)
		w.push(1)
	}
}

// simple are the effects of the opcodes of one byte.
var simple = func() (t [256]effect) {
	set := func(from, to int, e effect) {
		for op := from; op <= to; op++ {
			t[op] = e
		}
	}
	t[0x01] = keep  // nop
	t[0x1a] = takes // drop
	t[0x1b] = picks // select
	t[opLocalGet], t[opLocalSet], t[opLocalTee] = gives, takes, unary
	t[opGlobalGet], t[opGlobalSet] = gives, takes
	t[opTableGet], t[opTableSet] = unary, stores
	set(firstLoad, 0x35, unary)
	set(0x36, lastStore, stores)
	t[opMemorySize], t[opMemoryGrow] = gives, unary
	t[opI32Eqz] = unary
	set(0x46, 0x4f, binary) // comparisons of i32
	t[0x50] = unary         // i64.eqz
	set(0x51, 0x66, binary) // comparisons of i64, f32, f64
	set(0x67, 0x69, unary)  // i32 clz, ctz, popcnt
	set(0x6a, 0x78, binary)
	set(0x79, 0x7b, unary) // i64 clz, ctz, popcnt
	set(0x7c, 0x8a, binary)
	set(0x8b, 0x91, unary) // f32 abs to sqrt
	set(0x92, 0x98, binary)
	set(0x99, 0x9f, unary) // f64 abs to sqrt
	set(0xa0, 0xa6, binary)
	set(0xa7, 0xc4, unary) // conversions and sign extension
	t[0xd1] = unary        // ref.is_null
	return t
}()

// vectorUnary are the opcodes behind 0xfd that take one value; the others
// without a case of their own take two.
var vectorUnary = func() (t [256]bool) {
	for _, r := range [][2]int{
		{15, 20},               // splats
		{77, 77},               // v128.not
		{83, 83},               // v128.any_true
		{94, 100},              // f32x4.demote to i8x16.bitmask
		{103, 106},             // f32x4.ceil to nearest
		{116, 117},             // f64x2.ceil, floor
		{122, 122},             // f64x2.trunc
		{124, 129},             // pairwise additions, i16x8.abs, neg
		{131, 132},             // i16x8.all_true, bitmask
		{135, 138},             // i16x8.extend
		{148, 148},             // f64x2.nearest
		{160, 161},             // i32x4.abs, neg
		{163, 164},             // i32x4.all_true, bitmask
		{167, 170},             // i32x4.extend
		{192, 193},             // i64x2.abs, neg
		{195, 196},             // i64x2.all_true, bitmask
		{199, 202},             // i64x2.extend
		{224, 225}, {227, 227}, // f32x4.abs, neg, sqrt
		{236, 237}, {239, 239}, // f64x2.abs, neg, sqrt
		{248, 255}, // conversions
	} {
		for op := r[0]; op <= r[1]; op++ {
			t[op] = true
		}
	}
	return t
}()

// vectorReplaces are the lane opcodes that take a value for the lane.
var vectorReplaces = [256]bool{23: true, 26: true, 28: true, 30: true, 32: true, 34: true}
