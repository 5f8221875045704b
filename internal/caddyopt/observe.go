package caddyopt

import (
	"sync/atomic"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// Use is what a block of options is seen doing: it begins, or it comes to one
// of its options.
type Use struct {
	What    string          // the directive, as its errors call it
	Options map[string]bool // all there are by name, and whether each may be repeated
	Name    string          // the option; empty at the begin of the block
	File    string          // where that stands
	Line    int
}

var observer atomic.Pointer[func(Use)]

// Observe has every Use reported to f until stop is called. It is for tests
// that go through all options there are.
func Observe(f func(Use)) (stop func()) {
	observer.Store(&f)
	return func() { observer.Store(nil) }
}

func watch(d *caddyfile.Dispenser, what string, options Options, name string) {
	f := observer.Load()
	if f == nil {
		return
	}
	all := make(map[string]bool, len(options))
	for name, o := range options {
		all[name] = o.many
	}
	(*f)(Use{What: what, Options: all, Name: name, File: d.File(), Line: d.Line()})
}
