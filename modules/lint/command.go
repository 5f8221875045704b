package lint

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// The exit statuses. Caddy ends with another one than 1 as it is told.
const (
	exitFindings = 1
	exitLoad     = 2
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "lint",
		Usage: "[--config <path> [--adapter <name>]] [--json]",
		Short: "Looks for likely mistakes in a config",
		Long: `
Checks a config as validate does, without running it, and then looks for what is
allowed and hardly ever meant: routes that nothing reaches, pools that nobody
uses, timeouts in the wrong order.

The exit status is 0 when nothing is found, 1 when something is, and 2 when the
config cannot be loaded.
`,
		CobraFunc: func(cmd *cobra.Command) {
			cmd.Flags().StringP("config", "c", "", "Configuration file; Caddyfile in this directory unless given")
			cmd.Flags().StringP("adapter", "a", "", "Name of config adapter")
			cmd.Flags().Bool("json", false, "Print the findings as JSON")
			cmd.Args = cobra.NoArgs
			cmd.RunE = caddycmd.WrapCommandFuncForCobra(run)
		},
	})
}

func run(fl caddycmd.Flags) (int, error) {
	config, _, _, err := caddycmd.LoadConfig(fl.String("config"), fl.String("adapter"))
	if err != nil {
		return exitLoad, err
	}
	if len(config) == 0 {
		return exitLoad, errors.New("--config: no file is named and there is no Caddyfile in this directory")
	}
	found, err := Load(config)
	if err != nil {
		return exitLoad, err
	}
	if err := write(os.Stdout, found, fl.Bool("json")); err != nil {
		return exitLoad, err
	}
	if len(found) > 0 {
		return exitFindings, fmt.Errorf("%d likely mistakes", len(found))
	}
	return caddy.ExitCodeSuccess, nil
}

func write(w io.Writer, found []Finding, asJSON bool) error {
	if asJSON {
		if found == nil {
			found = []Finding{}
		}
		return json.NewEncoder(w).Encode(found)
	}
	for _, f := range found {
		if _, err := fmt.Fprintln(w, f); err != nil {
			return err
		}
	}
	return nil
}
