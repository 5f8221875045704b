package yamlconfig

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"go.yaml.in/yaml/v3"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// reader keeps what is known of a document while it is read.
type reader struct {
	file     string
	env      func(string) (string, bool)
	schema   int64 // that the document declares
	visits   int   // of nodes, one under an alias again for each alias
	most     int   // visits that there may be
	problems []problem
	warnings []caddyconfig.Warning
	used     map[string]string // variables and what they were
}

// problem is a mistake and where it is.
type problem struct {
	line, column int
	text         string
}

// err is what is wrong with the document, in the order of its lines.
func (r *reader) err() error {
	slices.SortStableFunc(r.problems, func(a, b problem) int {
		return cmp.Or(cmp.Compare(a.line, b.line), cmp.Compare(a.column, b.column))
	})
	var errs []error
	for i, p := range r.problems {
		if i == maxProblems {
			errs = append(errs, fmt.Errorf("and %d more", len(r.problems)-i))
			break
		}
		errs = append(errs, fmt.Errorf("%s:%d:%d: %s", r.file, p.line, p.column, p.text))
	}
	return errors.Join(errs...)
}

// full reports whether so much is wrong that reading on is of no use.
func (r *reader) full() bool { return len(r.problems) >= maxKept }

// spent reports whether reading has to end.
func (r *reader) spent() bool { return r.visits > r.most || r.full() }

// value is a node of the document; it may not be there.
type value struct {
	r    *reader
	n    *yaml.Node // nil: not there
	from *yaml.Node // the alias that leads to n, or nil
	path string
	nth  int // of the list at path, from 1; 0: path is its own
}

// where is the path of a value.
func (v value) where() string {
	if v.nth > 0 {
		return fmt.Sprintf("%s[%d]", v.path, v.nth-1)
	}
	return v.path
}

// given reports whether the document has the value. null is as good as nothing.
func (v value) given() bool { return v.n != nil }

// at makes a value of a node.
func (r *reader) at(n *yaml.Node, path string) value {
	v := value{r: r, n: n, path: path}
	if r.visits++; r.visits > r.most {
		if r.visits == r.most+1 {
			v.fail("the aliases make the document too long: they add more than %d values", maxAliased)
		}
		v.n = nil
		return v
	}
	if n.Kind == yaml.AliasNode {
		v.from, v.n = n, n.Alias
	}
	if v.n.Kind == yaml.ScalarNode && v.n.Tag == "!!null" {
		v.n = nil
	}
	return v
}

// fail notes a mistake. What has come from the environment is not told.
func (v value) fail(format string, args ...any) {
	if v.r.full() {
		return
	}
	p := problem{line: 1, column: 1, text: v.r.redact(fmt.Sprintf(format, args...))}
	if n := cmp.Or(v.from, v.n); n != nil {
		p.line, p.column = n.Line, n.Column
	}
	if path := v.where(); path != "" {
		p.text = path + ": " + p.text
	}
	v.r.problems = append(v.r.problems, p)
}

// redact puts variables back where their values stand. One of a few characters
// is no secret.
func (r *reader) redact(text string) string {
	names := make([]string, 0, len(r.used))
	for name := range r.used {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(r.used[b]), len(r.used[a])), cmp.Compare(a, b))
	})
	for _, name := range names {
		if val := r.used[name]; len(val) >= 4 {
			text = strings.ReplaceAll(text, val, "${"+name+"}")
			if quoted := strings.Trim(strconv.Quote(val), `"`); quoted != val {
				text = strings.ReplaceAll(text, quoted, "${"+name+"}")
			}
		}
	}
	return text
}

// what says what kind of thing a node is.
func what(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Tag == "!!str":
		return fmt.Sprintf("the string %.60q", n.Value)
	case n.Tag == "!!int":
		return fmt.Sprintf("the number %.60s", n.Value)
	case n.Tag == "!!float":
		return fmt.Sprintf("the fraction %.60s", n.Value)
	case n.Tag == "!!bool":
		return n.Value
	}
	return fmt.Sprintf("%.60s %.60q", n.Tag, n.Value)
}

