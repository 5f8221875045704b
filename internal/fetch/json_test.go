package fetch

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
)

// object reads {"list": [{"N": …}…], …} and returns the numbers.
func object(d *Decoder) (numbers []int, err error) {
	err = d.Object(func(name string) error {
		if name != "list" {
			return d.Skip()
		}
		return d.Array(func() error {
			var v struct{ N int }
			err := d.Decode(&v)
			numbers = append(numbers, v.N)
			return err
		})
	})
	if err == nil {
		err = d.End()
	}
	return numbers, err
}

func TestDecoder(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string
		want string
	}{
		"list":            {`{"a": {"b": [1]}, "list": [{"N": 1}, {"N": 2, "M": "x"}], "c": null}`, "[1 2] <nil>"},
		"white space":     {" {\"list\":[{\"N\":1}\n]} \n", "[1] <nil>"},
		"empty":           {`{}`, "[] <nil>"},
		"empty list":      {`{"list": []}`, "[] <nil>"},
		"null":            {`{"list": null}`, "[] <nil>"},
		"another object":  {`{"list": {}}`, `[] "{" where an array belongs`},
		"a string":        {`{"list": "x"}`, `[] a string where an array belongs`},
		"no object":       {`[]`, `[] "[" where an object belongs`},
		"a number":        {`7`, `[] 7 where an object belongs`},
		"nothing":         {``, `[] EOF`},
		"two":             {`{} {}`, `[] more follows where the answer should end`},
		"cut in a value":  {`{"list": [{"N": 1}, {"N`, `[1 0] unexpected EOF`},
		"cut in the list": {`{"list": [{"N": 1}`, `[1] EOF`},
		"cut at the end":  {`{"list": [{"N": 1}]`, `[1] EOF`},
	} {
		numbers, err := object(NewDecoder(strings.NewReader(tc.in), 1<<10, 1<<10))
		if got := fmt.Sprint(numbers, " ", err); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
}

// endless repeats a text, and counts what was taken of it.
type endless struct {
	text string
	n    int64
}

func (e *endless) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		n += copy(p[n:], e.text[(int(e.n)+n)%len(e.text):])
	}
	e.n += int64(n)
	return n, nil
}

func TestDecoderIsBounded(t *testing.T) {
	const value, total = 64 << 10, 1 << 20
	for name, tc := range map[string]struct {
		head, body string
		most       int64
	}{
		"a list without an end":     {`{"list": [`, `{"N": 1},`, total},
		"a string without an end":   {`{"list": [{"N": "`, `x`, 3 * value},
		"a name without an end":     {`{"`, `x`, 3 * value},
		"skipped without an end":    {`{"other": [`, `1,`, 3 * value},
		"white space without end":   {` `, ` `, 3 * value},
		"space behind the end":      {`{}`, ` `, 3 * value},
		"numbers without an end":    {`{"list": [{"N": 1`, `0`, 3 * value},
		"an array in an array in …": {`{"list": `, `[`, 3 * value},
	} {
		body := &endless{text: tc.body}
		_, err := object(NewDecoder(io.MultiReader(strings.NewReader(tc.head), body), value, total))
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		if body.n > tc.most {
			t.Errorf("%s: %d bytes were read, want %d at most", name, body.n, tc.most)
		}
		if name == "a list without an end" && !errors.Is(err, ErrTooLarge) {
			t.Errorf("%s: %v, want %v", name, err, ErrTooLarge)
		}
	}
}

// TestCutOff has an answer whose end does not arrive, though it looks whole.
func TestCutOff(t *testing.T) {
	cut := io.MultiReader(strings.NewReader(`{"list": []}`), failing{})
	if _, err := object(NewDecoder(cut, 1<<10, 1<<10)); err != io.ErrUnexpectedEOF {
		t.Errorf("the error is %v, want %v", err, io.ErrUnexpectedEOF)
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func FuzzDecoder(f *testing.F) {
	for _, s := range []string{`{"a": {"b": [1]}, "list": [{"N": 1}, {"N": 2}], "c": null}`, `{"list":null}`, `[`, `{"list": [{"N": 1}`, ` {} {}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		const bound = 256
		numbers, err := object(NewDecoder(strings.NewReader(string(b)), bound, 2*bound))
		if err == nil && len(b) > 2*bound {
			t.Errorf("%d bytes were taken", len(b))
		}
		if len(numbers) > len(b) {
			t.Errorf("%d numbers in %d bytes", len(numbers), len(b))
		}
	})
}
