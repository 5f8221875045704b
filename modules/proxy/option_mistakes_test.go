package proxy_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// text is a Caddyfile by lines, as caddy fmt writes it, with an option in it.
type text struct {
	lines    []string
	at, end  int    // the lines of the option, from 0
	indent   string // of its first line
	name     string
	args     []string
	hasBlock bool
}

func textOf(source string, line int) *text {
	x := &text{lines: strings.Split(source, "\n"), at: line - 1, end: line - 1}
	first := x.lines[x.at]
	rest := strings.TrimLeft(first, "\t")
	x.indent = first[:len(first)-len(rest)]
	rest, x.hasBlock = strings.CutSuffix(rest, " {")
	x.name, rest, _ = strings.Cut(rest, " ")
	for rest != "" {
		arg, after, _ := strings.Cut(rest, " ")
		if strings.HasPrefix(rest, `"`) {
			arg, after, _ = strings.Cut(rest[1:], `"`)
			arg, after = `"`+arg+`"`, strings.TrimPrefix(after, " ")
		}
		x.args, rest = append(x.args, arg), after
	}
	if x.hasBlock {
		for x.lines[x.end] != x.indent+"}" {
			x.end++
		}
	}
	return x
}

// with is the Caddyfile with another first line of the option.
func (x *text) with(name string, args ...string) string {
	lines := slices.Clone(x.lines)
	lines[x.at] = x.indent + strings.Join(append([]string{name}, args...), " ")
	if x.hasBlock {
		lines[x.at] += " {"
	}
	return strings.Join(lines, "\n")
}

// withBlock has a block where the option has none.
func (x *text) withBlock() string {
	lines := slices.Clone(x.lines)
	lines[x.at] += " {\n" + x.indent + "\tsurplus\n" + x.indent + "}"
	return strings.Join(lines, "\n")
}

// twice has the option twice.
func (x *text) twice() string {
	return strings.Join(slices.Insert(slices.Clone(x.lines), x.end+1, x.lines[x.at:x.end+1]...), "\n")
}

// placed reports whether an error is in one of the lines that a mistake is made
// in, counted from 0.
func placed(err error, first, last int) bool {
	for n := first + 1; n <= last+1; n++ {
		if where := fmt.Sprintf("at Caddyfile:%d", n); strings.HasSuffix(err.Error(), where) || strings.Contains(err.Error(), where+" ") || strings.Contains(err.Error(), where+",") {
			return true
		}
	}
	return false
}

// lists are the options that take any number of arguments, though they stand
// once.
var lists = map[string]bool{"accept_proxy": true, "source": true}

// TestOptionMistakes makes each mistake that there may be with an option, with
// every option, where a fixture has it right. The error has the file and line
// and says which option it is about.
func TestOptionMistakes(t *testing.T) {
	s := surveyFixtures(t)
	made := 0
	for o, at := range s.used {
		if o.name == "@" {
			continue // a name of the user's; the fixtures bad_matcher_… are about it
		}
		x := textOf(at.source, at.line)
		wrong := func(mistake, source string, last int, must bool, says ...string) {
			t.Helper()
			made++
			_, err := adapt([]byte(source))
			switch {
			case err == nil && must:
				t.Errorf("%s of %s, %s: nobody minds in\n%s", o.name, o.table, mistake, source)
			case err != nil && !placed(err, x.at, last):
				t.Errorf("%s of %s, %s in line %d: the error is elsewhere: %v", o.name, o.table, mistake, x.at+1, err)
			case err != nil && !slices.ContainsFunc(says, func(s string) bool { return strings.Contains(err.Error(), s) }):
				t.Errorf("%s of %s, %s: the error has none of %q: %v", o.name, o.table, mistake, says, err)
			}
		}
		typo := o.name + o.name[len(o.name)-1:]
		wrong("with a typo", x.with(typo, x.args...), x.at, true,
			fmt.Sprintf("unrecognized option %q of ", typo)+at.what+"; did you mean "+o.name+"?")
		if at.many {
			wrong("twice", x.twice(), 2*x.end-x.at+1, false, o.name)
		} else {
			wrong("twice", x.twice(), x.end+1, true, fmt.Sprintf("%s: given twice, first in line %d", o.name, x.at+1))
		}
		about := append([]string{o.name}, x.args...) // it may be the kind that complains
		for n := range x.args {
			wrong(fmt.Sprintf("with %d arguments", n), x.with(o.name, x.args[:n]...), x.end, n == 0 && o.name != "route", about...)
			odd := slices.Clone(x.args)
			odd[n] = "?"
			wrong(fmt.Sprintf("with argument %d odd", n), x.with(o.name, odd...), x.end, false, about...)
		}
		wrong("with an argument too many", x.with(o.name, append(slices.Clone(x.args), "surplus")...), x.end, !at.many && !lists[o.name], about...)
		if !x.hasBlock {
			wrong("with a block", x.withBlock(), x.at+2, true, o.name, `unrecognized option "surplus"`, "takes no block")
		}
	}
	t.Logf("%d mistakes with %d options", made, len(s.used))
	if made < 500 {
		t.Error("that is too few")
	}
}

// TestKindMistakes misspells the name of every module of ours that a Caddyfile
// names.
func TestKindMistakes(t *testing.T) {
	forms := map[string]string{
		"layer4.matchers":        "listener game tcp/:7777 {\n@m %s\nroute @m {\nclose\n}\n}",
		"layer4.handlers":        "listener game tcp/:7777 {\nroute {\n%s\n}\n}",
		"wayhouse.balancers":     "pool lobby {\nto 10.0.0.5:7777\nbalancer %s\n}",
		"wayhouse.health_checks": "pool lobby {\nto 10.0.0.5:7777\nhealth %s\n}",
		"wayhouse.filters":       "listener game tcp/:7777 {\nfilter %s\n}",
		"wayhouse.resolvers":     "resolver matchmaker %s https://matchmaker.example.com",
		"wayhouse.sources":       "source match %s",
		"wayhouse.sniffer_hosts": "sniffers %s {\n}",
		"wayhouse.sniffers":      "sniffers native {\nmygame %s\n}",
	}
	used := make(map[string]bool)
	for id := range ourModules(t) {
		namespace, name := caddy.ModuleID(id).Namespace(), caddy.ModuleID(id).Name()
		form, ok := forms[namespace]
		if !ok {
			continue
		}
		used[namespace] = true
		typo := name + name[len(name)-1:]
		before, _, _ := strings.Cut(form, "%s")
		line := strings.Count(before, "\n") + 3
		_, err := adapt(fmt.Appendf(nil, "{\nwayhouse {\n"+form+"\n}\n}\n", typo))
		want := fmt.Sprintf("%q; did you mean %s?, at Caddyfile:%d", typo, name, line)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one with %s", id, err, want)
		}
	}
	for _, namespace := range slices.Sorted(maps.Keys(forms)) {
		if !used[namespace] {
			t.Errorf("no module of %s came up", namespace)
		}
	}
}
