package proxy

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/intent"
)

// findStateDir finds out where operators' intent is kept. It opens nothing: a
// config is validated beside the process that uses the file.
func (a *App) findStateDir() error {
	switch a.StateDir {
	case intent.Off:
		a.stateDir = intent.Off
		return nil
	case "":
		a.stateDir = filepath.Join(caddy.AppDataDir(), "wayhouse")
	default:
		a.stateDir = caddy.NewReplacer().ReplaceAll(a.StateDir, "")
		if a.stateDir == "" {
			return fmt.Errorf("%q is empty; name a directory, or \"off\" to keep nothing", a.StateDir)
		}
	}
	var err error
	if a.stateDir, err = filepath.Abs(a.stateDir); err != nil {
		return err
	}
	if i, err := os.Stat(a.stateDir); err == nil && !i.IsDir() {
		return fmt.Errorf("%s is not a directory; the file in it is named %s", a.stateDir, intent.FileName)
	}
	return nil
}
