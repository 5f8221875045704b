//go:build race

package udprelay

const raceEnabled = true
