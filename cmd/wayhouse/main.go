// Command wayhouse is Caddy with the modules of Wayhouse, caddy-l4 and Caddy's
// standard distribution.
package main

import (
	"fmt"
	"os"
	"slices"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/wayhouse-proxy/wayhouse"
	"github.com/wayhouse-proxy/wayhouse/internal/version"
)

func main() {
	caddy.CustomBinaryName = "wayhouse" // in what commands say of themselves

	// Caddy's own command tells Caddy's version. caddy.CustomVersion would change
	// it everywhere, in headers and in what certificate authorities are told too.
	if len(os.Args) == 2 && slices.Contains([]string{"version", "--version", "-v"}, os.Args[1]) {
		fmt.Println(version.Read())
		return
	}
	caddycmd.Main()
}