var variable = regexp.MustCompile(`\$?\$\{[^}]*\}?`)

var variableName = regexp.MustCompile(`^\$\{([A-Za-z_][A-Za-z0-9_]*)\}$`)

// expand puts variables of the environment in. $${ stands for ${.
func (v value) expand() (text string, varied bool) {
	if !strings.Contains(v.n.Value, "${") {
		return v.n.Value, false
	}
	text = variable.ReplaceAllStringFunc(v.n.Value, func(s string) string {
		if strings.HasPrefix(s, "$$") {
			return s[1:]
		}
		varied = true
		m := variableName.FindStringSubmatch(s)
		if m == nil {
			v.fail("%q is no ${NAME}; write $${ for a dollar sign and a brace of its own", s)
			return ""
		}
		val, ok := v.r.env(m[1])
		if !ok {
			v.fail("the environment has no variable %s", m[1])
		}
		v.r.used[m[1]] = val
		return val
	})
	return text, varied
}

// text is a string, "" when there is none.
func (v value) text() string {
	if !v.given() {
		return ""
	}
	if v.n.Kind != yaml.ScalarNode || v.n.Tag != "!!str" {
		v.fail("%s stands where a string belongs%s", what(v.n), quoteHint(v.n))
		return ""
	}
	s, _ := v.expand()
	return s
}

func quoteHint(n *yaml.Node) string {
	if n.Kind == yaml.ScalarNode {
		return fmt.Sprintf(": write %.60q", n.Value)
	}
	return ""
}

// some is a string that is not empty.
func (v value) some() string {
	before := len(v.r.problems)
	s := v.text()
	if v.given() && s == "" && len(v.r.problems) == before {
		v.fail("is empty; leave it out instead")
	}
	return s
}

// plain is some, without the braces that Caddy's placeholders have.
func (v value) plain() string {
	s := v.some()
	if strings.ContainsAny(s, `{}`) {
		v.fail("braces make a placeholder of Caddy's; here variables are ${NAME}")
		return ""
	}
	return s
}

// oneOf is one of some words, "" when there is none.
func (v value) oneOf(words ...string) string {
	before := len(v.r.problems)
	s := v.text()
	if v.given() && !slices.Contains(words, s) && len(v.r.problems) == before {
		v.fail("%q is none of %s", s, strings.Join(words, ", "))
		return ""
	}
	return s
}

// number is a whole number from low to high; ok tells that there is one.
func (v value) number(low, high int64) (n int64, ok bool) {
	if !v.given() {
		return 0, false
	}
	varied := false
	text := v.n.Value
	if v.n.Kind == yaml.ScalarNode && v.n.Tag == "!!str" {
		text, varied = v.expand()
	}
	if v.n.Kind != yaml.ScalarNode || v.n.Tag != "!!int" && !varied {
		v.fail("%s stands where a whole number belongs", what(v.n))
		return 0, false
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		v.fail("%.60q is not a whole number of decimal digits from %d to %d", text, low, high)
		return 0, false
	}
	if n < low || n > high {
		v.fail("%d is not from %d to %d", n, low, high)
		return 0, false
	}
	return n, true
}

// decimal is a number, which may have a fraction.
func (v value) decimal() (n float64, ok bool) {
	if !v.given() {
		return 0, false
	}
	if v.n.Kind != yaml.ScalarNode || v.n.Tag != "!!int" && v.n.Tag != "!!float" {
		v.fail("%s stands where a number belongs", what(v.n))
		return 0, false
	}
	n, err := strconv.ParseFloat(v.n.Value, 64)
	if err != nil || n != n {
		v.fail("%.60q is not a number", v.n.Value)
		return 0, false
	}
	return n, true
}

