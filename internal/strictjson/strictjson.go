// Package strictjson decodes a module's config with errors that name the place:
// encoding/json tells an unknown key without its path, and not what would have
// been right.
package strictjson

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// Unmarshal is json.Unmarshal for a config that must have no unknown keys. v
// must not have an UnmarshalJSON that calls it.
func Unmarshal(data []byte, v any) error {
	if err := Check(data, v); err != nil {
		return err
	}
	return json.Unmarshal(data, v)
}

// Check says what is wrong with data as a config for v, and leaves v alone. The
// error begins with the path of the key it is about. Guests, which are
// json.RawMessage, are not looked into.
func Check(data []byte, v any) error {
	t := reflect.TypeOf(v)
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() == reflect.Struct { // whatever methods it has: those may be calling
		return object(data, t, "")
	}
	return value(data, t, "")
}

var (
	unmarshaler     = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
)

func value(data []byte, t reflect.Type, path string) error {
	if string(bytes.TrimSpace(data)) == "null" {
		return nil
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if p := reflect.PointerTo(t); p.Implements(unmarshaler) || p.Implements(textUnmarshaler) {
		return leaf(data, t, path)
	}
	switch t.Kind() {
	case reflect.Struct:
		return object(data, t, path)
	case reflect.Map:
		return entries(data, t, path)
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return leaf(data, t, path)
		}
		return list(data, t, path)
	}
	return leaf(data, t, path)
}

func object(data []byte, t reflect.Type, path string) error {
	var got map[string]json.RawMessage
	if err := json.Unmarshal(data, &got); err != nil {
		return at(path, wrong(err, "an object"))
	}
	known := make(map[string]reflect.Type)
	fields(t, known)
	for _, key := range slices.Sorted(maps.Keys(got)) {
		ft, ok := known[key]
		if !ok {
			return at(join(path, key), errors.New("unknown key; "+suggest.Hint(key, slices.Collect(maps.Keys(known)))))
		}
		if err := value(got[key], ft, join(path, key)); err != nil {
			return err
		}
	}
	return nil
}

// fields collects the keys of a struct and of those embedded in it.
func fields(t reflect.Type, known map[string]reflect.Type) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-" || !f.IsExported() && !f.Anonymous:
		case name != "":
			known[name] = f.Type
		case f.Anonymous && f.Type.Kind() == reflect.Struct:
			fields(f.Type, known)
		case f.IsExported():
			known[f.Name] = f.Type
		}
	}
}

func entries(data []byte, t reflect.Type, path string) error {
	var got map[string]json.RawMessage
	if err := json.Unmarshal(data, &got); err != nil {
		return at(path, wrong(err, "an object"))
	}
	for _, key := range slices.Sorted(maps.Keys(got)) {
		if err := value(got[key], t.Elem(), join(path, key)); err != nil {
			return err
		}
	}
	return nil
}

func list(data []byte, t reflect.Type, path string) error {
	var got []json.RawMessage
	if err := json.Unmarshal(data, &got); err != nil {
		return at(path, wrong(err, "a list"))
	}
	for i, item := range got {
		if err := value(item, t.Elem(), fmt.Sprintf("%s[%d]", path, i)); err != nil {
			return err
		}
	}
	return nil
}

func leaf(data []byte, t reflect.Type, path string) error {
	err := json.Unmarshal(data, reflect.New(t).Interface())
	if err == nil {
		return nil
	}
	if t == reflect.TypeFor[caddy.Duration]() {
		return at(path, fmt.Errorf("%s is not a duration, such as 500ms or 90s", data))
	}
	want := map[reflect.Kind]string{
		reflect.Bool: "true or false", reflect.String: "a string", reflect.Float64: "a number",
		reflect.Int: "a whole number", reflect.Int64: "a whole number", reflect.Uint32: "a whole number, not below 0",
	}[t.Kind()]
	return at(path, wrong(err, want))
}

// wrong says what was wanted where JSON of another kind stands.
func wrong(err error, want string) error {
	var kind *json.UnmarshalTypeError
	if want == "" || !errors.As(err, &kind) {
		return err
	}
	return fmt.Errorf("want %s, not %s", want, kind.Value)
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func at(path string, err error) error {
	if path == "" {
		return err
	}
	return fmt.Errorf("%s: %w", path, err)
}
