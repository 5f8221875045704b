package clienthello

import (
	"bytes"
	"testing"
)

func FuzzAssembly(f *testing.F) {
	f.Add([]byte("one"), 0, []byte("two"), 3)
	f.Add(bytes.Repeat([]byte{7}, 200), 30, bytes.Repeat([]byte{7}, 100), 0)
	f.Add([]byte("same"), 60, []byte("sane"), 60)
	f.Add([]byte("end"), MaxLen-3, []byte("over"), MaxLen-3)
	f.Add([]byte("before"), -1, []byte{}, 1<<40)
	a := new(Assembly)
	f.Fuzz(func(t *testing.T, first []byte, at int, second []byte, then int) {
		want, have, conflict := make([]byte, MaxLen), make([]bool, MaxLen), false
		put := func(b []byte, at int) bool {
			if at < 0 || at > MaxLen || len(b) > MaxLen-at {
				return false
			}
			for i, c := range b {
				if conflict = conflict || have[at+i] && want[at+i] != c; !have[at+i] {
					want[at+i], have[at+i] = c, true
				}
			}
			return true
		}
		a.Reset()
		if got := a.Put(at, first); got != put(first, at) {
			t.Fatalf("a piece of %d at %d: %v", len(first), at, got)
		}
		if got := a.Put(then, second); got != put(second, then) {
			t.Fatalf("a piece of %d at %d: %v", len(second), then, got)
		}
		n := bytes.IndexByte(append(asBytes(have), 0), 0)
		if got := a.Bytes(); !bytes.Equal(got, want[:n]) || a.Conflict != conflict {
			t.Errorf("%q, conflict %v, want %q, %v", got, a.Conflict, want[:n], conflict)
		}
	})
}

func asBytes(have []bool) []byte {
	b := make([]byte, len(have))
	for i, h := range have {
		if h {
			b[i] = 1
		}
	}
	return b
}
