package listener

import (
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// Loops reports whether a socket that is bound to the client's address and goes
// to that address would come back here: the address is the client's own, or one
// of this host on a port that this process has, be it of a listener, of another
// app or of the admin endpoint. To a listener the flow would look like one more
// of the client's, and so on without end; to the admin endpoint the client would
// speak as whoever it says it is. The kernel is asked; what it says of an address
// is believed for loopAge.
func Loops(client, to netip.AddrPort) bool { return client == to || ownAddresses.has(to) }

const (
	loopAge  = 5 * time.Second
	maxLoops = 4096
)

var ownAddresses = ownSet{known: map[netip.AddrPort]ownVerdict{}}

type ownSet struct {
	mu    sync.Mutex
	known map[netip.AddrPort]ownVerdict
}

type ownVerdict struct {
	own   bool
	until time.Time
}

func (s *ownSet) has(a netip.AddrPort) bool {
	now := time.Now()
	s.mu.Lock()
	v, ok := s.known[a]
	s.mu.Unlock()
	if ok && now.Before(v.until) {
		return v.own
	}
	v = ownVerdict{sock.IsLocal(a.Addr()) && hasPort(a), now.Add(loopAge)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.known) >= maxLoops {
		clear(s.known)
	}
	s.known[a] = v
	return v.own
}

// hasPort reports whether a socket of this process takes what is sent to an
// address of this host.
func hasPort(a netip.AddrPort) bool {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return true // for nobody can tell
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return true
	}
	for _, name := range names {
		if fd, err := strconv.Atoi(name); err == nil && takes(fd, a) {
			return true
		}
	}
	return false
}

// takes reports whether a descriptor is a socket that takes connections or
// datagrams of whomever at an address.
func takes(fd int, a netip.AddrPort) bool {
	typ, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	switch {
	case err != nil:
		return false
	case typ == unix.SOCK_STREAM:
		if listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || listens == 0 {
			return false
		}
	case typ == unix.SOCK_DGRAM:
		if _, err := unix.Getpeername(fd); err == nil {
			return false
		}
	default:
		return false
	}
	at, err := sock.LocalAddr(fd)
	return err == nil && at.Port() == a.Port() && (at.Addr() == a.Addr() || at.Addr().IsUnspecified())
}
