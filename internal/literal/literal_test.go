package literal

import (
	"fmt"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for in, want := range map[string]string{
		"hex:ff00FF":                       "\xff\x00\xff",
		"ascii:HE LO":                      "HE LO",
		"ascii:a:b":                        "a:b",
		"":                                 `"" is neither hex:DIGITS nor ascii:TEXT`,
		"ff":                               `"ff" is neither hex:DIGITS nor ascii:TEXT`,
		"hex:":                             "nothing stands behind the colon",
		"ascii:":                           "nothing stands behind the colon",
		"hex:f":                            `"f" is not made of pairs of hexadecimal digits`,
		"hex:xx":                           `"xx" is not made of pairs of hexadecimal digits`,
		"ascii:é":                          `"é" is not ASCII: write it as hex:DIGITS`,
		"hex:" + strings.Repeat("x", 1000): `"` + strings.Repeat("x", 60) + `" is not made of pairs`,
	} {
		b, err := Parse(in)
		got := string(b)
		if err != nil {
			got = err.Error()
		}
		if !strings.HasPrefix(got, want) || err == nil && got != want {
			t.Errorf("Parse(%.60q) = %q, want %q", in, got, want)
		}
	}
}

func TestParseAny(t *testing.T) {
	for _, in := range []string{"hex:", "ascii:"} {
		if b, err := ParseAny(in); err != nil || len(b) > 0 {
			t.Errorf("ParseAny(%q) = % x, %v, want no byte", in, b, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"hex:01ff", "hex:", "ascii:ping", "ascii:", "hex:0", "x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		b, err := Parse(s)
		if err != nil {
			return
		}
		again, err := Parse(fmt.Sprintf("hex:%x", b))
		if err != nil || string(again) != string(b) || len(b) == 0 {
			t.Errorf("Parse(%q) = % x, which does not survive: % x, %v", s, b, again, err)
		}
	})
}
