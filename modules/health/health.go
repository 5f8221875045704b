// Package health finds out which backends work. Each kind of check is a module
// wayhouse.health_checks.NAME; Runner says when a backend is asked and Tally
// what the answers mean.
package health

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// Check asks one backend once. A Runner calls it, for many backends at a time
// but never twice at once for one, with a deadline in ctx. It returns nil when
// the backend is healthy, and must return when ctx ends.
type Check interface {
	Check(ctx context.Context, to netip.AddrPort) error

	// Common returns the options that all kinds share; embedding Settings
	// provides it.
	Common() *Settings
}

// Settings are the options of every kind of check. A kind embeds them.
type Settings struct {
	// How often each backend is checked. Zero is refused. Default: 2s.
	Interval *caddy.Duration `json:"interval,omitempty"`

	// How long one check may take. Zero is refused. Default: 500ms.
	Timeout *caddy.Duration `json:"timeout,omitempty"`

	// How many checks in a row must succeed before a backend that is down takes
	// new flows again. At least 1. Default: 2.
	Rise *int `json:"rise,omitempty"`

	// How many failures in a row, of checks or of flows, put a backend down. At
	// least 1. Default: 3.
	Fall *int `json:"fall,omitempty"`

	// Sources are the addresses checks come from, the first one of the
	// backend's family; none: the kernel's choice. Set by the pool.
	Sources []netip.Addr `json:"-"`
}

// The defaults of Settings.
const (
	DefaultInterval = 2 * time.Second
	DefaultTimeout  = 500 * time.Millisecond
	DefaultRise     = 2
	DefaultFall     = 3
)

// Common returns s.
func (s *Settings) Common() *Settings { return s }

// Provision sets the defaults. A kind with a Provision of its own calls it.
func (s *Settings) Provision(caddy.Context) error {
	or(&s.Interval, caddy.Duration(DefaultInterval))
	or(&s.Timeout, caddy.Duration(DefaultTimeout))
	or(&s.Rise, DefaultRise)
	or(&s.Fall, DefaultFall)
	return nil
}

func or[T any](p **T, def T) {
	if *p == nil {
		*p = &def
	}
}

// Validate checks what Provision has left. A kind with a Validate of its own
// calls it.
func (s *Settings) Validate() error {
	switch {
	case *s.Interval <= 0:
		return fmt.Errorf("interval: %v is not above zero; leave it out for %v", time.Duration(*s.Interval), DefaultInterval)
	case *s.Timeout <= 0:
		return fmt.Errorf("timeout: %v is not above zero; leave it out for %v", time.Duration(*s.Timeout), DefaultTimeout)
	case *s.Rise < 1:
		return fmt.Errorf("rise: %d is less than 1; leave it out for %d", *s.Rise, DefaultRise)
	case *s.Fall < 1:
		return fmt.Errorf("fall: %d is less than 1; leave it out for %d", *s.Fall, DefaultFall)
	}
	return nil
}

// Rules returns what Tally needs to know.
func (s *Settings) Rules() Rules { return Rules{Rise: *s.Rise, Fall: *s.Fall} }

// source is the address that checks of a backend come from, if there is one.
func (s *Settings) source(to netip.AddrPort) netip.Addr {
	for _, src := range s.Sources {
		if src.Is4() == to.Addr().Is4() {
			return src
		}
	}
	return netip.Addr{}
}

// dial connects a socket of the check's own to a backend.
func (s *Settings) dial(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{KeepAlive: -1, FallbackDelay: -1}
	if src := s.source(to); src.IsValid() {
		a := netip.AddrPortFrom(src, 0)
		if network == "udp" {
			d.LocalAddr = net.UDPAddrFromAddrPort(a)
		} else {
			d.LocalAddr = net.TCPAddrFromAddrPort(a)
		}
		d.Control = func(_, _ string, c syscall.RawConn) error {
			var err error
			if cerr := c.Control(func(fd uintptr) { err = lateBind(int(fd)) }); cerr != nil {
				return cerr
			}
			return err
		}
	}
	return d.DialContext(ctx, network, to.String())
}

// lateBind has the kernel choose the port at connect, so that checks do not
// take ports from each other or from flows.
func lateBind(fd int) error {
	return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
}

// NoVerdict reports that a check failed for a reason of our own: a shortage of
// descriptors, ports, memory or buffers, a local rule against sending, a panic
// of the check, or the end of the Runner. Such a failure says nothing about the
// backend.
func NoVerdict(err error) bool {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno == syscall.EPERM || errno == syscall.EACCES || relay.ConnectFailure(errno) == relay.Shortage
	}
	var p panicError
	return errors.As(err, &p) || errors.Is(err, context.Canceled)
}
