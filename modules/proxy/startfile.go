package proxy

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"
)

var errNoFile = errors.New("the process was not started with a config file")

// StartFile is the config file in the arguments of a process, read by Caddy's
// own flags, and empty where run takes the Caddyfile of its directory.
func StartFile(args []string) (file, adapter string, err error) {
	run, ok := caddycmd.Commands()["run"]
	if !ok || len(args) < 2 || args[1] != "run" {
		return "", "", errNoFile
	}
	var cmd cobra.Command
	run.CobraFunc(&cmd)
	if err := cmd.ParseFlags(args[2:]); err != nil {
		return "", "", fmt.Errorf("the arguments of the process: %w", err)
	}
	flags := cmd.Flags()
	resume, _ := flags.GetBool("resume")
	file, _ = flags.GetString("config")
	adapter, _ = flags.GetString("adapter")
	if resume || file == "-" {
		return "", "", errNoFile
	}
	return file, adapter, nil
}

// takeSignals has Caddy load the file of the process by LoadFile on SIGUSR1. Its
// own way would tell us nothing of a file that cannot be read.
func takeSignals() {
	if file, adapter, err := StartFile(os.Args); err == nil {
		file = cmp.Or(file, defaultFile)
		caddy.SetLastConfig(file, cmp.Or(adapter, adapterOf(file)), LoadFile)
	}
}

// defaultFile is what Caddy looks for in its directory without a config.
const defaultFile = "Caddyfile"

// adapterOf is the adapter that Caddy takes for a file without being told one.
func adapterOf(file string) string {
	base := strings.ToLower(filepath.Base(file))
	switch {
	case filepath.Ext(base) == ".json":
		return ""
	case strings.HasPrefix(base, "caddyfile"), strings.HasSuffix(base, ".caddyfile"):
		return "caddyfile"
	}
	return ""
}

// LoadFile is what Caddy does on SIGUSR1, but for the answer. It has the file
// known again for the next signal, which Caddy forgets when another config is
// pushed.
func LoadFile(file, adapter string) error {
	from, _ := source()
	return Through(from, func() error { return loadFile(file, adapter) })
}

func loadFile(file, adapter string) error {
	config, file, adapter, err := caddycmd.LoadConfig(file, adapter)
	if err != nil {
		return err
	}
	if file == "" {
		return errNoFile
	}
	if err := caddy.Load(config, true); err != nil {
		return err
	}
	caddy.SetLastConfig(file, adapter, LoadFile)
	return nil
}
