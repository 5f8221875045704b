package caddyopt

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

type word string

type config struct {
	Name    string          `json:"name,omitempty"`
	Mode    word            `json:"mode,omitempty"`
	List    []string        `json:"list,omitempty"`
	N       int             `json:"n,omitempty"`
	Max     *int64          `json:"max,omitempty"`
	Rate    float64         `json:"rate,omitempty"`
	Bare    bool            `json:"bare,omitempty"`
	NoDelay *bool           `json:"nodelay,omitempty"`
	Wait    caddy.Duration  `json:"wait,omitempty"`
	Idle    *caddy.Duration `json:"idle,omitempty"`
	Size    int64           `json:"size,omitempty"`
	Pair    string          `json:"pair,omitempty"`
	Inner   struct {
		Depth int `json:"depth,omitempty"`
	} `json:"inner,omitzero"`
	At []string `json:"at,omitempty"`
}

func (c *config) options() Options {
	return Options{
		"name":    String(&c.Name),
		"mode":    Enum(&c.Mode, "hold", "close"),
		"list":    Strings(&c.List),
		"n":       Int(&c.N),
		"max":     Ptr(&c.Max, Int),
		"rate":    Float(&c.Rate),
		"bare":    Word(&c.Bare),
		"nodelay": Ptr(&c.NoDelay, Switch),
		"wait":    Duration(&c.Wait),
		"idle":    Ptr(&c.Idle, Duration),
		"size":    Size(&c.Size),
		"inner":   Nested(Options{"depth": Int(&c.Inner.Depth)}),
		"pair": Func(func(d *caddyfile.Dispenser) error {
			c.Pair = strings.Join([]string{d.Val(), fmt.Sprint(d.CountRemainingArgs())}, "/")
			d.NextArg()
			d.NextArg()
			return nil
		}),
		"@": Many(Func(func(d *caddyfile.Dispenser) error {
			c.At = append(c.At, d.Val())
			d.RemainingArgs()
			return nil
		})),
	}
}

func TestBlock(t *testing.T) {
	for in, want := range map[string]string{
		"x":                                      `{}`,
		"x {\n}":                                 `{}`,
		"x {\n name a\n}":                        `{"name":"a"}`,
		"x {\n name \"a b\"\n}":                  `{"name":"a b"}`,
		"x {\n mode close\n}":                    `{"mode":"close"}`,
		"x {\n list a b\n list c\n}":             `{"list":["a","b","c"]}`,
		"x {\n n -3\n}":                          `{"n":-3}`,
		"x {\n max 0\n}":                         `{"max":0}`,
		"x {\n rate 0.5\n}":                      `{"rate":0.5}`,
		"x {\n bare\n}":                          `{"bare":true}`,
		"x {\n nodelay off\n}":                   `{"nodelay":false}`,
		"x {\n wait 2d\n}":                       fmt.Sprintf(`{"wait":%d}`, 48*time.Hour),
		"x {\n idle 0s\n}":                       `{"idle":0}`,
		"x {\n size 16MiB\n}":                    `{"size":16777216}`,
		"x {\n inner {\n depth 2\n}\n}":          `{"inner":{"depth":2}}`,
		"x {\n inner {\n depth 2\n}\n name a\n}": `{"name":"a","inner":{"depth":2}}`,
		"x {\n pair a b\n}":                      `{"pair":"pair/2"}`,
		"x {\n @a b\n @a c\n @b\n}":              `{"at":["@a","@a","@b"]}`,

		"x y":                               `unexpected argument "y" of x, at Testfile:1`,
		"x {\n nmae a\n}":                   `unrecognized option "nmae" of x; did you mean name?, at Testfile:2`,
		"x {\n zzz a\n}":                    `unrecognized option "zzz" of x; there are bare, idle, inner, list, max,`,
		"x {\n name a\n n 1\n name b\n}":    `name: given twice, first in line 2, at Testfile:4`,
		"x {\n name\n}":                     `name: a value is missing, at Testfile:2`,
		"x {\n name a b\n}":                 `name: unexpected argument "b", at Testfile:2`,
		"x {\n name a {\n n 1\n}\n}":        `name: takes no block, at Testfile:3`,
		"x {\n list\n}":                     `list: a value is missing`,
		"x {\n bare on\n}":                  `bare: unexpected argument "on"`,
		"x {\n mode shut\n}":                `mode: "shut" is none of hold, close, at Testfile:2`,
		"x {\n n one\n}":                    `n: "one" is not a whole number`,
		"x {\n max 99999999999999999999\n}": `max: "99999999999999999999" is not a whole number`,
		"x {\n rate NaN\n}":                 `rate: "NaN" is not a number`,
		"x {\n rate inf\n}":                 `rate: "inf" is not a number`,
		"x {\n nodelay yes\n}":              `nodelay: "yes" is neither on nor off`,
		"x {\n wait 5\n}":                   `wait: "5" is not a duration, such as 500ms or 90s`,
		"x {\n size 16Mb\n}":                `size: "16Mb" is not a size`,
		"x {\n inner 3\n}":                  `unexpected argument "3" of inner`,
		"x {\n inner {\n depht 2\n}\n}":     `unrecognized option "depht" of inner; did you mean depth?, at Testfile:3`,
		"x {\n pair a b c\n}":               `pair: unexpected argument "c"`,
	} {
		t.Run(in, func(t *testing.T) {
			d := caddyfile.NewTestDispenser(in)
			d.Next()
			var c config
			var got string
			if err := Block(d, c.options()); err != nil {
				got = err.Error()
			} else {
				b, _ := json.Marshal(c)
				got = string(b)
			}
			if strings.HasPrefix(want, "{") && got != want || !strings.Contains(got, want) {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "4096": 4096, "4096B": 4096, "1KiB": 1024, "1KB": 1000, "2GiB": 2 << 30, "7TiB": 7 << 40,
		"": -1, "-1": -1, "MiB": -1, "1.5MiB": -1, "9223372036854775808": -1, "99999999TiB": -1, "1 MiB": -1,
	} {
		got, err := ParseSize(in)
		if err != nil {
			got = -1
		}
		if got != want {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", in, got, err, want)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	for _, s := range []string{"16MiB", "4096", "1B", "18446744073709551615TiB"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := ParseSize(s)
		if err != nil {
			return
		}
		if again, err := ParseSize(fmt.Sprint(n)); err != nil || again != n {
			t.Errorf("ParseSize(%q) = %d, which does not survive: %d, %v", s, n, again, err)
		}
	})
}

// Whatever stands in a block, reading it ends and says where it is wrong.
func FuzzBlock(f *testing.F) {
	for _, s := range []string{"name a", "list a b\n list c", "inner {\n depth 2\n}", "@a {\n x {\n y\n}\n}", "pair a b {\n}", "}", "{", "name {", "wait \"1s\n\""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		tokens, err := caddyfile.Tokenize([]byte("x {\n"+body+"\n}"), "Testfile")
		if err != nil || len(tokens) == 0 {
			return
		}
		d := caddyfile.NewDispenser(tokens)
		d.Next()
		var c config
		if err := Block(d, c.options()); err != nil && !strings.Contains(err.Error(), "at Testfile:") {
			t.Errorf("%q: %v, without a place", body, err)
		}
	})
}
