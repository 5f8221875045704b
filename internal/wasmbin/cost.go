package wasmbin

import "errors"

var errCost = errors.New("would take too long to compile")

// What wazero 1.12 spends on compiling, measured in nanoseconds with modules
// made of nothing else, and put higher for what takes much memory instead: a
// module of 500 ms stays below 256 MiB (BenchmarkCompileAtTheLimit). Code from
// ordinary compilers costs a small part of it, as most of its memory accesses
// share a check and most of its blocks are in short functions.
const (
	costFunction = 16_000 // a function and its wrapper
	costValue    = 450    // a parameter or result of it
	costByte     = 50
	costCall     = 600
	costMemory   = 9_000  // a load or store
	costRange    = 60_000 // memory.copy and the like
	costTable    = 8_000  // table.get, table.set
	costIndirect = 36_000 // call_indirect
	costGrow     = 2_000  // memory.grow
	costOther    = 4_000  // ref.func, data.drop, elem.drop
	costDivide   = 11_000
	costConvert  = 17_000 // a conversion that can trap
	costTarget   = 5_000  // of a br_table

	fillEdges = 2 // a fill is compiled to a loop

	// In a function of so many branches and blocks (edges):
	costEdges     = 11  // for each edge and edge, or two targets
	costJoin      = 500 // for each edge or target and value
	costLoopValue = 32  // for each value and loop around a loop
	costDepth     = 6   // for each block around a block
)

// tally is what the cost of a function is reckoned from.
type tally struct {
	edges      int // branches and blocks
	targets    int // of br_table
	depths     int // sum over blocks of the blocks around them
	loopDepths int // sum over loops of the loops around them
	heavy      int // cost of single instructions
}

// cost of a function with a type of so many values, and so many values alive
// at most.
func (w *walk) cost(types, values int) int {
	return costFunction + costValue*types + costByte*len(w.b) + w.heavy +
		w.edges*(w.edges+w.targets/2)*costEdges + (w.edges+w.targets)*values*costJoin + w.targets*costTarget +
		w.loopDepths*values*costLoopValue + w.depths*costDepth
}

var simpleCost = func() (t [256]int) {
	for op := 0x6d; op <= 0x70; op++ { // i32 divisions
		t[op] = costDivide
	}
	for op := 0x7f; op <= 0x82; op++ { // i64 divisions
		t[op] = costDivide
	}
	for op := 0xa8; op <= 0xb1; op++ { // conversions that can trap, and some that cannot
		t[op] = costConvert
	}
	return t
}()
