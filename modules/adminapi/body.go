package adminapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

// decode reads a request's JSON object, of max bytes, into v; keys that it does
// not have are refused, and those that are given twice.
func decode(w http.ResponseWriter, r *http.Request, max int64, v any) error {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, max))
	if err == nil {
		err = unmarshal(body, v)
	}
	var large *http.MaxBytesError
	var other *json.UnmarshalTypeError
	switch {
	case errors.As(err, &large):
		return &problem{http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than %d bytes", max)}
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSlow
	case errors.As(err, &other) && other.Field == "":
		return &problem{http.StatusBadRequest, "the body: give a JSON object, not " + other.Value}
	case errors.As(err, &other):
		return &problem{http.StatusBadRequest, fmt.Sprintf("the body: %s: want %v, not %s", other.Field, other.Type, other.Value)}
	case err != nil:
		return &problem{http.StatusBadRequest, "the body: " + err.Error()}
	}
	return nil
}

func unmarshal(body []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, end := d.Token(); end != io.EOF {
		return errors.New("something stands behind the object")
	}
	return once(body)
}

// once returns an error that names a key which an object has twice: whoever
// looks at the body before us may see another of the two than we do. Upper and
// lower case are one, as they are where keys are looked up. body is valid JSON.
func once(body []byte) error {
	type level struct {
		keys map[string]bool // nil: an array
		key  bool            // the next token is one
	}
	var open []level
	d := json.NewDecoder(bytes.NewReader(body))
	for {
		t, err := d.Token()
		if err != nil {
			return nil // the end
		}
		top := len(open) - 1
		if top >= 0 && open[top].key && t != json.Delim('}') {
			name, _ := t.(string)
			folded := strings.ToLower(name)
			if open[top].keys[folded] {
				return fmt.Errorf("%.40q is given twice", name)
			}
			open[top].keys[folded], open[top].key = true, false
			continue
		}
		switch t {
		case json.Delim('{'):
			open = append(open, level{make(map[string]bool), true})
			continue
		case json.Delim('['):
			open = append(open, level{})
			continue
		case json.Delim('}'), json.Delim(']'):
			open = open[:top]
			top--
		}
		if top >= 0 {
			open[top].key = open[top].keys != nil
		}
	}
}
