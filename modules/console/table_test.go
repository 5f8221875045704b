package console

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// hostile are strings that a terminal would obey, or that would be read wrong.
var hostile = map[string]string{
	"\x1b[2J":         `\u001b[2J`,
	"\x1b]0;x\x07":    `\u001b]0;x\u0007`,
	"a\nb\rc":         `a\u000ab\u000dc`,
	"\u009b31m":       `\u009b31m`,
	"\x9b31m":         `\x9b31m`, // the same in one byte
	"\u202egnp.exe":   `\u202egnp.exe`,
	"a\u200bb":        `a\u200bb`,
	"\u2028":          `\u2028`,
	"\U000e0041":      `\U000e0041`,
	"del\x7f":         `del\u007f`,
	"ohne Ärger 你 ok": "ohne Ärger 你 ok",
	"":                "",
}

func TestClean(t *testing.T) {
	for in, want := range hostile {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, want %q", in, got, want)
		}
	}
}

// TestEscaper wants JSON on a terminal to mean what it meant, and to have
// nothing in it that the terminal obeys.
func TestEscaper(t *testing.T) {
	var strs []string
	for in := range hostile {
		strs = append(strs, in)
	}
	for _, raw := range []bool{true, false} { // as Go writes it, and with less escaped
		var doc bytes.Buffer
		e := json.NewEncoder(&doc)
		e.SetEscapeHTML(false)
		if err := e.Encode(strs); err != nil {
			t.Fatal(err)
		}
		text := doc.String()
		if raw {
			text = strings.NewReplacer(`\u001b`, "\x1b", `\u2028`, "\u2028").Replace(text)
		}
		var out bytes.Buffer
		if err := (escaper{bufio.NewWriter(&out)}).escapeFrom(strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
		if s := strings.Trim(out.String(), "\n"); strings.ContainsFunc(s, unsafe) {
			t.Errorf("%q has something unsafe", s)
		}
		var want, got []string
		if err := json.Unmarshal(doc.Bytes(), &want); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
			t.Errorf("it means %q, %v, and was %q", got, err, want)
		}
	}
}

func TestTable(t *testing.T) {
	for _, colours := range []bool{false, true} {
		var b bytes.Buffer
		w := newTable(&b, colours, "NAME", ">N", "STATE")
		w.row("a", "1", "draining")
		w.row("ärger\x1b[2J", "10", "healthy\x1b")
		if err := w.end(); err != nil {
			t.Fatal(err)
		}
		want := "NAME             N  STATE\n" +
			"a                1  draining\n" +
			"ärger\\u001b[2J  10  healthy\\u001b\n"
		if colours {
			want = strings.Replace(want, "draining", yellow+"draining"+plain, 1)
		}
		if b.String() != want {
			t.Errorf("colours %v:\n%q, want\n%q", colours, b.String(), want)
		}
	}
}

// TestTableStreams wants rows beyond the first ones to be written as they come,
// with a head that is written once.
func TestTableStreams(t *testing.T) {
	var b bytes.Buffer
	w := newTable(&b, false, "NAME", ">N")
	const n = 3*held + 1
	for i := range n {
		w.row(strings.Repeat("x", 1+i%7), fmt.Sprint(i))
		if i == 2*held && b.Len() == 0 {
			t.Error("nothing has been written yet")
		}
	}
	if err := w.end(); err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(b.String(), "\n"); lines != n+1 || strings.Count(b.String(), "NAME") != 1 {
		t.Errorf("%d lines, want %d", lines, n+1)
	}
}

func TestAmount(t *testing.T) {
	for in, want := range map[float64]string{
		0: "0", 0.4: "0", 999: "999", 1000: "1.00k", 9994: "9.99k", 9999: "10.0k", 12_345: "12.3k", 99_960: "100k", 999_499: "999k", 999_500: "1.00M", 1e9: "1.00G", 1.8446744073709552e19: "18.4E",
	} {
		if got := amount(in); got != want {
			t.Errorf("amount(%v) = %s, want %s", in, got, want)
		}
	}
}

func TestAge(t *testing.T) {
	for in, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", 61 * time.Second: "1m01s", 2*time.Hour + 7*time.Minute: "2h07m", 76 * time.Hour: "3d04h",
	} {
		if got := age(in); got != want {
			t.Errorf("age(%v) = %s, want %s", in, got, want)
		}
	}
}

func TestClip(t *testing.T) {
	for _, tc := range []struct {
		in    string
		width int
		want  string
	}{
		{"abc", 0, "abc"},
		{"abc", 3, "abc"},
		{"äbc", 2, "äb"},
		{green + "healthy" + plain + "  x", 10, green + "healthy" + plain + "  x"},
		{green + "healthy" + plain + "  x", 4, green + "heal" + plain},
		{"", 4, ""},
	} {
		if got := clip(tc.in, tc.width); got != tc.want {
			t.Errorf("clip(%q, %d) = %q, want %q", tc.in, tc.width, got, tc.want)
		}
	}
}

// TestWriteJSON wants answers as they are, and those that break off noticed.
func TestWriteJSON(t *testing.T) {
	long := "[" + strings.Repeat(`{"id":"u-1"},`, 10_000)
	for _, tc := range []struct{ in, want string }{
		{"[]\n", ""}, {`{"a":[1,{"b":null}]}`, ""}, {long + "{}]", ""},
		{"", "breaks off"}, {"[1,", "breaks off"}, {`{"a":`, "breaks off"}, {`{"a`, "breaks off"}, {long, "breaks off"},
		{"<html>", "not what the API"}, {"[1}", "not what the API"}, {"[1 2]", "not what the API"},
	} {
		var out bytes.Buffer
		c := &console{client: &client{name: "here"}, ctx: t.Context(), out: &out}
		err := c.writeJSON(&out, strings.NewReader(tc.in))
		if tc.want == "" && (err != nil || out.String() != tc.in) || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("of %.30q it is %.30q, %v", tc.in, out.String(), err)
		}
	}
	c := &console{client: &client{name: "here"}, ctx: t.Context()}
	if err := c.writeJSON(full{}, strings.NewReader(long+"{}]")); err == nil {
		t.Error("a disk that is full is not noticed")
	}
}

// full is a place where nothing can be written.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space") }

// FuzzClean has names of anybody.
func FuzzClean(f *testing.F) {
	for in := range hostile {
		f.Add(in)
	}
	f.Fuzz(func(t *testing.T, in string) {
		out := clean(in)
		if strings.ContainsFunc(out, unsafe) || !utf8.ValidString(out) {
			t.Errorf("clean(%q) = %q", in, out)
		}
		if clean(out) != out {
			t.Errorf("%q is not clean", out)
		}
	})
}
