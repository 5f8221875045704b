// Package wayhouse imports every module of Wayhouse. It is what a custom build
// takes in:
//
//	xcaddy build --with github.com/wayhouse-proxy/wayhouse
package wayhouse

import (
	// caddy-l4's own matchers and handlers, which work in a listener's routes.
	_ "github.com/mholt/caddy-l4"

	_ "github.com/wayhouse-proxy/wayhouse/handlers/httpfront"
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
	_ "github.com/wayhouse-proxy/wayhouse/modules/discovery/agones"
	_ "github.com/wayhouse-proxy/wayhouse/modules/discovery/consul"
	_ "github.com/wayhouse-proxy/wayhouse/modules/discovery/docker"
	_ "github.com/wayhouse-proxy/wayhouse/modules/discovery/kubernetes"
	_ "github.com/wayhouse-proxy/wayhouse/modules/doctor"
	_ "github.com/wayhouse-proxy/wayhouse/modules/filter"
	_ "github.com/wayhouse-proxy/wayhouse/modules/health"
	_ "github.com/wayhouse-proxy/wayhouse/modules/lint"
	_ "github.com/wayhouse-proxy/wayhouse/modules/proxy"
	_ "github.com/wayhouse-proxy/wayhouse/modules/resolver"
	_ "github.com/wayhouse-proxy/wayhouse/modules/sniff/native"
	_ "github.com/wayhouse-proxy/wayhouse/modules/sniff/wasm"
	_ "github.com/wayhouse-proxy/wayhouse/modules/webfront"
	_ "github.com/wayhouse-proxy/wayhouse/modules/yamlconfig"
)
