package console

import (
	"fmt"

	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

var healthCommand = caddycmd.Command{
	Name:  "health",
	Usage: "[--ready]",
	Short: "Says whether a running instance lives, or takes new clients",
	Long: `
For health checks where there is no curl, as in a container. Without a flag it
asks /healthz, which answers while the process lives. With --ready it asks
/readyz: whether a config runs, its listeners are bound and the instance is not
draining. A container that is restarted for not being ready would lose the
players it drains.

The exit status is 0 when it is so, 1 when it is not, with the reason on standard
error, and 2 when the command line is wrong.
`,
	CobraFunc: func(cmd *cobra.Command) {
		where(cmd)
		cmd.Flags().Bool("ready", false, "Ask whether it takes new clients")
		cmd.Flags().Bool("json", false, "Print the API's JSON")
		command(cmd, 0, 0, health)
	},
}

func health(c *console, _ []string) error {
	path := "/healthz"
	if ready, _ := c.cmd.Flags().GetBool("ready"); ready {
		path = "/readyz"
	}
	if c.json {
		return c.copyJSON(c.out, path, nil)
	}
	var state struct {
		Status string `json:"status"`
	}
	if err := c.get(c.ctx, path, nil, &state); err != nil {
		return err
	}
	_, err := fmt.Fprintln(c.out, clean(state.Status))
	return err
}
