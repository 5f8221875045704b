package listener

import (
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// TestRound goes over slots whose number changes meanwhile: each that was there
// all the time is seen once, and no step looks at many more than its share.
func TestRound(t *testing.T) {
	for name, tc := range map[string]struct{ slots, grow, steps int }{
		"none":            {0, 0, 50},
		"fewer than step": {7, 0, 50},
		"many":            {100_000, 0, 256},
		"growing":         {1000, 40, 50},
		"one step":        {500, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			seen, end, most := make(map[uint32]int), uint32(tc.slots), 0
			r := &round{want: func(relay.ID) bool { return true }}
			r.tell = func(i *relay.Info) { seen[i.ID.Slot()]++ }
			r.parts = []*cursor{{part: func(from, to uint32, found []relay.Info) ([]relay.Info, uint32) {
				if to > from+progressChunk {
					t.Errorf("asked for %d slots at once", to-from)
				}
				for ; from < min(to, end); from++ {
					found = append(found, relay.Info{ID: relay.MakeID(true, 0, from, 1)})
				}
				return found, end
			}}}
			for step := range tc.steps {
				before := len(seen)
				r.step(step, tc.steps)
				most = max(most, len(seen)-before)
				end += uint32(tc.grow)
			}
			for slot := range uint32(tc.slots) {
				if seen[slot] != 1 {
					t.Fatalf("slot %d is seen %d times", slot, seen[slot])
				}
			}
			if share := (int(end)+tc.steps-1)/tc.steps + 3*tc.grow + 1; most > share {
				t.Errorf("%d of %d in one of %d steps", most, end, tc.steps)
			}
		})
	}
	for d, want := range map[time.Duration]int{time.Millisecond: 1, time.Second: 50, time.Minute: maxSteps} {
		if got := stepsOf(d); got != want {
			t.Errorf("%v in %d steps, want %d", d, got, want)
		}
	}
}
