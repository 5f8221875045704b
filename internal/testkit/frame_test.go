package testkit

import (
	"bytes"
	"errors"
	"io"
	"net/netip"
	"testing"
)

func example() Frame {
	return Frame{Flow: 7, Seq: 1 << 40, Backend: 3, From: netip.MustParseAddrPort("127.0.0.9:4711"), Body: []byte("hello")}
}

func TestFrame(t *testing.T) {
	want := example()
	b := want.Append(nil)
	got, n, err := ParseFrame(append(b, "rest"...))
	if err != nil || n != len(b) || got.Flow != want.Flow || got.Seq != want.Seq || got.Backend != want.Backend ||
		got.From != want.From || !bytes.Equal(got.Body, want.Body) {
		t.Errorf("ParseFrame = %+v, %d, %v; want %+v, %d", got, n, err, want, len(b))
	}
	damaged := bytes.Clone(b)
	damaged[len(damaged)/2] ^= 1
	for name, tc := range map[string]struct {
		in   []byte
		want error
	}{
		"empty":       {nil, errShort},
		"in the head": {b[:headLen-1], errShort},
		"in the body": {b[:len(b)-1], errShort},
		"other bytes": {bytes.Repeat([]byte{9}, 100), errNotFrame},
		"damaged":     {damaged, errDamaged},
	} {
		if _, _, err := ParseFrame(tc.in); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
}

func TestReadFrame(t *testing.T) {
	want := example()
	stream := bytes.NewReader(want.Append(want.Append(nil)))
	var buf []byte
	for range 2 {
		var f Frame
		var err error
		if f, buf, err = ReadFrame(stream, buf); err != nil || f.Seq != want.Seq || !bytes.Equal(f.Body, want.Body) {
			t.Fatalf("ReadFrame = %+v, %v", f, err)
		}
	}
	if _, _, err := ReadFrame(stream, buf); err != io.EOF {
		t.Errorf("at the end: %v, want EOF", err)
	}
}

func FuzzParseFrame(f *testing.F) {
	e := example()
	f.Add(e.Append(nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, n, err := ParseFrame(b)
		if err == nil && !bytes.Equal(got.Append(nil)[headLen:n-crcLen], b[headLen:n-crcLen]) {
			t.Errorf("% x does not survive", b[:n])
		}
	})
}
