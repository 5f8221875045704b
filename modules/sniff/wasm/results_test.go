package wasm

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/sniff"
)

// hostile is the module of that name that means harm.
func hostile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "hostile", name+ext))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// claims is a sniffer made of a module whose memory has two pages.
func claims(t testing.TB, name string) *sniffer {
	t.Helper()
	h := hostOf(t, slow, map[string][]byte{"x.wasm": hostile(t, name)})
	if h.loaded["x"] == nil {
		t.Fatalf("%s was not loaded: %v", name, h.refused["x"])
	}
	return h.loaded["x"].sniffer
}

// TestRawResults has a module say that its hint is anywhere, and of any length.
func TestRawResults(t *testing.T) {
	s := claims(t, "raw-result")
	const (
		end   = 2 * pageSize
		input = 1024 // where alloc puts it
		top   = 1<<32 - 1
	)
	for name, tc := range map[string]struct {
		at, n uint32
		want  string
	}{
		"no hint":                   {0, 0, "unrecognised"},
		"nothing, at the beginning": {1, 0, "bad_output"},
		"nothing, at the end":       {end, 0, "bad_output"},
		"nothing, beyond":           {end + 1, 0, "bad_output"},
		"nothing, at the top":       {top, 0, "bad_output"},
		"at the beginning":          {0, 1, "ok"},
		"all of it":                 {0, end, "ok"},
		"a byte more than that":     {0, end + 1, "bad_output"},
		"the last byte":             {end - 1, 1, "ok"},
		"one behind it":             {end - 1, 2, "bad_output"},
		"at the end":                {end, 1, "bad_output"},
		"4 GiB":                     {0, top, "bad_output"},
		"4 GiB from 1":              {1, top, "bad_output"},
		"to the top":                {top - 15, 15, "bad_output"},
		"around to 0":               {top - 15, 16, "bad_output"},
		"around, into the memory":   {top - 15, 16 + input, "bad_output"},
		"all ones":                  {top, top, "bad_output"},
		"over the input":            {input, 3, "ok"}, // its length is its flags
		"over the input, cut short": {input, 2, "bad_output"},
		"from before the input":     {input - 1, 100, "ok"},
		"a page that is not there":  {1 << 31, 1 << 31, "bad_output"},
	} {
		var in [8]byte
		binary.LittleEndian.PutUint64(in[:], uint64(tc.at)<<32|uint64(tc.n))
		if got := sniffBytes(s, string(in[:])); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
}

// hint is one with a host, as the ABI has it.
func hint(host string) string {
	return string(binary.LittleEndian.AppendUint16([]byte{hintHost}, uint16(len(host)))) + host
}

// TestClaimedHosts has a module name hosts that none are: they are those of no
// route. One that is written in another way is the same host.
func TestClaimedHosts(t *testing.T) {
	s := claims(t, "echo-hint")
	routes, err := sniff.ParseHosts([]string{"play.example.com", "*.below.example", ".both.example", "203.0.113.5"})
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"play.example.com":                  true,
		"PLAY.Example.COM":                  true,
		"play.example.com.":                 true,
		"a.below.example":                   true,
		"A.BELOW.example.":                  true,
		"both.example":                      true,
		"a.b.both.example":                  true,
		"203.0.113.5":                       true,
		"":                                  false,
		".":                                 false,
		"play.example.com..":                false,
		".play.example.com":                 false,
		"play.example.com\x00":              false,
		"\x00play.example.com":              false,
		"play.example.com\x00.evil.example": false,
		"play.example.com\r\n":              false,
		"play.example.com\r\nHost: x":       false,
		"play.example.com ":                 false,
		" play.example.com":                 false,
		"play.example.com:25565":            false,
		"play.example.com.evil.example":     false,
		"xplay.example.com":                 false,
		"pl\u0430y.example.com":             false, // another а
		"PLAY\u212aexample.com":             false, // a K that lower case would fold
		"*":                                 false,
		"*.example.com":                     false,
		"*.":                                false,
		"below.example":                     false,
		".below.example":                    false,
		"xbelow.example":                    false,
		"xboth.example":                     false,
		"203.0.113.05":                      false,
		strings.Repeat("a", 250) + ".below.example":      false, // longer than a name can be
		strings.Repeat("a.", 1<<15-20) + "below.example": false,
		strings.Repeat("\x00", 1<<16-1):                  false,
	} {
		var h sniff.Hint
		v := s.Sniff(&sniff.Input{Bytes: []byte(hint(host))}, &h)
		if v != sniff.Recognised || !h.HasHost {
			t.Errorf("%.60q: %v, fault %d", host, v, h.Fault)
		} else if got := routes.Match(h.Host); got != want {
			t.Errorf("%.60q is %.60q and matches: %v, want %v", host, h.Host, got, want)
		}
	}
	for _, host := range []string{"\xff", "play.example.com\xc3", "\xed\xa0\x80.example", "\xc0\xae.example", "\xf4\x90\x80\x80"} {
		if got := sniffBytes(s, hint(host)); got != "bad_output" {
			t.Errorf("%q: %s, want bad_output", host, got)
		}
	}
}

// FuzzClaims has a module claim anything: what the host makes of it is a hint or
// bad output, and never a failure of its own.
func FuzzClaims(f *testing.F) {
	for _, s := range []string{hint("play.example.com"), hint("A."), "\x01", "\x04\x03\x00a2s", "\x06\x02\x00ab\x04\x00quic", "\x02\xff\xffa", "\x04\x02\x00ok"} {
		f.Add([]byte(s), uint64(1024)<<32|uint64(len(s)))
	}
	raw, echo := claims(f, "raw-result"), claims(f, "echo-hint")
	f.Fuzz(func(t *testing.T, b []byte, at uint64) {
		if len(b) > pageSize {
			return
		}
		for s, in := range map[*sniffer][]byte{echo: b, raw: append(binary.LittleEndian.AppendUint64(nil, at), b...)} {
			var h sniff.Hint
			v := s.Sniff(&sniff.Input{Bytes: in}, &h)
			switch got := result(v, &h); {
			case got != "ok" && got != "unrecognised" && got != "bad_output":
				t.Errorf("%q: %s", in, got)
			case v == sniff.Recognised && len(h.Host)+len(h.Key) > 2*(1<<16-1):
				t.Errorf("%q: a host of %d and a key of %d bytes", in, len(h.Host), len(h.Key))
			}
		}
	})
}

// TestStateOfEveryKind calls a module that looks for what it has left in its
// memory, a global and its table, beside one that fails at each call.
func TestStateOfEveryKind(t *testing.T) {
	e, err := takeEngine()
	if err != nil {
		t.Fatal(err)
	}
	defer e.give()
	l := limits{timeout: time.Duration(slow), memory: defaultMemory}
	var list [2]*sniffer
	for i, name := range []string{"leftovers", "moody"} {
		m, err := e.load(hostile(t, name), l)
		if err != nil {
			t.Fatal(err)
		}
		list[i] = e.newSniffer(name, "", m, l, caddy.Log())
		defer list[i].close()
	}
	for i := range 5 {
		if got := sniffBytes(list[1], "T"); got != "trap" {
			t.Fatalf("call %d: %s, want a trap", i, got)
		}
		if got := sniffBytes(list[0], "x"); got != "unrecognised" {
			t.Fatalf("call %d has found something: %s", i, got)
		}
	}
}
