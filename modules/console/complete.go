package console

import (
	"context"
	"time"

	"github.com/spf13/cobra"
)

// completeWithin is how long a shell waits for the instance when somebody
// presses the tab key.
const completeWithin = time.Second

// candidates are what the next argument may be.
type candidates func(list []poolView, args []string) []string

// completing asks the instance for its pools.
func completing(of candidates) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		c, err := newClient(cmd)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(context.Background(), completeWithin)
		defer cancel()
		list, err := c.pools(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return of(list, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// poolNames are the pools, where none is named yet.
func poolNames(list []poolView, args []string) (names []string) {
	if len(args) > 0 {
		return nil
	}
	for _, p := range list {
		names = append(names, clean(p.Name))
	}
	return names
}

// poolThenBackend are the pools, then the backends of the one that is named.
func poolThenBackend(list []poolView, args []string) (names []string) {
	if len(args) == 0 {
		return poolNames(list, args)
	}
	for _, p := range list {
		for _, b := range p.Backends {
			if len(args) == 1 && p.Name == args[0] {
				names = append(names, clean(b.Addr))
			}
		}
	}
	return names
}

// poolBackendState goes on with the states.
func poolBackendState(list []poolView, args []string) []string {
	if len(args) == 2 {
		return states
	}
	return poolThenBackend(list, args)
}

// poolSecond are the pools as the second argument.
func poolSecond(list []poolView, args []string) []string {
	if len(args) != 1 {
		return nil
	}
	return poolNames(list, nil)
}
