package tcprelay

import (
	"testing"

	"go.uber.org/zap"
)

// TestManyWakes asks a worker for more than fits into a few bits of its
// eventfd, one after the other, so that each has to wake it.
func TestManyWakes(t *testing.T) {
	e, err := New(Options{Workers: 1, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for i := range 10_000 {
		ran := false
		if !e.workers[0].call(func() { ran = true }) || !ran {
			t.Fatalf("call %d did not run", i)
		}
	}
}
