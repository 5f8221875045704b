package adminapi

import "testing"

func TestKeysOnce(t *testing.T) {
	for in, want := range map[string]string{
		`{}`:                                     "",
		`{"a": 1, "b": {"a": 2}, "c": "a"}`:      "",
		`{"a": [{"x": 1}, {"x": 2}], "x": [[]]}`: "",
		`{"a": 1, "a": 2}`:                       `"a" is given twice`,
		`{"addr": 1, "b": {}, "ADDR": 2}`:        `"ADDR" is given twice`,
		`{"b": [1, {"a": {}, "c": [], "a": 1}]}`: `"a" is given twice`,
		`{"a": "{", "\u0061": 1}`:                `"a" is given twice`,
	} {
		got := ""
		if err := once([]byte(in)); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", in, got, want)
		}
	}
	var v struct {
		Pool string `json:"pool"`
	}
	if err := unmarshal([]byte(`{"pool": "a", "Pool": "b"}`), &v); err == nil {
		t.Error("a key that is given twice is taken")
	}
}

func FuzzOnce(f *testing.F) {
	for _, s := range []string{`{"a": 1, "a": 2}`, `[{"x": [1, {}]}, null, "}"]`, `{"a": {"b": []}}`, `{`, `]`, `}{`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var v any
		_ = unmarshal(b, &v)
	})
}
