// Package minimal imports the modules of Wayhouse that a proxy with a config of
// its own cannot do without, for a smaller build:
//
//	xcaddy build --with github.com/wayhouse-proxy/wayhouse/minimal
//
// It leaves out sniffers in WebAssembly, the sources that ask Consul, Docker,
// Agones or Kubernetes, the config in YAML, sites behind listeners (http_front), pools
// behind sites, and the commands lint and doctor. What a config names and the
// build does not have is refused when it is loaded.
package minimal

import (
	// caddy-l4's own matchers and handlers, which work in a listener's routes.
	_ "github.com/mholt/caddy-l4"

	_ "github.com/wayhouse-proxy/wayhouse/handlers/pool"
	_ "github.com/wayhouse-proxy/wayhouse/handlers/reject"
	_ "github.com/wayhouse-proxy/wayhouse/handlers/resolve"
	_ "github.com/wayhouse-proxy/wayhouse/handlers/routehint"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/clientcidr"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/dst"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/firstbytes"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/port"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/sni"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/sniffer"
	_ "github.com/wayhouse-proxy/wayhouse/matchers/ticket"
	_ "github.com/wayhouse-proxy/wayhouse/modules/adminapi"
	_ "github.com/wayhouse-proxy/wayhouse/modules/balancer"
	_ "github.com/wayhouse-proxy/wayhouse/modules/console"
	_ "github.com/wayhouse-proxy/wayhouse/modules/discovery"
	_ "github.com/wayhouse-proxy/wayhouse/modules/filter"
	_ "github.com/wayhouse-proxy/wayhouse/modules/health"
	_ "github.com/wayhouse-proxy/wayhouse/modules/proxy"
	_ "github.com/wayhouse-proxy/wayhouse/modules/resolver"
	_ "github.com/wayhouse-proxy/wayhouse/modules/sniff/native"
)
