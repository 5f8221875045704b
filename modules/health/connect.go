package health

import (
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// connecting is a TCP connection that is being made, and given up once it
// stands. It is a bare descriptor: a Runner has many at a time and looks at
// them itself, so that none costs a goroutine, a timer or a place in Go's
// poller.
type connecting struct {
	fd   int
	from netip.Addr // what the socket is bound to, if anything
	to   netip.AddrPort
}

// connect starts a connection to a backend.
func (s *Settings) connect(to netip.AddrPort) (connecting, error) {
	c := connecting{from: s.source(to), to: to}
	family := unix.AF_INET
	if !to.Addr().Is4() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return c, c.failed("socket", err)
	}
	c.fd = fd
	// The kernel holds back the last packet of the handshake, and a reset goes out
	// in its place: the backend's own kernel has answered, its program hears of
	// nothing, and no port of ours waits afterwards. Should the packet have gone
	// out all the same, the program sees a connection that was reset.
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_QUICKACK, 0)
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		c.close()
		return c, c.failed("setsockopt", err)
	}
	if c.from.IsValid() {
		if err := lateBind(fd); err != nil {
			c.close()
			return c, c.failed("setsockopt", err)
		}
		if err := unix.Bind(fd, sock.ToSockaddr(netip.AddrPortFrom(c.from, 0))); err != nil {
			c.close()
			return c, c.failed("bind", err)
		}
	}
	switch err := unix.Connect(fd, sock.ToSockaddr(to)); err {
	case nil, unix.EINPROGRESS, unix.EINTR: // an interrupted one goes on
		return c, nil
	default:
		c.close()
		return c, c.failed("connect", err)
	}
}

// result is what has come of a connection that poll says something about.
func (c *connecting) result() error {
	errno, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return c.failed("getsockopt", err)
	}
	if errno != 0 {
		return c.failed("connect", unix.Errno(errno))
	}
	return nil
}

func (c *connecting) close() { unix.Close(c.fd) }

// failed words an error as package net does.
func (c *connecting) failed(call string, err error) error {
	e := &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(c.to), Err: os.NewSyscallError(call, err)}
	if c.from.IsValid() {
		e.Source = net.TCPAddrFromAddrPort(netip.AddrPortFrom(c.from, 0))
	}
	return e
}

// flight is a check in progress that has no goroutine.
type flight struct {
	connecting
	target   Target
	deadline time.Time
}

// connector makes the connections of one Runner, whose goroutine alone uses it.
type connector struct {
	settings *Settings
	limit    Limit
	timeout  time.Duration

	waiting []Target // for a place in the limit
	flights []flight // in the order of their deadlines
	poll    []unix.PollFd
	fresh   bool // there is a flight that was not looked at a second time
}

// begin connects to those that wait, as far as there are places.
func (c *connector) begin() {
	for len(c.waiting) > 0 {
		select {
		case c.limit <- struct{}{}:
			c.placed()
		default:
			return
		}
	}
	c.waiting = nil
}

// placed connects to the first that waits, for which a place was taken.
func (c *connector) placed() {
	t := c.waiting[0]
	c.waiting[0], c.waiting = nil, c.waiting[1:]
	now := time.Now()
	conn, err := c.settings.connect(t.Addr())
	if err != nil {
		c.landed(t, now, err)
		return
	}
	c.flights = append(c.flights, flight{conn, t, now.Add(c.timeout)})
	c.poll = append(c.poll, unix.PollFd{Fd: int32(conn.fd), Events: unix.POLLOUT})
	c.fresh = true
}

// place is where to send for a place, nil when nobody waits for one.
func (c *connector) place() chan<- struct{} {
	if len(c.waiting) == 0 {
		return nil
	}
	return c.limit
}

// look ends the flights that have a result or no time left, and says when to
// look again.
func (c *connector) look() time.Duration {
	if len(c.flights) == 0 {
		return never
	}
	if _, err := unix.Poll(c.poll, 0); err != nil { // a signal; there is a next time
		for i := range c.poll {
			c.poll[i].Revents = 0
		}
	}
	now := time.Now()
	kept := 0
	for i, f := range c.flights {
		switch {
		case c.poll[i].Revents != 0:
			err := f.result()
			f.close()
			c.landed(f.target, now, err)
		case !f.deadline.After(now):
			f.close()
			c.landed(f.target, now, lateError(c.timeout))
		default:
			c.flights[kept], c.poll[kept] = f, c.poll[i]
			kept++
		}
	}
	clear(c.flights[kept:])
	c.flights, c.poll = c.flights[:kept], c.poll[:kept]
	if kept == 0 {
		return never
	}
	wait := lookEvery
	if c.fresh {
		wait, c.fresh = lookSoon, false
	}
	return min(wait, c.flights[0].deadline.Sub(now))
}

// landed ends a check and gives back its place.
func (c *connector) landed(t Target, at time.Time, err error) {
	<-c.limit
	t.Checked(at, err)
	t.Rhythm().done(false)
}

// stop ends what is left, without a verdict.
func (c *connector) stop() {
	for _, f := range c.flights {
		f.close()
		<-c.limit
		f.target.Rhythm().done(true)
	}
	for _, t := range c.waiting {
		t.Rhythm().done(true)
	}
}
