package portrange

import (
	"encoding/json"
	"testing"
)

func FuzzParse(f *testing.F) {
	for _, s := range []string{"1", "30000-30099", "0", "9-8", "65536", "-", "1-", "x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := Parse(s)
		if err != nil {
			return
		}
		if r.First == 0 || r.Last < r.First {
			t.Fatalf("Parse(%q) = %v", s, r)
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		var again Range
		if err := json.Unmarshal(b, &again); err != nil || again != r {
			t.Fatalf("%s reads as %v, %v; want %v", b, again, err, r)
		}
	})
}
