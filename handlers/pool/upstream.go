package pool

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/mholt/caddy-l4/layer4"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
)

// way is how the flows of a place get to the backends of a pool.
type way struct {
	pool  *pool.Pool
	ports *portMap // nil: the backends' own
	path  func(*pool.Backend) *relay.Path
}

// dialUDP connects a socket for a session of a path: from the client's address
// and port where the path says so and they can be had.
func dialUDP(p *relay.Path, client, to netip.AddrPort, source netip.Addr) (fd int, errno syscall.Errno) {
	if asClient(p, client, to) {
		return sock.DialUDPAs(to, client)
	}
	return sock.DialUDP(to, source)
}

// asClient reports whether sockets of a path to that address are the client's.
func asClient(p *relay.Path, client, to netip.AddrPort) bool {
	if !p.Transparent {
		return false
	}
	if sock.CanBindAs(client, to) {
		return true
	}
	if held, ok := fellBack.allow(); ok {
		caddy.Log().Named("wayhouse").Warn("a backend does not see its client's address: they are of different families, or it is link-local",
			zap.String("listener", p.Listener), zap.Stringer("remote", client), zap.Stringer("upstream", to), zap.Int64("suppressed", held))
	}
	return false
}

// target is where a flow of a path reaches a backend.
func (h *Handler) target(p *relay.Path, b *pool.Backend, client, local netip.AddrPort) (netip.AddrPort, error) {
	to, ok := h.ports.target(b.Addr(), local)
	switch {
	case !ok:
		return to, errPort
	case p.Transparent && listener.Loops(client, to):
		return to, errLoop
	}
	return to, nil
}

var (
	errPort = errors.New("the port that the client has hit has none at the backends")
	errLoop = errors.New("the backend would be this process, or the client itself")
)

// connectUDP is dialUDP for a flow that is copied.
func connectUDP(p *relay.Path, client, to netip.AddrPort, source netip.Addr) (net.Conn, error) {
	fd, errno := dialUDP(p, client, to, source)
	if errno != 0 {
		return nil, errno
	}
	f := os.NewFile(uintptr(fd), "udp")
	defer f.Close()
	return net.FileConn(f)
}

// connectTCP connects to a backend for a flow that is copied.
func connectTCP(p *relay.Path, client, to netip.AddrPort, source netip.Addr, timeout, keepalive time.Duration) (net.Conn, error) {
	d := net.Dialer{Timeout: timeout, KeepAlive: keepalive}
	switch {
	case asClient(p, client, to):
		d.Control = func(_, _ string, raw syscall.RawConn) (err error) {
			if cerr := raw.Control(func(fd uintptr) { err = sock.BindAs(int(fd), client) }); cerr != nil {
				return cerr
			}
			return os.NewSyscallError("bind", err)
		}
	case source.IsValid():
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
	}
	return d.DialContext(context.Background(), "tcp", to.String())
}

// clientOf is the client of a flow that other handlers have had.
func clientOf(cx *layer4.Connection) netip.AddrPort {
	if c := listener.ConnOf(cx); c != nil {
		return c.Client()
	}
	return addrPort(cx.RemoteAddr())
}

// fellBack lets one line a minute through for the whole process.
var fellBack everyMinute

type everyMinute struct {
	next atomic.Int64 // nanoseconds after began
	held atomic.Int64
}

var began = time.Now()

func (e *everyMinute) allow() (held int64, ok bool) {
	now := int64(time.Since(began))
	next := e.next.Load()
	if now < next || !e.next.CompareAndSwap(next, now+int64(time.Minute)) {
		e.held.Add(1)
		return 0, false
	}
	return e.held.Swap(0), true
}
