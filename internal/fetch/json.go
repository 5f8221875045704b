package fetch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
)

// Unlimited is for streams that go on for as long as they like.
const Unlimited = math.MaxInt64

// Decoder reads a JSON answer value by value, so that what is held of it is one
// value, whatever is sent.
type Decoder struct {
	json *json.Decoder
	in   limited
}

// NewDecoder reads from r: no value of more than about value bytes, and no more
// than total.
func NewDecoder(r io.Reader, value, total int64) *Decoder {
	d := &Decoder{in: limited{from: r, each: value, left: value, rest: total}}
	d.json = json.NewDecoder(&d.in)
	return d
}

// Decode reads the next value into v. At the end of the answer the error is
// io.EOF.
func (d *Decoder) Decode(v any) error {
	d.in.left = d.in.each
	return d.json.Decode(v)
}

// Skip reads the next value and forgets it.
func (d *Decoder) Skip() error { return d.Decode(new(nothing)) }

type nothing struct{}

func (*nothing) UnmarshalJSON([]byte) error { return nil }

// Object reads an object, and calls field with the name of each of its fields.
// field reads the value.
func (d *Decoder) Object(field func(name string) error) error {
	t, err := d.token()
	if err != nil {
		return err
	}
	if t != json.Delim('{') {
		return fmt.Errorf("%s where an object belongs", describe(t))
	}
	for d.more() {
		t, err := d.token()
		if err != nil {
			return err
		}
		if err := field(t.(string)); err != nil { // a Decoder gives nothing else there
			return err
		}
	}
	_, err = d.token()
	return err
}

// Array reads an array, and calls element for each of its values. element reads
// it. null is an array without any.
func (d *Decoder) Array(element func() error) error {
	t, err := d.token()
	if err != nil || t == nil {
		return err
	}
	if t != json.Delim('[') {
		return fmt.Errorf("%s where an array belongs", describe(t))
	}
	for d.more() {
		if err := element(); err != nil {
			return err
		}
	}
	_, err = d.token()
	return err
}

// End checks that the answer ends here, and has arrived whole.
func (d *Decoder) End() error {
	switch _, err := d.token(); {
	case err == io.EOF:
		return nil
	case err != nil:
		return err
	}
	return errors.New("more follows where the answer should end")
}

func (d *Decoder) token() (json.Token, error) {
	d.in.left = d.in.each
	t, err := d.json.Token()
	return t, err
}

func (d *Decoder) more() bool {
	d.in.left = d.in.each
	return d.json.More()
}

func describe(t json.Token) string {
	switch t := t.(type) {
	case json.Delim:
		return fmt.Sprintf("%q", t.String())
	case string:
		return "a string"
	case nil:
		return "null"
	default:
		return fmt.Sprintf("%v", t)
	}
}

// ErrTooLarge is the error of an answer that has more than its bounds allow.
var ErrTooLarge = errors.New("the answer is too large")

// limited ends with an error instead of reading too much.
type limited struct {
	from       io.Reader
	each, left int64 // of one value
	rest       int64 // of all
}

func (l *limited) Read(p []byte) (int, error) {
	if l.rest <= 0 || l.left <= 0 {
		return 0, ErrTooLarge
	}
	n, err := l.from.Read(p[:min(int64(len(p)), l.left, l.rest)])
	l.left -= int64(n)
	l.rest -= int64(n)
	return n, err
}
