//go:build race

package pool

// raceEnabled: the race detector empties sync.Pools at random, so counts of
// allocations mean nothing.
const raceEnabled = true
