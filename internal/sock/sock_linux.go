// Package sock opens the sockets of the data path: non-blocking, close on
// exec, with the options the engines need, and without Go's own poller.
package sock

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// Options are the socket options that make two binds of one address different.
type Options struct {
	FreeBind    bool // the address need not be one of this host's
	Transparent bool // takes what TPROXY rules redirect, for whatever address; needs CAP_NET_ADMIN or CAP_NET_RAW
}

// ErrInUse says that another socket holds the address.
var ErrInUse = errors.New("address already in use")

// ToSockaddr converts an address. IPv4-mapped IPv6 stays IPv6.
func ToSockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	sa := &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	if z := a.Addr().Zone(); z != "" {
		sa.ZoneId = zoneID(z)
	}
	return sa
}

// FromSockaddr converts back; IPv4-mapped IPv6 becomes IPv4.
func FromSockaddr(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

func family(a netip.AddrPort) int {
	if a.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

// Probe reports ErrInUse when a socket of any process, this one included,
// holds the address. SO_REUSEPORT would let us join it unseen, so callers
// probe before they bind. The probe is not atomic with the bind.
func Probe(network string, a netip.AddrPort, o Options) error {
	if a.Port() == 0 {
		return nil
	}
	typ := unix.SOCK_STREAM
	if network == "udp" {
		typ = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(family(a), typ|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	if typ == unix.SOCK_STREAM {
		// TIME_WAIT is not in use; a listening socket is.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	if err := common(fd, a, o); err != nil {
		return err
	}
	err = unix.Bind(fd, ToSockaddr(a))
	if err == nil && typ == unix.SOCK_STREAM {
		err = unix.Listen(fd, 1)
	}
	if err == unix.EADDRINUSE {
		return fmt.Errorf("%s/%s: %w", network, a, ErrInUse)
	}
	if err != nil {
		return fmt.Errorf("%s/%s: %w", network, a, os.NewSyscallError("bind", err))
	}
	return nil
}

// ListenTCP opens a listening socket that shares its port by SO_REUSEPORT.
func ListenTCP(a netip.AddrPort, o Options) (int, error) {
	return bind(a, o, unix.SOCK_STREAM, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}, func(fd int) error {
		return unix.Listen(fd, maxBacklog)
	})
}

// maxBacklog is cut by the kernel to net.core.somaxconn.
const maxBacklog = 65535

// ListenUDP opens a bound socket that shares its port by SO_REUSEPORT. On a
// wildcard address it asks for the local address of every datagram
// (IP_PKTINFO, IPV6_RECVPKTINFO), with Transparent for the address and port the
// datagram was sent to (IP_ORIGDSTADDR, IPV6_ORIGDSTADDR).
func ListenUDP(a netip.AddrPort, o Options) (int, error) {
	return bind(a, o, unix.SOCK_DGRAM, func(fd int) error {
		if o.Transparent {
			// The IPv4 traffic of a dual-stack socket has the IPv4 option.
			if err := unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVORIGDSTADDR, 1); err != nil || a.Addr().Is4() {
				return err
			}
			return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVORIGDSTADDR, 1)
		}
		if !a.Addr().IsUnspecified() {
			return nil
		}
		if a.Addr().Is4() {
			return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
		}
		// IPV6_RECVPKTINFO reports IPv4-mapped addresses for the IPv4
		// traffic of a dual-stack socket.
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
	}, nil)
}

func bind(a netip.AddrPort, o Options, typ int, before, after func(int) error) (int, error) {
	fd, err := unix.Socket(family(a), typ|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	err = func() error {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
		if err := common(fd, a, o); err != nil {
			return err
		}
		if err := before(fd); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
		if err := unix.Bind(fd, ToSockaddr(a)); err != nil {
			return os.NewSyscallError("bind", err)
		}
		if after != nil {
			return os.NewSyscallError("listen", after(fd))
		}
		return nil
	}()
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func common(fd int, a netip.AddrPort, o Options) error {
	if !a.Addr().Is4() {
		// An IPv6 wildcard takes IPv4 traffic too, whatever the host's default.
		// Where an IPv4 wildcard shares the port, the kernel gives it its own.
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	if o.FreeBind {
		level, opt := unix.IPPROTO_IP, unix.IP_FREEBIND
		if !a.Addr().Is4() {
			level, opt = unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
		}
		if err := unix.SetsockoptInt(fd, level, opt, 1); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
	}
	if o.Transparent {
		return os.NewSyscallError("setsockopt", transparent(fd, a))
	}
	return nil
}

// transparent lets a socket be bound to, and send from, any address.
func transparent(fd int, a netip.AddrPort) error {
	level, opt := unix.IPPROTO_IP, unix.IP_TRANSPARENT
	if !a.Addr().Is4() {
		level, opt = unix.IPPROTO_IPV6, unix.IPV6_TRANSPARENT
	}
	return unix.SetsockoptInt(fd, level, opt, 1)
}

// LocalAddr is the address a socket is bound to.
func LocalAddr(fd int) (netip.AddrPort, error) {
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}, os.NewSyscallError("getsockname", err)
	}
	return FromSockaddr(sa), nil
}

// DialUDP opens a socket connected to a backend. Its port is chosen late, so
// that one source address can serve as many ports to each backend. errno tells
// a shortage of our own, descriptors that are kept for others included, from an
// address that cannot work.
func DialUDP(to netip.AddrPort, source netip.Addr) (fd int, errno unix.Errno) {
	return dial(to, unix.SOCK_DGRAM, late(to, source))
}

// DialTCP opens a socket and starts to connect it: errno is EINPROGRESS when
// the connect goes on.
func DialTCP(to netip.AddrPort, source netip.Addr) (fd int, errno unix.Errno) {
	return dial(to, unix.SOCK_STREAM, late(to, source))
}

// DialUDPAs is DialUDP from an address and port that are somebody else's; see
// BindAs.
func DialUDPAs(to, client netip.AddrPort) (fd int, errno unix.Errno) {
	return dial(to, unix.SOCK_DGRAM, func(fd int) error { return BindAs(fd, client) })
}

// DialTCPAs is DialTCP from an address and port that are somebody else's.
func DialTCPAs(to, client netip.AddrPort) (fd int, errno unix.Errno) {
	return dial(to, unix.SOCK_STREAM, func(fd int) error { return BindAs(fd, client) })
}

// IsLocal reports whether an address is one of this host, by an interface or by
// a route.
func IsLocal(a netip.Addr) bool {
	if a.IsLoopback() || a.IsUnspecified() {
		return true
	}
	to := netip.AddrPortFrom(a, discard)
	fd, err := unix.Socket(family(to), unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	if unix.Connect(fd, ToSockaddr(to)) != nil { // nothing is sent
		return false
	}
	from, err := LocalAddr(fd)
	return err == nil && from.Addr() == a.Unmap().WithZone("")
}

// CanBindAs reports whether a socket to that address can have the client's: both
// are of one family, and the client's means the same on every interface.
func CanBindAs(client, to netip.AddrPort) bool {
	return client.Addr().Is4() == to.Addr().Is4() && !client.Addr().IsLinkLocalUnicast()
}

// Answers opens the socket by which datagrams leave from an address and port
// that are not ours, to whomever they are addressed. It takes none in: it is
// connected to where nobody sends from, or it would get what the clients of that
// address send. Several may have the same address.
func Answers(from netip.AddrPort) (fd int, errno unix.Errno) {
	nobody := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), discard)
	if !from.Addr().Is4() {
		nobody = netip.AddrPortFrom(netip.IPv6Loopback(), discard)
	}
	return DialUDPAs(nobody, from)
}

const discard = 9 // the port

// late binds a socket to an address and leaves the port to the connect.
func late(to netip.AddrPort, source netip.Addr) func(fd int) error {
	if !source.IsValid() || source.Is4() != to.Addr().Is4() {
		return nil
	}
	return func(fd int) error {
		if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
			return err
		}
		return unix.Bind(fd, ToSockaddr(netip.AddrPortFrom(source, 0)))
	}
}

// BindAs binds a socket to the address and port of a client. It shares them with
// the client's other flows, toward other backends, and with a listener of ours
// that has the port on every address.
func BindAs(fd int, client netip.AddrPort) error {
	for _, opt := range []int{unix.SO_REUSEADDR, unix.SO_REUSEPORT} {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt, 1); err != nil {
			return err
		}
	}
	if err := transparent(fd, client); err != nil {
		return err
	}
	return unix.Bind(fd, ToSockaddr(client))
}

func dial(to netip.AddrPort, typ int, bind func(fd int) error) (int, unix.Errno) {
	fd, err := unix.Socket(family(to), typ|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err.(unix.Errno)
	}
	if !Spare(fd) {
		unix.Close(fd)
		return -1, unix.EMFILE
	}
	fail := func(err error) (int, unix.Errno) {
		unix.Close(fd)
		return -1, err.(unix.Errno)
	}
	if bind != nil {
		if err := bind(fd); err != nil {
			return fail(err)
		}
	}
	if err := unix.Connect(fd, ToSockaddr(to)); err != nil {
		if err == unix.EINPROGRESS && typ == unix.SOCK_STREAM {
			return fd, unix.EINPROGRESS
		}
		return fail(err)
	}
	return fd, 0
}
