package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

const forever = "forever"

var drainCommand = caddycmd.Command{
	Name:  "drain",
	Usage: "[--wait [<duration>]]",
	Short: "Takes a running instance out of rotation",
	Long: `
Has /readyz answer 503, so that the load balancer in front sends nobody new. The
data path runs on, and whoever comes all the same is served. That holds over
reloads and, with a state directory, restarts, until undrain.

With --wait it returns when no connection or UDP session is left, with status 0,
or after the duration when some are, with status 1.
`,
	CobraFunc: func(cmd *cobra.Command) {
		cmd.Flags().String("wait", "", "Wait until no flow is left, for so long at the most")
		cmd.Flags().Lookup("wait").NoOptDefVal = forever
		command(changing(cmd), 0, 1, drain)
	},
}

var undrainCommand = caddycmd.Command{
	Name:  "undrain",
	Short: "Brings a running instance back into rotation",
	Long:  "Undoes drain: /readyz answers 200 again when nothing else is in the way.",
	CobraFunc: func(cmd *cobra.Command) {
		command(changing(cmd), 0, 0, func(c *console, _ []string) error {
			return c.change(http.MethodPost, "/admin/undrain", nil, "no longer draining")
		})
	},
}

// patience reads --wait, whose value may stand behind a space too. 0 is none,
// a negative one no bound.
func patience(cmd *cobra.Command, args []string) (time.Duration, error) {
	text, _ := cmd.Flags().GetString("wait")
	switch {
	case len(args) == 1 && text != forever:
		return 0, misused("%q: want: %s", args[0], cmd.UseLine())
	case len(args) == 1:
		text = args[0]
	case text == forever:
		return -1, nil
	case !cmd.Flags().Changed("wait"):
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, misused("--wait: %q is not a duration, such as 10m", text)
	}
	return d, nil
}

func drain(c *console, args []string) error {
	wait, err := patience(c.cmd, args)
	if err != nil {
		return err
	}
	if err := c.change(http.MethodPost, "/admin/drain", nil, "draining: /readyz answers 503, and who is there stays"); err != nil || wait == 0 {
		return err
	}
	return c.waitEmpty(wait)
}

// How often flows are counted while they are waited for, and told of.
const (
	countEvery = 500 * time.Millisecond
	tellEvery  = 10 * time.Second
)

// waitEmpty returns when the instance has no flow.
func (c *console) waitEmpty(wait time.Duration) error {
	ctx := c.ctx
	if wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, wait)
		defer cancel()
	}
	tick := time.NewTicker(countEvery)
	defer tick.Stop()
	var told time.Time
	last := int64(-1) // not known yet
	for {
		n, err := c.flows(ctx)
		var no *refusal
		switch {
		case ctx.Err() != nil:
		case errors.As(err, &no): // as opposed to a reload that is in the way
			return err
		case err != nil && last < 0:
			return err
		case err != nil:
			fmt.Fprintln(c.errs, clean(err.Error()))
		case n == 0:
			if !c.json {
				fmt.Fprintln(c.out, "no flow is left")
			}
			return nil
		default:
			if n != last && time.Since(told) >= tellEvery {
				fmt.Fprintf(c.errs, "flows left: %d\n", n)
				told = time.Now()
			}
			last = n
		}
		select {
		case <-ctx.Done():
			if cause := context.Cause(c.ctx); cause != nil {
				return cause
			}
			if last < 0 {
				return fmt.Errorf("after %v it is not known how many flows are left", wait)
			}
			return fmt.Errorf("flows left after %v: %d", wait, last)
		case <-tick.C:
		}
	}
}

// flows counts live connections and sessions.
func (c *console) flows(ctx context.Context) (n int64, err error) {
	list, err := c.listeners(ctx)
	for _, l := range list {
		n += l.Connections + l.Sessions
	}
	return n, err
}
