package tcprelay

import (
	"net/netip"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// maxTries bounds the backends tried for one connection, against a dialer that
// never runs out.
const maxTries = 64

// pending is what a connection needs only until a backend is connected.
type pending struct {
	looker Looker // while it is looked at, and what it has seen; see look.go
	limit  int
	seen   int

	dialer        Dialer
	target        Target
	count         *relay.Counters // of a panic of the dialer
	client, local netip.AddrPort
	prefix        []byte
	tries         int
	tried         []*relay.Path
	failures      int // of tried, but for those that were cut short
	failure       relay.Failure
}

// pends lends out pending structs.
type pends struct {
	list []*pending
	free []uint32
}

func (ps *pends) take() (ref, *pending) {
	if n := len(ps.free); n > 0 {
		i := ps.free[n-1]
		ps.free = ps.free[:n-1]
		return ref(i + 1), ps.list[i]
	}
	ps.list = append(ps.list, new(pending))
	return ref(len(ps.list)), ps.list[len(ps.list)-1]
}

func (ps *pends) at(r ref) *pending { return ps.list[r-1] }

func (ps *pends) give(r ref) {
	p := ps.list[r-1]
	clear(p.tried)
	*p = pending{tried: p.tried[:0]}
	ps.free = append(ps.free, uint32(r-1))
}

// open starts a connection. Its client socket is watched from here on; the
// bytes that come before the backend is connected wait in it.
func (w *worker) open(f Flow, fl flags) {
	slot, c, p := w.begin(int32(f.FD), f.Client, f.Local)
	c.state = connecting
	c.flags = fl
	c.start -= int64(f.Age)
	p.dialer, p.prefix, p.count = f.Dialer, f.Prefix, f.Counters
	if f.Done != nil {
		c.flags |= finished
		w.done[slot] = f.Done
	}
	if w.watch(c.fd[client], slot, c, client) != 0 {
		w.abandon(slot, c, relay.Error)
		return
	}
	w.dial(slot, c)
}

// begin gives a new connection a place. The caller sets its state.
func (w *worker) begin(fd int32, cl, local netip.AddrPort) (uint32, *conn, *pending) {
	slot, c := w.slab.take()
	w.current = handle{slot, c.gen}
	w.conns.Add(1)
	c.fd = [2]int32{fd, -1}
	c.start, c.last, c.due = w.now, w.now, never
	c.setAddrs(cl, local)
	var p *pending
	c.pend, p = w.pends.take()
	p.client, p.local = cl, local
	return slot, c, p
}

// dial tries the backends that the dialer names until one is being connected.
func (w *worker) dial(slot uint32, c *conn) {
	p := w.pends.at(c.pend)
	for p.tries < maxTries {
		w.asking = p.count
		t, ok := p.dialer.Next(p.client, p.local, p.tries, p.tried)
		if !ok {
			break
		}
		p.tries++
		p.target = t
		c.path = w.paths.take(t.Path)
		c.try++
		fd, errno := w.dialTarget(&p.target, p.client)
		if errno == 0 || errno == unix.EINPROGRESS {
			if e := w.watch(fd, slot, c, backend); e != 0 {
				closeFD(fd)
				w.connectFailed(slot, c, relay.Shortage, e)
				continue
			}
			c.fd[backend] = fd
			if errno == 0 {
				w.connected(slot, c)
				return
			}
			c.due = w.now + int64(t.ConnectTimeout)
			w.schedule(slot, c)
			return
		}
		f := relay.ConnectFailure(errno)
		if f == relay.Shortage {
			w.pipes.trim()
		}
		w.connectFailed(slot, c, f, errno)
	}
	w.abandon(slot, c, relay.Error)
}

// dialTarget starts to connect a socket to a target.
func (w *worker) dialTarget(t *Target, client netip.AddrPort) (int32, unix.Errno) {
	to := t.To
	if !to.IsValid() {
		to = t.Path.Backend
	}
	if t.Path.Transparent && sock.CanBindAs(client, to) {
		fd, errno := sock.DialTCPAs(to, client)
		return int32(fd), errno
	}
	return w.dialTCP(to, t.Source)
}

// dialTCP is sock.DialTCP without its allocations and without the Go
// scheduler, for the addresses that need nothing special.
func (w *worker) dialTCP(to netip.AddrPort, source netip.Addr) (int32, unix.Errno) {
	if source.IsValid() || to.Addr().Zone() != "" {
		fd, errno := sock.DialTCP(to, source)
		return int32(fd), errno
	}
	fd, errno := socketTCP(to.Addr().Is4())
	if errno != 0 {
		return -1, errno
	}
	if !sock.Spare(int(fd)) {
		closeFD(fd)
		return -1, unix.EMFILE
	}
	errno = connect(fd, to, &w.rsa)
	if errno != 0 && errno != unix.EINPROGRESS {
		closeFD(fd)
		return -1, errno
	}
	return fd, errno
}

// connectFailed tells the owner and gives up this try.
func (w *worker) connectFailed(slot uint32, c *conn, f relay.Failure, errno syscall.Errno) {
	p := w.pends.at(c.pend)
	path := w.paths.at(c.path)
	w.unschedule(slot, c)
	c.due = never
	w.paths.give(c.path)
	c.path = 0
	if c.fd[backend] >= 0 {
		closeReset(c.fd[backend]) // it may be connected, and must not take this for a client without a word
		c.fd[backend] = -1
	}
	p.tried = append(p.tried, path)
	if errno != syscall.ECANCELED {
		p.failures++
		p.failure = f
	}
	w.owner(path).ConnectFailed(path, f, errno)
}

// abandon ends a connection that has no backend.
func (w *worker) abandon(slot uint32, c *conn, why relay.Reason) {
	if c.path != 0 {
		w.connectFailed(slot, c, relay.Shortage, syscall.ECANCELED)
	}
	p := w.pends.at(c.pend)
	dialer, count, last := p.dialer, p.count, &w.info
	w.describe(slot, c, last)
	last.Client, last.Local, last.Tries, last.Failure = p.client, p.local, p.failures, p.failure
	if n := len(p.tried); n > 0 {
		last.Path = p.tried[n-1]
	}
	w.release(slot, c)
	w.asking = count
	dialer.GaveUp(last, why)
}

// connected makes a connection ready for the pump.
func (w *worker) connected(slot uint32, c *conn) {
	p := w.pends.at(c.pend)
	t := &p.target
	w.asking = t.Path.Count(w.index)
	var first []byte
	if t.Header != nil {
		first = t.Header.AppendHeader(nil, relay.MakeID(false, w.index, slot, c.gen), p.client, p.local)
		c.header = uint16(len(first))
	}
	if len(first) == 0 {
		first = p.prefix
	} else if len(p.prefix) > 0 {
		first = slices.Concat(first, p.prefix)
	}
	w.tune(c, t, len(first) > 0)
	told := t.Connected
	if len(first) > 0 {
		c.spill[client] = w.spills.lend(first)
		c.held[client] = uint32(len(first))
	}
	w.pends.give(c.pend)
	c.pend = 0
	c.state = established
	c.last = w.now
	c.flags |= on(writable, client) | on(writable, backend)
	w.schedule(slot, c)
	w.enqueue(slot, c)
	c.setup = uint32(min(max(w.now-c.start, 0)/int64(time.Microsecond), 1<<32-1))
	if p := w.paths.at(c.path); p.Opened != nil {
		w.describe(slot, c, &w.info)
		p.Opened(&w.info)
	}
	if told != nil {
		told()
	}
}

// Most connections that are opened just to be closed have one small write a
// side, so what only later writes and long silence need is set when it comes
// to that: TCP_NODELAY before the second write, for the first is never held
// back, and keepalive when a connection is as old as keepAliveAfter.
const keepAliveAfter = int64(8 * time.Second)

// tune sets the options of both sockets, or leaves them for later. ahead says
// that bytes of ours go out first.
func (w *worker) tune(c *conn, t *Target, ahead bool) {
	for side, fd := range c.fd {
		has := side == client && c.has(noDelay)
		switch {
		case t.NoDelay == has:
		case t.NoDelay && !ahead:
			c.flags |= on(nagle, side)
		case t.NoDelay:
			setInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		default:
			setInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 0)
		}
	}
	if t.KeepAlive > 0 {
		c.keepAlive = uint16(min(max(t.KeepAlive/time.Second, 1), 1<<15))
		if int64(t.KeepAlive) <= 2*keepAliveAfter {
			c.probed()
		}
	}
}

// probed has the kernel ask whether the two ends still live.
func (c *conn) probed() {
	for _, fd := range c.fd {
		setInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int32(c.keepAlive))
		setInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, int32(c.keepAlive))
		setInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	}
	c.keepAlive = 0
}

// delayed sets TCP_NODELAY on a side that has been written to once.
func (c *conn) delayed(side int) {
	c.flags &^= on(nagle, side)
	setInt(c.fd[side], unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
}