// truth is true or false; nothing is false.
func (v value) truth() bool {
	if !v.given() {
		return false
	}
	text := v.n.Value
	varied := false
	if v.n.Kind == yaml.ScalarNode && v.n.Tag == "!!str" {
		text, varied = v.expand()
	}
	if v.n.Kind != yaml.ScalarNode || v.n.Tag != "!!bool" && !(varied && (text == "true" || text == "false")) {
		v.fail("%s stands where true or false belongs", what(v.n))
		return false
	}
	return strings.EqualFold(text, "true")
}

// list is the elements of a list; null among them is a mistake.
func (v value) list() (all []value) {
	if !v.given() {
		return nil
	}
	if v.n.Kind != yaml.SequenceNode {
		v.fail("%s stands where a list belongs", what(v.n))
		return nil
	}
	path := v.where()
	all = make([]value, 0, len(v.n.Content))
	for i, n := range v.n.Content {
		e := v.r.at(n, path)
		e.nth = i + 1
		if v.r.spent() {
			return nil
		}
		if !e.given() {
			value{r: v.r, n: n, path: path, nth: e.nth}.fail("is null")
			continue
		}
		all = append(all, e)
	}
	return all
}

// texts is a list of strings.
func (v value) texts() []string {
	var all []string
	for _, e := range v.list() {
		all = append(all, e.some())
	}
	return all
}

// textOrTexts is a list of strings, or one.
func (v value) textOrTexts() []string {
	if v.given() && v.n.Kind == yaml.ScalarNode {
		if s := v.some(); s != "" {
			return []string{s}
		}
		return nil
	}
	return v.texts()
}

// fields are the keys of a mapping. Those that are never asked for are mistakes.
type fields struct {
	value
	keys   []*yaml.Node
	byKey  map[string]value
	asked  []string
	before int // problems that were known before
}

// fields reads a mapping.
func (v value) fields() *fields {
	f := &fields{value: v, byKey: make(map[string]value), before: len(v.r.problems)}
	if !v.given() {
		return f
	}
	if v.n.Kind != yaml.MappingNode {
		v.fail("%s stands where a mapping belongs", what(v.n))
		f.n = nil
		return f
	}
	for i := 0; i+1 < len(v.n.Content); i += 2 {
		key, n := v.n.Content[i], v.n.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			value{r: v.r, n: key, path: v.where()}.fail("%s stands where a key belongs", what(key))
			continue
		}
		path := join(v.where(), key.Value)
		if _, twice := f.byKey[key.Value]; twice {
			value{r: v.r, n: key, path: path}.fail("is given twice")
			continue
		}
		f.keys = append(f.keys, key)
		f.byKey[key.Value] = v.r.at(n, path)
		if v.r.spent() {
			break
		}
	}
	return f
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// get is the value of a key that a mapping may have.
func (f *fields) get(key string) value {
	if !slices.Contains(f.asked, key) {
		f.asked = append(f.asked, key)
	}
	v, ok := f.byKey[key]
	if !ok {
		return value{r: f.r, path: join(f.where(), key)}
	}
	v.checkSince()
	return v
}

// need is the value of a key that a mapping must have.
func (f *fields) need(key, why string) value {
	v := f.get(key)
	if f.given() && !v.given() {
		f.fail("%s is missing: %s", key, why)
	}
	return v
}

// end refuses the keys that nobody has asked for.
func (f *fields) end() {
	for _, key := range f.keys {
		if f.r.full() {
			return
		}
		if !slices.Contains(f.asked, key.Value) {
			value{r: f.r, n: key, path: join(f.where(), key.Value)}.fail("unknown field; %s", suggest.Hint(key.Value, f.asked))
		}
	}
}

// entries are the keys and values of a mapping whose keys are data.
func (f *fields) entries(yield func(string, value) bool) {
	for _, key := range f.keys {
		f.asked = append(f.asked, key.Value)
		if !yield(key.Value, f.byKey[key.Value]) {
			return
		}
	}
}
