package proxy_test

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
)

// table is the name of a table of options: what its errors call the directive,
// without an article and without the name that somebody has given it.
func table(what string) string {
	what = strings.TrimPrefix(strings.TrimPrefix(what, "a "), "the source ")
	kind, _, _ := strings.Cut(what, " ")
	return kind
}

// option is an option of a table.
type option struct{ table, name string }

// place is where a fixture uses an option.
type place struct {
	*fixture
	line int
	many bool
	what string // as errors call the directive
}

// survey is what the good fixtures use of what there is.
type survey struct {
	options map[option]bool  // all there are in the tables that came up
	used    map[option]place // the first of each
	keys    keys             // of the JSON that came out
}

func surveyFixtures(t *testing.T) *survey {
	t.Helper()
	s := &survey{make(map[option]bool), make(map[option]place), keys{make(map[string]bool), make(map[string]bool)}}
	var in *fixture
	stop := caddyopt.Observe(func(u caddyopt.Use) {
		if u.Name == "" {
			for name := range u.Options {
				s.options[option{table(u.What), name}] = true
			}
			return
		}
		name, many := u.Name, u.Options[u.Name]
		if strings.HasPrefix(name, "@") {
			name = "@"
		}
		if o := (option{table(u.What), name}); s.used[o].fixture == nil && u.File == "Caddyfile" {
			s.used[o] = place{in, u.Line, many, u.What}
		}
	})
	defer stop()
	for _, f := range fixtures(t) {
		if !f.good() {
			continue
		}
		in = f
		got, err := adapt([]byte(f.source))
		if err != nil {
			t.Fatalf("%s: %v", f.name, err)
		}
		s.keys.walk(reflect.TypeFor[caddy.Config](), json.RawMessage(got))
		var apps struct{ Apps caddy.ModuleMap }
		if err := json.Unmarshal([]byte(got), &apps); err != nil {
			t.Fatal(err)
		}
		for name, raw := range apps.Apps {
			s.keys.walkModule(name, raw)
		}
	}
	return s
}

// TestEveryOption looks for each option in the fixtures, and for each key of
// the JSON in what they come to.
func TestEveryOption(t *testing.T) {
	s := surveyFixtures(t)
	for _, o := range slices.SortedFunc(maps.Keys(s.options), func(a, b option) int {
		return strings.Compare(a.table+" "+a.name, b.table+" "+b.name)
	}) {
		if s.used[o].fixture == nil {
			t.Errorf("no fixture uses the option %s of %s", o.name, o.table)
		}
	}
	if len(s.options) < 100 {
		t.Errorf("only %d options came up", len(s.options))
	}
	all := keys{make(map[string]bool), make(map[string]bool)}
	for id, typ := range ourModules(t) {
		all.modules[id] = true
		all.list(typ)
	}
	for _, id := range slices.Sorted(maps.Keys(all.modules)) {
		if !s.keys.modules[id] && jsonOnly[id] == "" {
			t.Errorf("no fixture uses the module %s", id)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(all.fields)) {
		if !s.keys.fields[key] && jsonOnly[key] == "" {
			t.Errorf("no fixture comes to the key %s", key)
		}
	}
	if len(all.fields) < 100 {
		t.Errorf("only %d keys came up", len(all.fields))
	}
	for name, why := range jsonOnly {
		if !all.modules[name] && !all.fields[name] {
			t.Errorf("%s, which there is not: %s", name, why)
		}
		if s.keys.modules[name] || s.keys.fields[name] {
			t.Errorf("a fixture uses %s, yet: %s", name, why)
		}
	}
}

// ourModules are the modules of this repository, by ID, and their types.
func ourModules(t *testing.T) map[string]reflect.Type {
	t.Helper()
	modules := make(map[string]reflect.Type)
	for _, id := range caddy.Modules() {
		info, err := caddy.GetModule(id)
		if err != nil {
			t.Fatal(err)
		}
		if typ := bare(reflect.TypeOf(info.New())); ours(typ) && !strings.HasPrefix(id, "caddy.") { // which tests register
			modules[id] = typ
		}
	}
	return modules
}

// jsonOnly are the modules and keys that a Caddyfile does not reach, and why.
var jsonOnly = map[string]string{
	"admin.api.wayhouse": "is there with Caddy's admin endpoint and has no options",
}

// keys are modules by ID, and keys of JSON as type.key.
type keys struct {
	modules, fields map[string]bool
}

const home = "github.com/wayhouse-proxy/wayhouse/"

// ours reports whether a type is of this repository.
func ours(t reflect.Type) bool { return strings.HasPrefix(t.PkgPath(), home) }

// fieldKey is the name that a field of our own goes by.
func fieldKey(t reflect.Type, key string) string {
	return strings.TrimPrefix(t.PkgPath(), home) + "." + t.Name() + "." + key
}

// fieldsOf are the fields that an object of JSON for t has, by key; "-" stands
// for one that takes the whole object.
func fieldsOf(t reflect.Type) map[string]reflect.StructField {
	fields := make(map[string]reflect.StructField)
	for i := range t.NumField() {
		f := t.Field(i)
		key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && key == "":
			if inner := bare(f.Type); inner.Kind() == reflect.Struct && (f.IsExported() || f.Type.Kind() == reflect.Struct) {
				maps.Copy(fields, fieldsOf(inner))
			}
		case !f.IsExported() || key == "" || key == "-" && f.Tag.Get("caddy") == "":
		default:
			fields[key] = f
		}
	}
	return fields
}

