package proxy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/modules/listener"
)

// checkOtherApps refuses an address that a server of another app of this config
// listens on too. Both would bind it, for Caddy shares its ports as we do, and
// the kernel would give each of them some of the clients. The apps have been
// provisioned by the time this one starts.
func (a *App) checkOtherApps() error {
	served := make(map[string]bool)
	mod, err := a.ctx.AppIfConfigured("http")
	if app, ok := mod.(*caddyhttp.App); ok && err == nil {
		for name, s := range app.Servers {
			for _, listen := range s.Listen {
				served[networkName(listen)] = true
				if err := a.checkListen("http", name, listen, speaksHTTP3(app, s)); err != nil {
					return err
				}
			}
		}
	}
	mod, err = a.ctx.AppIfConfigured("layer4")
	if app, ok := mod.(*layer4.App); ok && err == nil {
		for name, s := range app.Servers {
			for _, listen := range s.Listen {
				served[networkName(listen)] = true
				if err := a.checkListen("layer4", name, listen, false); err != nil {
					return err
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(a.fronts)) {
		if !served[name] {
			return fmt.Errorf("http_front %s: no server of the apps http and layer4 listens on wayhouse/%s; say bind wayhouse/%s in a site", name, name, name)
		}
	}
	return nil // what is wrong with another app is for that to say
}

// AddFront notes that a handler gives flows to the server that listens on
// wayhouse/NAME.
func (a *App) AddFront(name string) {
	if a.fronts == nil {
		a.fronts = make(map[string]bool)
	}
	a.fronts[name] = true
}

// networkName is the NAME in an address of the network wayhouse/NAME, "" in another.
func networkName(listen string) string {
	addr, err := caddy.ParseNetworkAddress(listen)
	if err != nil || addr.Network != "wayhouse" && addr.Network != "wayhouse_udp" {
		return ""
	}
	return addr.Host
}

// speaksHTTP3 reports whether the server's TCP ports are its UDP ports too.
func speaksHTTP3(app *caddyhttp.App, s *caddyhttp.Server) bool {
	return len(s.TLSConnPolicies) > 0 && (len(s.Protocols) == 0 || slices.Contains(s.Protocols, "h3"))
}

func (a *App) checkListen(app, server, listen string, h3 bool) error {
	addr, err := caddy.ParseNetworkAddress(listen)
	if err != nil {
		return nil
	}
	var networks []string
	switch addr.Network {
	case "tcp", "tcp4", "tcp6":
		networks = []string{"tcp"}
		if h3 {
			networks = append(networks, "udp")
		}
	case "udp", "udp4", "udp6":
		networks = []string{"udp"}
	}
	ip := netip.IPv6Unspecified()
	switch host := addr.Host; {
	case host == "localhost":
		ip = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	case host == "" && (addr.Network == "tcp4" || addr.Network == "udp4"):
		ip = netip.IPv4Unspecified()
	case host != "":
		if ip, err = netip.ParseAddr(host); err != nil {
			return nil
		}
	}
	for _, network := range networks {
		for port := addr.StartPort; port <= addr.EndPort; port++ {
			b := listener.Bind{Network: network, Addr: netip.AddrPortFrom(ip.Unmap(), uint16(port))}
			if path, ok := a.binds[b]; ok && port != 0 {
				return fmt.Errorf("%s: the server apps.%s.servers.%s listens on %s too: give one of them another address, "+
					"or let the server listen on wayhouse/NAME, a listener without routes", path, app, server, b)
			}
		}
	}
	return nil
}
