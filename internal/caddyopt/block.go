// Package caddyopt reads the options of a Caddyfile block into the fields that
// JSON fills too. It refuses what is not asked for: stray and missing
// arguments, unknown options, options given twice, blocks where there is none.
// Every error has the file and line. Defaults and the meaning of values are the
// business of the module.
//
//	caddyopt.Block(d, caddyopt.Options{
//		"min_size": caddyopt.Int(&m.MinSize),
//		"timeout":  caddyopt.Ptr(&m.Timeout, caddyopt.Duration),
//	})
package caddyopt

import (
	"maps"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/suggest"
)

// Options are the options of a block by name. The one named "@", where there
// is one, reads every option whose name begins with @.
type Options map[string]Option

// Option reads one option of a block.
type Option struct {
	// read stands at the option's name and takes its arguments and its block. Its
	// errors are those of the dispenser, which say where.
	read func(d *caddyfile.Dispenser) error
	many bool // may be given more than once
}

// Read reads an option on its own, for those that are made of others. d stands
// before the arguments.
func (o Option) Read(d *caddyfile.Dispenser) error { return o.read(d) }

// Many makes an option one that may be given more than once.
func Many(o Option) Option {
	o.many = true
	return o
}

// Block reads the rest of a directive: d stands at its name, or at the last of
// the arguments that the caller has taken.
func Block(d *caddyfile.Dispenser, options Options) error {
	return BlockOf(d, d.Val(), options)
}

// BlockOf is Block for a directive that errors call what.
func BlockOf(d *caddyfile.Dispenser, what string, options Options) error {
	if d.NextArg() {
		return d.Errf("unexpected argument %q of %s", d.Val(), what)
	}
	watch(d, what, options, "")
	first := make(map[string]int) // the line of each option
	for nesting := d.Nesting(); d.NextBlock(nesting); {
		name, line := d.Val(), d.Line()
		o, known := options[name]
		if !known && strings.HasPrefix(name, "@") {
			o, known = options["@"]
		}
		if !known {
			return d.Errf("unrecognized option %q of %s; %s", name, what, suggest.Hint(name, names(options)))
		}
		if before, twice := first[name]; twice && !o.many {
			return d.Errf("%s: given twice, first in line %d", name, before)
		}
		first[name] = line
		watch(d, what, options, name)
		if err := o.read(d); err != nil {
			return err
		}
		if d.NextArg() {
			return d.Errf("%s: unexpected argument %q", name, d.Val())
		}
		if d.NextBlock(d.Nesting()) {
			return d.Errf("%s: takes no block", name)
		}
	}
	return nil
}

// None reads a directive that has neither arguments nor options.
func None(d *caddyfile.Dispenser) error { return Block(d, nil) }

func names(options Options) []string {
	list := slices.Collect(maps.Keys(options))
	return slices.DeleteFunc(list, func(s string) bool { return s == "@" })
}
