package doctor

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

// The exit statuses, as those of lint.
const (
	exitWrong = 1
	exitLoad  = 2
)

func init() {
	caddycmd.RegisterCommand(caddycmd.Command{
		Name:  "doctor",
		Usage: "[--config <path> [--adapter <name>]] [--json]",
		Short: "Looks for what keeps this host from running a config",
		Long: `
Compares what a config needs with what this host and this process have:
capabilities, descriptors, ports, buffers, the rules and routes that prefixes
and transparent listeners rely on. For each thing that is wrong it prints the
command that mends it. Nothing is changed.

The exit status is 0 when nothing is wrong, 1 when something is, and 2 when the
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
	needs, err := Read(config)
	if err != nil {
		return exitLoad, err
	}
	found, wrong := Check(Gather(), needs), 0
	for _, f := range found {
		if f.Level == Wrong {
			wrong++
		}
	}
	if fl.Bool("json") {
		if found == nil {
			found = []Finding{}
		}
		b, err := json.Marshal(found)
		if err != nil {
			return exitLoad, err
		}
		fmt.Println(string(b))
	} else {
		for _, f := range found {
			fmt.Println(f)
		}
	}
	if wrong > 0 {
		return exitWrong, fmt.Errorf("things that are wrong: %d", wrong)
	}
	return caddy.ExitCodeSuccess, nil
}
