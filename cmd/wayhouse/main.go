// Command wayhouse is Caddy with the modules of Wayhouse, caddy-l4 and Caddy's
// standard distribution.
package main

import (
	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/wayhouse-proxy/wayhouse"
)

func main() {
	caddy.CustomBinaryName = "wayhouse" // in what commands say of themselves
	caddycmd.Main()
}
