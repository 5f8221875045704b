package yamlconfig

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// object is a JSON object. What is empty is left out.
type object map[string]any

// set puts a value in, unless it is a zero one.
func (o object) set(key string, v any) {
	switch v := v.(type) {
	case string:
		if v == "" {
			return
		}
	case bool:
		if !v {
			return
		}
	case []string:
		if len(v) == 0 {
			return
		}
	case object:
		if len(v) == 0 {
			return
		}
	case []object:
		if len(v) == 0 {
			return
		}
	}
	o[key] = v
}

// whole puts in a number that the document gives.
func (o object) whole(key string, v value, low, high int64) {
	if n, ok := v.number(low, high); ok {
		o[key] = n
	}
}

// maxSeconds is the longest time that a document may give: ten years.
const maxSeconds = 10 * 365 * 24 * 3600

// seconds puts in a time of so many seconds, at least low.
func (o object) seconds(key string, v value, low int64) {
	if n, ok := v.number(low, maxSeconds); ok {
		o[key] = time.Duration(n) * time.Second
	}
}

// millis puts in a time of so many milliseconds, at least one.
func (o object) millis(key string, v value) {
	if n, ok := v.number(1, maxSeconds*1000); ok {
		o[key] = time.Duration(n) * time.Millisecond
	}
}

// document is what one part of a document has to know of the others.
type document struct {
	*reader
	filters   map[string]object
	sources   map[string]object
	pools     map[string]*pool
	resolvers map[string]*resolverOf
	listeners []*listenerOf
	sniffers  bool // a directory of them is given
	geo       bool // a database is given
}

// read is the whole config in JSON.
func (d *document) read(v value) object {
	top := v.fields()
	if !top.given() {
		if !v.given() {
			v.fail("the document is empty")
		}
		return nil
	}
	var ok bool
	if d.schema, ok = top.get("schema_version").version(); !ok {
		return nil
	}
	out, app, apps := object{}, object{}, object{}
	d.settings(top.get("settings").fields(), out, app, apps)
	d.filters = d.named(top.get("filters"), d.filter)
	d.sources = d.named(top.get("backend_sources"), d.source)
	pools := d.named(top.get("pools"), d.pool)
	resolvers := d.named(top.get("resolvers"), d.resolver)
	listeners := d.named(top.get("listeners"), d.listener)
	if web := top.get("web"); web.given() {
		web.fail("this build's YAML has no sites: serve them with site blocks of a Caddyfile, behind a listener with http_front")
	}
	top.end()
	d.check()

	for key, part := range map[string]map[string]object{"sources": d.sources, "pools": pools, "resolvers": resolvers, "listeners": listeners} {
		if len(part) > 0 {
			app[key] = part
		}
	}
	apps["wayhouse"] = app
	out["apps"] = apps
	return out
}

// named reads a list of things that have names.
func (d *document) named(v value, read func(name string, f *fields) object) map[string]object {
	all := make(map[string]object)
	lines := make(map[string]int)
	for _, e := range v.list() {
		if d.spent() {
			break
		}
		f := e.fields()
		name := f.need("name", "it is what others name it by")
		s := name.some()
		if first, twice := lines[s]; twice && s != "" {
			name.fail("%q is the name of another one, in line %d", s, first)
		}
		if name.given() && strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			name.fail("%q has a control character in it", s)
		}
		if f.given() {
			lines[s] = f.n.Line
		}
		o := read(s, f)
		f.end()
		all[s] = o
	}
	return all
}

// known says whether a name is there, and notes the mistake if it is not.
func known[T any](v value, kind, name string, all map[string]T) bool {
	if name == "" {
		return false
	}
	if _, ok := all[name]; ok {
		return true
	}
	v.fail("there is no %s %q; %s", kind, name, suggest.Hint(name, slices.Collect(maps.Keys(all))))
	return false
}

// place is how modules begin their errors.
var place = regexp.MustCompile(`^([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?:\[(\d+)\])?: `)

// ask has a module say what it thinks of its options, and notes it at the field
// that it is about, when nothing else is wrong with it. yamlNames tells the fields
// that are called otherwise there. Only modules that need no more than their
// options are asked.
func (f *fields) ask(id string, options object, yamlNames map[string]string) {
	if !f.given() || len(f.r.problems) > f.before {
		return
	}
	if err := try(id, options); err != nil {
		f.blame(err, yamlNames)
	}
}

// blame notes an error at the field that it begins with.
func (f *fields) blame(err error, yamlNames map[string]string) {
	text, at := err.Error(), f.value
	if m := place.FindStringSubmatch(text); m != nil {
		key := m[1]
		if other, ok := yamlNames[key]; ok {
			key = other
		}
		v := f.value
		for part := range strings.SplitSeq(key, ".") {
			inner, ok := v.peek(part)
			if !ok {
				break
			}
			v = inner
		}
		if v.where() != f.where() {
			at, text = v, strings.TrimPrefix(text, m[0])
			if i, err := strconv.Atoi(m[2]); err == nil && v.given() && i < len(v.n.Content) {
				at = value{r: v.r, n: v.n.Content[i], path: v.where(), nth: i + 1}
			}
		}
	}
	at.fail("%s", text)
}

// peek is the value of a key, without it being read.
func (v value) peek(key string) (value, bool) {
	if v.n == nil {
		return v, false
	}
	for i := 0; i+1 < len(v.n.Content); i += 2 {
		if v.n.Content[i].Value == key {
			return v.r.at(v.n.Content[i+1], join(v.where(), key)), true
		}
	}
	return v, false
}

// try sets a module up as a load would.
func try(id string, options object) error {
	info, err := caddy.GetModule(id)
	if err != nil {
		return fmt.Errorf("this build has no module %s", id)
	}
	raw, err := json.Marshal(options)
	if err != nil {
		return err
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	mod := info.New()
	if err := json.Unmarshal(raw, mod); err != nil {
		return err
	}
	if m, ok := mod.(caddy.CleanerUpper); ok {
		defer func() { _ = m.Cleanup() }() // it holds nothing that others see
	}
	if m, ok := mod.(caddy.Provisioner); ok {
		if err := m.Provision(ctx); err != nil {
			return err
		}
	}
	if m, ok := mod.(caddy.Validator); ok {
		return m.Validate()
	}
	return nil
}
