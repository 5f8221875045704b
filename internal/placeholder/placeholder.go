// Package placeholder replaces Caddy's placeholders, such as {env.NAMESPACE}, in
// the options of modules.
package placeholder

import (
	"fmt"

	"github.com/caddyserver/caddy/v2"
)

// Option is an option of a module, by its name in the config.
type Option struct {
	Name  string
	Value *string
}

// Replace replaces the placeholders in options, where they stand. One without a
// value is an error, which begins with the option.
func Replace(options ...Option) error {
	repl := caddy.NewReplacer()
	for _, o := range options {
		s, err := repl.ReplaceOrErr(*o.Value, true, true)
		if err != nil {
			return fmt.Errorf("%s: %w", o.Name, err)
		}
		*o.Value = s
	}
	return nil
}
