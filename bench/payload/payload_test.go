package payload

import (
	"bytes"
	"errors"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	const size = 64
	flip := func(i int) []byte {
		b := message(size)
		b[i] ^= 1
		return b
	}
	for name, tc := range map[string]struct {
		in   []byte
		want error
	}{
		"whole":            {in: message(size)},
		"cut":              {in: message(size)[:size-1], want: ErrSize},
		"longer":           {in: message(size + 1), want: ErrSize},
		"empty":            {want: ErrSize},
		"foreign":          {in: make([]byte, size), want: ErrMagic},
		"session changed":  {in: flip(4), want: ErrSum},
		"number changed":   {in: flip(8), want: ErrSum},
		"filler changed":   {in: flip(40), want: ErrSum},
		"checksum changed": {in: flip(size - 1), want: ErrSum},
	} {
		t.Run(name, func(t *testing.T) {
			session, seq, sent, err := Parse(tc.in, size)
			if !errors.Is(err, tc.want) {
				t.Fatalf("Parse(% x) = %v, want %v", tc.in, err, tc.want)
			}
			if err == nil && (session != 3 || seq != 9 || sent != time.Second) {
				t.Errorf("Parse gives session %d, number %d, sent %v", session, seq, sent)
			}
		})
	}
}

func message(size int) []byte {
	b := bytes.Repeat([]byte{0xa5}, size)
	Put(b, 3, 9, time.Second)
	return b
}

func FuzzParse(f *testing.F) {
	f.Add(message(64), 64)
	f.Add(message(MinSize), MinSize)
	f.Add([]byte(nil), 0)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		session, seq, sent, err := Parse(b, size)
		if err != nil {
			return
		}
		again := bytes.Clone(b)
		if Put(again, session, seq, sent); !bytes.Equal(again, b) {
			t.Errorf("Put(Parse(% x)) = % x", b, again)
		}
	})
}

func TestTracker(t *testing.T) {
	for name, tc := range map[string]struct {
		in   []uint64
		want []Verdict
	}{
		"in order":              {[]uint64{1, 2, 3}, []Verdict{Fresh, Fresh, Fresh}},
		"twice":                 {[]uint64{1, 1}, []Verdict{Fresh, Duplicate}},
		"gap filled late":       {[]uint64{1, 3, 2, 2}, []Verdict{Fresh, Fresh, Reordered, Duplicate}},
		"number nought":         {[]uint64{1, 0}, []Verdict{Fresh, Duplicate}},
		"just in the window":    {[]uint64{1, window + 1, 2}, []Verdict{Fresh, Fresh, Reordered}},
		"too old to tell":       {[]uint64{window + 1, 1}, []Verdict{Fresh, Duplicate}},
		"old bits are cleared":  {[]uint64{1, 2, window + 1, window + 3, window + 2}, []Verdict{Fresh, Fresh, Fresh, Fresh, Reordered}},
		"a jump clears all":     {[]uint64{1, 2, 3, 3*window + 3, 3*window + 2, 2*window + 4}, []Verdict{Fresh, Fresh, Fresh, Fresh, Reordered, Reordered}},
		"sessions do not share": {[]uint64{7}, []Verdict{Fresh}},
	} {
		t.Run(name, func(t *testing.T) {
			tr := NewTracker(2)
			tr.Take(1, 7)
			for i, seq := range tc.in {
				if got := tr.Take(0, seq); got != tc.want[i] {
					t.Errorf("number %d (at %d) is %v, want %v", seq, i, got, tc.want[i])
				}
			}
		})
	}
}

func TestPattern(t *testing.T) {
	p := NewPattern()
	whole := append(bytes.Clone(p.At(2, 0, MaxChunk)), p.At(2, MaxChunk, MaxChunk)...)
	if !p.Match(2, 1000, whole[1000:1000+MaxChunk]) {
		t.Error("pieces of a stream do not fit together")
	}
	for name, b := range map[string][]byte{
		"shifted by one":         p.At(2, 1, 4096),
		"shifted by 64 KiB":      p.At(2, 64<<10, 4096),
		"of another stream":      p.At(3, 0, 4096),
		"with one byte changed":  append(bytes.Clone(p.At(2, 0, 4095)), p.At(2, 4095, 1)[0]^1),
		"with two bytes swapped": append([]byte{whole[1], whole[0]}, whole[2:4096]...),
	} {
		if p.Match(2, 0, b) {
			t.Errorf("content %s is not seen", name)
		}
	}
}
