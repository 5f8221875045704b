package pool

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// Follow sends a UDP session to the backend that the same source address uses
// on a TCP listener: voice beside a game, or a game beside its login. A source
// without a connection there, or whose backend is not in this pool or takes no
// flows, is given to the balancer. Sources behind one address cannot be told
// apart: the last backend of any of them counts, and after its window the one
// before, while that is in use.
type Follow struct {
	// The name of the TCP listener. Needed.
	Listener string `json:"listener,omitempty"`

	// How long after a source's last connection there has ended its sessions
	// still follow it, up to 1h. Default: 30s.
	Window *caddy.Duration `json:"window,omitempty"`

	// The port of the UDP backend is that of the TCP backend and this many more;
	// may be negative. Refused beside ports. Default: 0, the same port.
	Offset int `json:"offset,omitempty"`

	// The port of the UDP backend for each port of a TCP backend. A port that is
	// not in the list is not followed.
	Ports map[string]int `json:"ports,omitempty"`

	stats  *flow.Listener
	window time.Duration
	ports  portMap
}

const defaultWindow = 30 * time.Second

func (f *Follow) provision(app *proxy.App) error {
	switch {
	case f.Listener == "":
		return errors.New("listener: missing: name the TCP listener whose connections are followed")
	case f.Offset != 0 && f.Ports != nil:
		return errors.New("offset: ports are listed too: give one of the two")
	case f.Offset < -65535 || f.Offset > 65535:
		return fmt.Errorf("offset: %d is not between -65535 and 65535", f.Offset)
	}
	if err := app.CheckListener(f.Listener); err != nil {
		return fmt.Errorf("listener: %w", err)
	}
	f.window = defaultWindow
	if f.Window != nil {
		f.window = time.Duration(*f.Window)
	}
	if f.window < 0 || f.window > flow.MaxWindow {
		return fmt.Errorf("window: %v is not between 0 and %v", f.window, flow.MaxWindow)
	}
	f.ports.offset = f.Offset
	if f.Ports != nil {
		f.ports.list = make(map[uint16]uint16, len(f.Ports))
	}
	for s, to := range f.Ports {
		from, err := strconv.ParseUint(s, 10, 16)
		if err != nil || from == 0 || to < 1 || to > 65535 {
			return fmt.Errorf("ports: %q: %d is not a port and a port, from 1 to 65535 each", s, to)
		}
		f.ports.list[uint16(from)] = uint16(to)
	}
	f.stats = flow.ListenerOf(f.Listener)
	f.stats.Track()
	return nil
}

func (f *Follow) cleanup() {
	if f.stats != nil {
		f.stats.Untrack()
		f.stats = nil
	}
}

// target is where the sessions of a source are to go, if it can be followed.
func (f *Follow) target(source netip.Addr) (netip.AddrPort, bool) {
	backend, ok := f.stats.Companion(source, f.window)
	if !ok {
		return backend, false
	}
	port, ok := f.ports.of(backend.Port())
	return netip.AddrPortFrom(backend.Addr(), port), ok
}

// unmarshal reads a follow option. Syntax:
//
//	follow <listener> {
//		window <duration>
//		offset <ports>
//		port   <tcp port> <udp port>
//	}
func (f *Follow) unmarshal(d *caddyfile.Dispenser) error {
	if !d.NextArg() {
		return d.Errf("follow: name the TCP listener whose connections are followed")
	}
	f.Listener = d.Val()
	if d.NextArg() {
		return d.Errf("unexpected argument %q of follow", d.Val())
	}
	return caddyopt.BlockOf(d, "follow", caddyopt.Options{
		"window": caddyopt.Ptr(&f.Window, caddyopt.Duration),
		"offset": caddyopt.Int(&f.Offset),
		"port": caddyopt.Many(caddyopt.Func(func(d *caddyfile.Dispenser) error {
			args := d.RemainingArgs()
			if len(args) != 2 {
				return d.Errf("port: give the TCP backend's port and the UDP backend's, as in port 25565 7777")
			}
			to, err := strconv.Atoi(args[1])
			if err != nil {
				return d.Errf("port: %q is not a number", args[1])
			}
			if _, twice := f.Ports[args[0]]; twice {
				return d.Errf("port %s is given twice", args[0])
			}
			if f.Ports == nil {
				f.Ports = make(map[string]int)
			}
			f.Ports[args[0]] = to
			return nil
		})),
	})
}
