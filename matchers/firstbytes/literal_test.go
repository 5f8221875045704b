package firstbytes

import (
	"strings"
	"testing"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

func TestParsePrefix(t *testing.T) {
	for in, want := range map[string]string{
		"hex:ff00FF": "\xff\x00\xff", "ff": "neither hex:DIGITS nor ascii:TEXT", "hex:": "nothing stands behind",
		"hex:" + strings.Repeat("00", 513): "513 bytes are more than 512", "hex:" + strings.Repeat("00", 512): strings.Repeat("\x00", 512),
	} {
		got, err := parsePrefix(in)
		if err != nil {
			got = []byte(err.Error())
		}
		if !strings.Contains(string(got), want) {
			t.Errorf("%.20q: %.80q, want %.80q", in, got, want)
		}
	}
}

func TestLook(t *testing.T) {
	ten := 10
	prefix, at, length := Matcher{prefix: []byte("ab")}, Matcher{prefix: []byte("ab"), Offset: 2}, Matcher{Length: &Length{Min: 4, Max: &ten}}
	both, atLeast := Matcher{prefix: []byte("ab"), Length: &Length{Min: 4, Max: &ten}}, Matcher{Length: &Length{Min: 4}}
	for _, tc := range []struct {
		name                   string
		m                      Matcher
		in                     string
		datagram, stream, last answer // last: of a stream when no more is waited for
	}{
		{"prefix", prefix, "abc", yes, yes, yes},
		{"prefix to come", prefix, "a", no, more, more},
		{"no prefix", prefix, "ac", no, no, no},
		{"offset", at, "xxab", yes, yes, yes},
		{"offset to come", at, "x", no, more, more},
		{"not at the offset", at, "abxx", no, no, no},
		{"length", length, "12345", yes, more, yes},
		{"longest", length, "1234567890", yes, more, yes},
		{"too long", length, "1234567890a", no, no, no},
		{"too short", length, "123", no, more, more},
		{"both", both, "abcde", yes, more, yes},
		{"length alone", both, "xxxxx", no, no, no},
		{"prefix alone", both, "ab", no, more, more},
		{"at least", atLeast, "1234", yes, yes, yes},
		{"less", atLeast, "123", no, more, more},
	} {
		b := []byte(tc.in)
		for in, want := range map[*sniff.Input]answer{
			{Bytes: b, Datagrams: [][]byte{b, b}}: tc.datagram, {Bytes: b}: tc.stream, {Bytes: b, Final: true}: tc.last,
		} {
			if got := tc.m.look(in); got != want {
				t.Errorf("%s, %+v: %v, want %v", tc.name, *in, got, want)
			}
		}
	}
}

// What has been decided stays decided when more comes, and waiting for the end
// takes no yes or no back.
func FuzzLook(f *testing.F) {
	f.Add([]byte("xxabcdef"), []byte("ab"), uint16(2), 4, 10)
	f.Add([]byte("abc"), []byte{}, uint16(0), 2, -1)
	f.Fuzz(func(t *testing.T, b, prefix []byte, offset uint16, low, high int) {
		m := Matcher{Offset: int(offset % maxOffset)}
		if len(prefix) > 0 {
			m.prefix = prefix
		}
		if low >= 0 {
			m.Length = &Length{Min: low}
			if high >= low {
				m.Length.Max = &high
			}
		}
		before := more
		for n := range len(b) + 1 {
			now := m.look(&sniff.Input{Bytes: b[:n]})
			if before != more && now != before && !(before == yes && m.Length != nil && m.Length.Max != nil) {
				t.Fatalf("%v of %d bytes, %v of %d", before, n-1, now, n)
			}
			if last := m.look(&sniff.Input{Bytes: b[:n], Final: true}); now != more && last != now {
				t.Fatalf("%v, in the end %v", now, last)
			}
			before = now
		}
		if m.look(&sniff.Input{Bytes: b, Datagrams: [][]byte{b}}) == more {
			t.Error("a datagram is undecided")
		}
	})
}
