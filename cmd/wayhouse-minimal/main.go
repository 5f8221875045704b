// Command wayhouse-minimal is Wayhouse with the modules of package minimal, and
// without those of Caddy's standard distribution that it can do without.
package main

import (
	"fmt"
	"os"
	"slices"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	"github.com/wayhouse-proxy/wayhouse/internal/version"
	_ "github.com/wayhouse-proxy/wayhouse/minimal"
)

func main() {
	caddy.CustomBinaryName = "wayhouse-minimal"
	if len(os.Args) == 2 && slices.Contains([]string{"version", "--version", "-v"}, os.Args[1]) {
		fmt.Println(version.Read())
		return
	}
	caddycmd.Main()
}
