package strictjson

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

type base struct {
	Idle *caddy.Duration `json:"idle,omitempty"`
	Max  *int64          `json:"max,omitempty"`
}

type inner struct {
	Names []string          `json:"names,omitempty"`
	By    map[string]uint32 `json:"by,omitempty"`
	Guest json.RawMessage   `json:"guest,omitempty"`
}

type config struct {
	base
	On    bool              `json:"on,omitempty"`
	Inner inner             `json:"inner,omitzero"`
	Many  map[string]*inner `json:"many,omitempty"`
	List  []*inner          `json:"list,omitempty"`
}

func (c *config) UnmarshalJSON(b []byte) error {
	type plain config
	return Unmarshal(b, (*plain)(c))
}

func TestUnmarshal(t *testing.T) {
	for in, want := range map[string]string{
		`{}`:   "",
		`null`: "",
		`{"on": true, "idle": "3s", "max": null, "inner": {"names": ["a"], "by": {"x": 1}, "guest": {"anything": 1}}, "many": {"m": {}}, "list": [null, {}]}`: "",

		`{"off": true}`:                   `off: unknown key; there are idle, inner, list, many, max, on`,
		`{"idel": "3s"}`:                  `idel: unknown key; did you mean idle?`,
		`{"plain": 1}`:                    `plain: unknown key`,
		`{"Idle": "3s"}`:                  `Idle: unknown key; did you mean idle?`,
		`{"inner": {"name": ["a"]}}`:      `inner.name: unknown key; did you mean names?`,
		`{"many": {"m.n": {"guets": 1}}}`: `many.m.n.guets: unknown key; did you mean guest?`,
		`{"list": [{}, {"names": "a"}]}`:  `list[1].names: want a list, not string`,
		`{"list": [{"names": ["a", 1]}]}`: `list[0].names[1]: want a string, not number`,
		`{"inner": {"by": {"x": -1}}}`:    `inner.by.x: want a whole number, not below 0, not number -1`,
		`{"inner": []}`:                   `inner: want an object, not array`,
		`{"many": []}`:                    `many: want an object, not array`,
		`{"idle": "3"}`:                   `idle: "3" is not a duration, such as 500ms or 90s`,
		`{"max": "3"}`:                    `max: want a whole number, not string`,
		`{"max": 1.5}`:                    `max: want a whole number, not number 1.5`,
		`{"on": "yes"}`:                   `on: want true or false, not string`,
	} {
		err := new(config).UnmarshalJSON([]byte(in))
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", in, err)
		case want != "" && (err == nil || !strings.HasPrefix(err.Error(), want)):
			t.Errorf("%s: error %v, want %s", in, err, want)
		}
	}
}

func TestUnmarshalSets(t *testing.T) {
	var c config
	if err := json.Unmarshal([]byte(`{"max": 3, "many": {"m": {"names": ["a"]}}}`), &c); err != nil {
		t.Fatal(err)
	}
	if *c.Max != 3 || c.Many["m"].Names[0] != "a" {
		t.Errorf("got %+v", c)
	}
}

// Check is at least as strict as encoding/json.
func FuzzCheck(f *testing.F) {
	for _, s := range []string{`{"on": true, "idle": "3s"}`, `{"many": {"m": {"by": {"x": 1}}}}`, `{"list": [null, {"names": ["a"]}]}`, `{"inner": {"guest": [1]}}`, `[`} {
		f.Add(s)
	}
	type plain config
	f.Fuzz(func(t *testing.T, s string) {
		if Check([]byte(s), new(plain)) != nil {
			return
		}
		if err := caddy.StrictUnmarshalJSON([]byte(s), new(plain)); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	})
}
