package native

import (
	"strings"
	"testing"
)

func TestPatterns(t *testing.T) {
	for config, want := range map[string]string{
		"hex:ff00":                               "firstbytes",
		"key:mygame|hex:ff00":                    "mygame",
		" key: mygame | @2 ascii:abc ":           "mygame",
		"ascii:a b|@512 hex:00":                  "firstbytes",
		"":                                       "nothing to look for",
		"  ":                                     "nothing to look for",
		"key:x":                                  "0 patterns",
		"key:|hex:00":                            "the name is empty",
		"hex:0":                                  "pairs of hexadecimal digits",
		"hex:":                                   "nothing stands behind the colon",
		"ascii:":                                 "nothing stands behind the colon",
		"ascii:\u00e9":                           "is not ASCII",
		"regexp:a+":                              "neither hex:DIGITS nor ascii:TEXT",
		"@513 hex:00":                            `the offset "513"`,
		"@-1 hex:00":                             `the offset "-1"`,
		"@x hex:00":                              `the offset "x"`,
		"hex:00|":                                "pattern 2",
		strings.Repeat("hex:00|", 33):            "34 patterns",
		"hex:00" + strings.Repeat("|hex:00", 31): "firstbytes",
	} {
		p, err := parsePatterns(config)
		got := p.key
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%q: %s, want %s", config, got, want)
		}
	}
}

func TestPatternMatch(t *testing.T) {
	p, err := parsePatterns("key:g|@2 ascii:abc|hex:ffff")
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]struct{ stream, datagram answer }{
		"xxabc":       {yes, yes},
		"xxabcdef":    {yes, yes},
		"\xff\xff":    {yes, yes},
		"\xff\xffabd": {yes, yes},
		"":            {more, no},
		"x":           {more, no},
		"xxab":        {more, no},
		"xxad":        {no, no},
		"\xffx":       {more, no},
		"\xffxac":     {no, no},
		"abc":         {no, no},
	} {
		if got := p.match([]byte(in), false); got != want.stream {
			t.Errorf("stream %q: %v, want %v", in, got, want.stream)
		}
		if got := p.match([]byte(in), true); got != want.datagram {
			t.Errorf("datagram %q: %v, want %v", in, got, want.datagram)
		}
	}
}

func FuzzPatterns(f *testing.F) {
	f.Add("key:g|@2 ascii:abc|hex:ffff", []byte("xxabc"))
	f.Fuzz(func(t *testing.T, config string, b []byte) {
		p, err := parsePatterns(config)
		if err != nil {
			return
		}
		before := p.match(nil, false)
		for cut := range len(b) + 1 {
			a := p.match(b[:cut], false)
			if before == no && a != no {
				t.Fatalf("%q becomes %v with %d bytes of %q", config, a, cut, b)
			}
			before = a
		}
		if whole := p.match(b, true); (whole == yes) != (before == yes) {
			t.Errorf("%q: %v as a stream, %v as a datagram", config, before, whole)
		}
	})
}
