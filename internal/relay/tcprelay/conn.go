package tcprelay

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
)

// The sides of a connection. A direction is named by the side its bytes come
// from: dir[client] carries them to the backend.
const (
	client  = 0
	backend = 1
)

type state uint8

const (
	vacant      state = iota // in the free list
	looking                  // its first bytes are looked at; pend is set
	connecting               // a backend is being tried; pend is set
	established              // bytes are pumped
	lingering                // one side is gone, the other is to be reset once it has what was sent to it
)

// flags of a connection. Those that exist once a side are shifted by it.
type flags uint32

const (
	readable flags = 1 << iota // a read may find something
	_
	writable // a write may be taken
	_
	ending // the peer has sent its FIN: a short read is not the last
	_
	dead // the peer sent its FIN and does not take bytes any more: what is meant for it is dropped
	_
	reset // the peer has reset; err has been taken from the socket
	_
	nagle // TCP_NODELAY is wanted and not set yet; see delayed
	_
	stalled  // bytes are held or memory was short: due is when to try again without an event
	answered // the owner has heard of the backend's first byte
	queued   // in the run queue
	noDelay  // TCP_NODELAY came with the accepted socket
	finished // Done is in worker.done
)

// conn is a connection. It holds no pointers and never moves, so that the
// garbage collector does not look at it.
type conn struct {
	bytes [2]uint64 // delivered, by direction
	start int64     // time of the worker's clock
	last  int64     // of the last byte
	due   int64     // end of the wait for first bytes or of the connect, or next look at a lingering socket

	fd   [2]int32 // -1: closed
	gen  uint32   // 24 bits; another for each connection in this slot
	path uint32   // in worker.paths
	pend ref      // in worker.pends
	free ref      // next vacant slot

	prev, next ref // in the bucket of a wheel
	bucket     uint16
	flags      flags

	held  [2]uint32 // bytes in the pipe or the spill, by direction
	pipe  [2]ref    // in worker.pipes
	spill [2]ref    // in worker.spills

	clientAddr, localAddr        [16]byte
	clientPort, localPort, fault uint16
	header                       uint16 // bytes of Target.Header still to go out, which are not counted
	setup                        uint32 // microseconds until it was established
	keepAlive                    uint16 // seconds, until it is set; see probed

	state  state
	try    uint8 // of the connect, so that events of an earlier one are known
	why    relay.Reason
	streak [2]uint8 // of full turns, by direction; see pump.go
	eof    [2]bool  // everything has been read, by direction
	shut   [2]bool  // and delivered, and the FIN passed on
}

func (c *conn) has(f flags) bool { return c.flags&f != 0 }

// on is the flag f of a side.
func on(f flags, side int) flags { return f << side }

// slab holds the connections of a worker in chunks that never move.
type slab struct {
	chunks []*[chunk]conn
	free   ref
	top    uint32 // slots ever used
}

const chunk = 256

func (s *slab) at(slot uint32) *conn { return &s.chunks[slot/chunk][slot%chunk] }

// take gives out a slot, zero but for its generation.
func (s *slab) take() (uint32, *conn) {
	if s.free != 0 {
		slot := uint32(s.free - 1)
		c := s.at(slot)
		s.free = c.free
		c.free = 0
		return slot, c
	}
	slot := s.top
	if int(slot) == len(s.chunks)*chunk {
		s.chunks = append(s.chunks, new([chunk]conn))
	}
	s.top++
	c := s.at(slot)
	c.gen = 1
	return slot, c
}

// give takes a slot back; whoever still names it by its generation finds
// another.
func (s *slab) give(slot uint32) {
	c := s.at(slot)
	gen := (c.gen + 1) & 0xffffff
	if gen == 0 {
		gen = 1
	}
	*c = conn{gen: gen, free: s.free}
	s.free = ref(slot + 1)
}

func (c *conn) setAddrs(cl, local netip.AddrPort) {
	c.clientAddr, c.clientPort = cl.Addr().As16(), cl.Port()
	c.localAddr, c.localPort = local.Addr().As16(), local.Port()
}

// client is the client's address. Zones are not kept.
func (c *conn) client() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(c.clientAddr).Unmap(), c.clientPort)
}

func (c *conn) local() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(c.localAddr).Unmap(), c.localPort)
}

// errno is the error a side that has been reset had waiting.
func (c *conn) errno() unix.Errno { return unix.Errno(c.fault) }

// describe fills in what an operator sees.
func (w *worker) describe(slot uint32, c *conn, i *relay.Info) {
	*i = relay.Info{
		ID:       relay.MakeID(false, w.index, slot, c.gen),
		Path:     w.paths.at(c.path),
		Client:   c.client(),
		Local:    c.local(),
		Age:      time.Duration(w.now - c.start),
		Idle:     time.Duration(max(w.now-c.last, 0)),
		Setup:    time.Duration(c.setup) * time.Microsecond,
		BytesC2S: c.bytes[client],
		BytesS2C: c.bytes[backend],
	}
	switch c.state {
	case looking:
		i.Phase = relay.Peek
	case connecting:
		i.Phase = relay.Connect
	}
	if fd := c.fd[backend]; fd >= 0 && i.Path != nil && i.Path.Mapped {
		i.Upstream = peerAddr(fd, &w.rsa)
	}
}

// paths gives the paths in use numbers. A path is kept while a connection
// refers to it.
type paths struct {
	list  []pathUse
	index map[*relay.Path]uint32
	free  []uint32
}

type pathUse struct {
	path *relay.Path
	uses int
}

// take returns the number of p and counts a use; 0 is no path.
func (ps *paths) take(p *relay.Path) uint32 {
	i, ok := ps.index[p]
	if !ok {
		if n := len(ps.free); n > 0 {
			i, ps.free = ps.free[n-1], ps.free[:n-1]
		} else {
			if len(ps.list) == 0 {
				ps.list = append(ps.list, pathUse{})
			}
			i = uint32(len(ps.list))
			ps.list = append(ps.list, pathUse{})
		}
		ps.list[i].path = p
		ps.index[p] = i
	}
	ps.list[i].uses++
	return i
}

func (ps *paths) give(i uint32) {
	if i == 0 {
		return
	}
	u := &ps.list[i]
	if u.uses--; u.uses == 0 {
		delete(ps.index, u.path)
		u.path = nil
		ps.free = append(ps.free, i)
	}
}

func (ps *paths) at(i uint32) *relay.Path {
	if i == 0 {
		return nil
	}
	return ps.list[i].path
}
