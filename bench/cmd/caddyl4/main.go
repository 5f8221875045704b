// Command caddyl4 is Caddy with its standard modules and caddy-l4 and nothing
// of ours: the peer that shows what the host alone does.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"

	_ "github.com/caddyserver/caddy/v2/modules/standard"
	_ "github.com/mholt/caddy-l4"
)

func main() { caddycmd.Main() }
