package proxy

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/placeholder"
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
		a.stateDir = a.StateDir
		if err := placeholder.Replace(placeholder.Option{Name: "state_dir", Value: &a.stateDir}); err != nil {
			return fmt.Errorf("%w; name a directory, or \"off\" to keep nothing", err)
		}
	}
	var err error
	if a.stateDir, err = filepath.Abs(a.stateDir); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	if i, err := os.Stat(a.stateDir); err == nil && !i.IsDir() {
		return fmt.Errorf("state_dir: %s is not a directory; the file in it is named %s", a.stateDir, intent.FileName)
	}
	return nil
}
