package discovery

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// parseFile reads a list of backends. The path says which format it is in.
// Errors begin with the path and, where there is one, the line.
func parseFile(path string, content []byte) (list []Endpoint, err error) {
	switch filepath.Ext(path) {
	case ".json":
		list, err = parseJSON(content)
	case ".yaml", ".yml":
		list, err = parseYAML(content)
	default:
		if json.Valid(content) {
			list, err = parseJSON(content)
		} else {
			list, err = parseYAML(content)
		}
	}
	var at lineError
	switch {
	case errors.As(err, &at):
		return nil, fmt.Errorf("%s:%d: %w", path, at.line, at.err)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return list, nil
}

// lineError is a mistake in a line.
type lineError struct {
	line int
	err  error
}

func (e lineError) Error() string { return fmt.Sprintf("line %d: %v", e.line, e.err) }

var errNotList = errors.New(`this is not a list, as in ["10.0.0.5:7777", {"addr": "10.0.0.6:7777", "weight": 2}]`)

func parseJSON(b []byte) ([]Endpoint, error) {
	var entries []json.RawMessage
	if err := json.Unmarshal(b, &entries); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return nil, lineError{lineAt(b, int(syntax.Offset)), err}
		}
		return nil, errNotList
	}
	if entries == nil { // null
		return nil, errNotList
	}
	// Once more, for where the entries are.
	d := json.NewDecoder(bytes.NewReader(b))
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	list := make([]Endpoint, 0, len(entries))
	for d.More() {
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, err
		}
		e, err := jsonEntry(raw)
		if err != nil {
			return nil, lineError{lineAt(b, int(d.InputOffset())-len(raw)), err}
		}
		list = append(list, e)
	}
	return list, nil
}

// lineAt is the line of a place in b, from 1.
func lineAt(b []byte, offset int) int {
	return 1 + bytes.Count(b[:min(max(offset, 0), len(b))], []byte{'\n'})
}

func jsonEntry(raw json.RawMessage) (Endpoint, error) {
	var addr string
	if json.Unmarshal(raw, &addr) == nil {
		return entry(fields{"addr": addr})
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return Endpoint{}, errEntry
	}
	f := make(fields)
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return Endpoint{}, err
		}
		k, _ := key.(string)
		if _, twice := f[k]; twice {
			return Endpoint{}, fmt.Errorf("%.40q is given twice", k)
		}
		var v json.RawMessage
		if err := d.Decode(&v); err != nil {
			return Endpoint{}, err
		}
		// A number as it is written, and what is no number with its quotes.
		f[k] = string(v)
		if k == "addr" && json.Unmarshal(v, &addr) == nil {
			f[k] = addr
		}
	}
	return entry(f)
}

func parseYAML(b []byte) ([]Endpoint, error) {
	d := yaml.NewDecoder(bytes.NewReader(b))
	var doc, more yaml.Node
	switch err := d.Decode(&doc); {
	case err == io.EOF:
		return nil, nil // nothing in it: an empty list
	case err != nil:
		return nil, err
	case len(doc.Content) != 1 || doc.Content[0].Kind != yaml.SequenceNode:
		return nil, errNotList
	}
	if err := d.Decode(&more); err != io.EOF {
		return nil, errors.New("there is more than one document")
	}
	entries := doc.Content[0].Content
	list := make([]Endpoint, 0, len(entries))
	for _, n := range entries {
		e, err := yamlEntry(n)
		if err != nil {
			return nil, lineError{n.Line, err}
		}
		list = append(list, e)
	}
	return list, nil
}

func yamlEntry(n *yaml.Node) (Endpoint, error) {
	switch n.Kind {
	case yaml.ScalarNode:
		return entry(fields{"addr": n.Value})
	case yaml.MappingNode:
	default:
		return Endpoint{}, errEntry
	}
	f := make(fields)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode || v.Kind != yaml.ScalarNode {
			return Endpoint{}, errEntry
		}
		if _, twice := f[k.Value]; twice {
			return Endpoint{}, fmt.Errorf("%.40q is given twice", k.Value)
		}
		f[k.Value] = v.Value
	}
	return entry(f)
}

var errEntry = errors.New(`an entry is neither "ip:port" nor an object with addr and, if wanted, weight, priority and max_sessions; ` +
	`in YAML an IPv6 address needs quotes`)

// fields are those of an entry, as they are written.
type fields map[string]string

var fieldNames = []string{"addr", "weight", "priority", "max_sessions"}

func entry(f fields) (Endpoint, error) {
	for k := range f {
		if !slices.Contains(fieldNames, k) {
			return Endpoint{}, fmt.Errorf("an entry has no %.40q; %s", k, suggest.Hint(k, fieldNames))
		}
	}
	if f["addr"] == "" {
		return Endpoint{}, errors.New("addr: missing, as in 10.0.0.5:7777")
	}
	a, err := netip.ParseAddrPort(f["addr"])
	if err != nil {
		return Endpoint{}, fmt.Errorf("addr: %.80q is not ip:port", f["addr"])
	}
	e := Endpoint{Addr: netip.AddrPortFrom(a.Addr().Unmap(), a.Port())}
	if !valid(e.Addr) {
		return Endpoint{}, fmt.Errorf("addr: %s is not the address of one host and a port from 1 to 65535", a)
	}
	weight, err := f.number("weight", 1, 1_000_000)
	if err != nil {
		return Endpoint{}, err
	}
	priority, err := f.number("priority", 0, math.MaxUint16)
	if err != nil {
		return Endpoint{}, err
	}
	sessions, err := f.number("max_sessions", 1, math.MaxInt32)
	if err != nil {
		return Endpoint{}, err
	}
	e.Weight, e.Priority, e.MaxSessions = uint32(weight), uint16(priority), sessions
	return e, nil
}

// number is a field, 0 when it is not given.
func (f fields) number(key string, least, most int64) (int64, error) {
	s, ok := f[key]
	if !ok {
		return 0, nil
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("%s: %.40s is not a number from %d to %d", key, s, least, most)
	}
	return n, nil
}
