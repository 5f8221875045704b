//go:build !race

package testkit

// Race is whether the tests, and so the product they run, have the race
// detector.
const Race = false