// bare is what a type is made of: what pointers point to and lists and maps
// have.
func bare(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Map || t.Kind() == reflect.Slice && t != reflect.TypeFor[json.RawMessage]() {
		t = t.Elem()
	}
	return t
}

// declared reports whether a field is of a type of ours, which it is not where
// one of Caddy's is embedded.
func declared(t reflect.Type, field string) bool {
	f, _ := t.FieldByName(field)
	for _, i := range f.Index[:max(len(f.Index)-1, 0)] {
		t = bare(t.Field(i).Type)
	}
	return ours(t)
}

// list adds the keys of t, and those of the types in it.
func (k keys) list(t reflect.Type) {
	if t = bare(t); t.Kind() != reflect.Struct {
		return
	}
	for key, f := range fieldsOf(t) {
		if !ours(t) || !declared(t, f.Name) {
			continue
		}
		name := fieldKey(t, key)
		if k.fields[name] {
			continue
		}
		if key != "-" {
			k.fields[name] = true
		}
		k.list(f.Type)
	}
}

// walk adds the keys that raw has of t.
func (k keys) walk(t reflect.Type, raw json.RawMessage) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	var object map[string]json.RawMessage
	var array []json.RawMessage
	switch {
	case t == reflect.TypeFor[json.RawMessage]():
	case t.Kind() == reflect.Map && json.Unmarshal(raw, &object) == nil:
		for _, v := range object {
			k.walk(t.Elem(), v)
		}
	case t.Kind() == reflect.Slice && json.Unmarshal(raw, &array) == nil:
		for _, v := range array {
			k.walk(t.Elem(), v)
		}
	case t.Kind() == reflect.Struct && json.Unmarshal(raw, &object) == nil:
		fields := fieldsOf(t)
		if f, ok := fields["-"]; ok {
			k.walkGuests(f, raw)
			return
		}
		for key, v := range object {
			f, ok := fields[key]
			if !ok {
				continue
			}
			if ours(t) {
				k.fields[fieldKey(t, key)] = true
			}
			if f.Tag.Get("caddy") != "" {
				k.walkGuests(f, v)
			} else {
				k.walk(f.Type, v)
			}
		}
	}
}

// walkGuests adds what raw, the value of a field that modules are loaded from,
// has.
func (k keys) walkGuests(f reflect.StructField, raw json.RawMessage) {
	tag := make(map[string]string)
	for _, pair := range strings.Fields(f.Tag.Get("caddy")) {
		name, value, _ := strings.Cut(pair, "=")
		tag[name] = value
	}
	prefix := ""
	if tag["namespace"] != "" {
		prefix = tag["namespace"] + "."
	}
	var visit func(t reflect.Type, raw json.RawMessage)
	visit = func(t reflect.Type, raw json.RawMessage) {
		var object map[string]json.RawMessage
		var array []json.RawMessage
		switch {
		case t.Kind() == reflect.Slice && t != reflect.TypeFor[json.RawMessage]():
			if json.Unmarshal(raw, &array) == nil {
				for _, v := range array {
					visit(t.Elem(), v)
				}
			}
		case json.Unmarshal(raw, &object) != nil:
		case t == reflect.TypeFor[caddy.ModuleMap]():
			for name, v := range object {
				k.walkModule(prefix+name, v)
			}
		case t.Kind() == reflect.Map:
			for _, v := range object {
				visit(t.Elem(), v)
			}
		default:
			var name string
			if json.Unmarshal(object[tag["inline_key"]], &name) == nil {
				k.walkModule(prefix+name, raw)
			}
		}
	}
	visit(f.Type, raw)
}

// walkModule adds a module and what its JSON has.
func (k keys) walkModule(id string, raw json.RawMessage) {
	info, err := caddy.GetModule(id)
	if err != nil {
		return
	}
	k.modules[id] = true
	k.walk(reflect.TypeOf(info.New()), raw)
}
