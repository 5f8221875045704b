package listener

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/flowaddr"
	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
	"github.com/wayhouse-proxy/wayhouse/modules/tracing"
)

// TCPConn is a client's connection on its way through the routes and, with a
// foreign handler, until its end. A handler that finds it as the Conn of its
// layer4.Connection may Detach the socket and give it to the engine.
type TCPConn struct {
	net.Conn // a *net.TCPConn

	client, local netip.AddrPort
	told          bool // by a PROXY header: they are not the socket's
	view          *view
	opened        time.Time
	place         atomic.Pointer[Place]
	path          atomic.Pointer[relay.Path]
	phase         atomic.Uint32 // relay.Phase, while there is no path
	setup         atomic.Int64  // nanoseconds after opened at which there was

	setupSpan *tracing.Setup // nil: it is not traced
	steps     steps
	handled   time.Time // since when a foreign handler has it

	c2s, s2c atomic.Uint64
	last     atomic.Int64 // nanoseconds after opened
	id       relay.ID

	over     sync.Once
	detached bool
	why      atomic.Uint32 // relay.Reason, once something has ended it
}

// takeTCP makes a TCPConn of a socket that was accepted some time ago, which it
// closes when it cannot.
func takeTCP(fd int, client, local netip.AddrPort, v *view, age time.Duration) (*TCPConn, error) {
	f := os.NewFile(uintptr(fd), "tcp")
	nc, err := net.FileConn(f) // duplicates
	f.Close()
	if err != nil {
		return nil, err
	}
	c := &TCPConn{Conn: nc, client: client, local: local, view: v, opened: time.Now().Add(-age)}
	c.told = !same(nc.RemoteAddr(), client) || !same(nc.LocalAddr(), local)
	taken.add(c)
	return c, nil
}

// same reports whether an address of a socket is a. Ours have no zones.
func same(of net.Addr, a netip.AddrPort) bool {
	s := flowaddr.Of(of)
	return netip.AddrPortFrom(s.Addr().WithZone(""), s.Port()) == a
}

// RemoteAddr is the client's address.
func (c *TCPConn) RemoteAddr() net.Addr {
	if c.told {
		return net.TCPAddrFromAddrPort(c.client)
	}
	return c.Conn.RemoteAddr()
}

// LocalAddr is the address that the client connected to.
func (c *TCPConn) LocalAddr() net.Addr {
	if c.told {
		return net.TCPAddrFromAddrPort(c.local)
	}
	return c.Conn.LocalAddr()
}

// Detach gives the socket up: the caller owns fd, and counting the flow out.
// The connection is closed to everybody else.
func (c *TCPConn) Detach() (fd int, err error) {
	fd, err = DupFD(c.Conn)
	if err != nil {
		return -1, err
	}
	c.over.Do(func() {
		c.detached = true
		taken.remove(c)
		c.Conn.Close()
	})
	if !c.detached { // closed before
		unix.Close(fd)
		return -1, net.ErrClosed
	}
	return fd, nil
}

// DupFD duplicates the socket of a connection that has one.
func DupFD(nc net.Conn) (fd int, err error) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return -1, errors.ErrUnsupported
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	if cerr := rc.Control(func(orig uintptr) {
		fd, err = unix.FcntlInt(orig, unix.F_DUPFD_CLOEXEC, 0)
	}); cerr != nil {
		return -1, cerr
	}
	return fd, err
}

// ID is what operators know the connection by.
func (c *TCPConn) ID() relay.ID { return c.id }

// Client is the client's address.
func (c *TCPConn) Client() netip.AddrPort { return c.client }

// Local is the address of ours that the client connected to.
func (c *TCPConn) Local() netip.AddrPort { return c.local }

// Listener is the name of the listener.
func (c *TCPConn) Listener() string { return c.view.name }

// Place is the route that is being handled, nil while none is.
func (c *TCPConn) Place() *Place { return c.place.Load() }

// SetPath says where a handler sends the bytes.
func (c *TCPConn) SetPath(p *relay.Path) {
	c.setup.Store(int64(time.Since(c.opened)))
	if c.path.Swap(p) == nil {
		c.setupSpan.End(time.Now(), p, tracing.Established)
		i := c.info()
		c.view.stats.Opened(&i)
	}
}

// enter notes how far the connection has come.
func (c *TCPConn) enter(p relay.Phase) { c.phase.Store(uint32(p)) }

// Engines are the engines of the listener.
func (c *TCPConn) Engines() *Engines { return c.view.engines }

// Read implements net.Conn.
func (c *TCPConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.moved(&c.c2s, &c.view.cs[0].BytesC2S, n)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.because(relay.ClientClose)
	}
	return n, err
}

// Write implements net.Conn.
func (c *TCPConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.moved(&c.s2c, &c.view.cs[0].BytesS2C, n)
	return n, err
}

func (c *TCPConn) moved(own, listener *atomic.Uint64, n int) {
	if n > 0 {
		own.Add(uint64(n))
		listener.Add(uint64(n))
		c.last.Store(int64(time.Since(c.opened)))
	}
}

// CloseWrite tells the client that nothing more comes.
func (c *TCPConn) CloseWrite() error { return c.Conn.(*net.TCPConn).CloseWrite() }

// SyscallConn gives access to the socket.
func (c *TCPConn) SyscallConn() (syscall.RawConn, error) { return c.Conn.(*net.TCPConn).SyscallConn() }

// because notes what has ended the connection, if nothing has yet.
func (c *TCPConn) because(why relay.Reason) { c.why.CompareAndSwap(0, uint32(why)) }

// Close ends the connection and counts it out, once.
func (c *TCPConn) Close() error {
	c.because(relay.BackendClose) // the handler's end, when it was not the client's
	err := net.ErrClosed
	c.over.Do(func() {
		taken.remove(c)
		err = c.Conn.Close()
		last := c.info()
		c.view.stats.Closed(&last, relay.Reason(c.why.Load()))
		c.endSetup(&last)
	})
	return err
}

// End is Close for a reason of the caller's.
func (c *TCPConn) End(why relay.Reason) {
	c.because(why)
	c.Close()
}

// reject closes a connection that no route has taken and counts why.
func (c *TCPConn) reject(count prometheus.Counter) {
	c.over.Do(func() {
		taken.remove(c)
		c.Conn.Close()
		count.Inc()
		c.view.stats.Abandoned(false, c.client.Addr())
	})
}

// turnAway is reject for a reason that no filter or limit has, and tells of it.
func (c *TCPConn) turnAway(count prometheus.Counter, why relay.Drop) {
	c.reject(count)
	c.setupSpan.End(time.Now(), nil, why.String())
	c.view.tell(why.String(), c.client, c.local, false)
}

func (c *TCPConn) info() relay.Info {
	age := time.Since(c.opened)
	path, phase := c.path.Load(), relay.Established
	if path == nil {
		phase = relay.Phase(c.phase.Load())
		path = &relay.Path{Listener: c.view.name, Route: -1}
		if p := c.place.Load(); p != nil {
			path.Route = p.Route
		}
	}
	return relay.Info{
		ID: c.id, Path: path, Client: c.client, Local: c.local, Age: age, Idle: age - time.Duration(c.last.Load()),
		Setup: time.Duration(c.setup.Load()), Phase: phase,
		BytesC2S: c.c2s.Load(), BytesS2C: c.s2c.Load(),
	}
}

// UDPConn is a client's session on its way through the routes and, with a
// foreign handler, until its end. Reads give one datagram each.
type UDPConn struct {
	*udprelay.Conn

	client, local netip.AddrPort
	worker        int
	view          *view
	place         *Place
	forwarded     bool

	setupSpan *tracing.Setup
	steps     steps
	handled   time.Time // as of TCPConn
}

// Client is the client's address.
func (c *UDPConn) Client() netip.AddrPort { return c.client }

// Local is the address of ours that the client sends to.
func (c *UDPConn) Local() netip.AddrPort { return c.local }

// Listener is the name of the listener.
func (c *UDPConn) Listener() string { return c.view.name }

// Place is the route that is being handled, nil while none is.
func (c *UDPConn) Place() *Place { return c.place }

// Engines are the engines of the listener.
func (c *UDPConn) Engines() *Engines { return c.view.engines }

// SetPath says where a handler sends the datagrams. The path's limits apply; the
// session is still the listener's to count out.
func (c *UDPConn) SetPath(p *relay.Path) {
	own := *p
	own.Owner, own.Opened = heldOwner{c.view.stats}, c.view.stats.Opened
	c.setupSpan.End(time.Now(), p, tracing.Established)
	c.Conn.SetPath(&own)
}

// Native hands the session to a handler that takes flows from the engines, and
// says why it was not taken.
func (c *UDPConn) Native(f Forwarder) (why relay.Drop, ok bool) {
	var first []byte
	if ds := c.Datagrams(nil); len(ds) > 0 {
		first = ds[0]
	}
	o := udprelay.Opening{Worker: c.worker, Client: c.client, Local: c.local, Data: first}
	c.SetTrace(c.setupSpan.TraceParent())
	if forwardTraced(f, &o, c.place, c.setupSpan) != udprelay.Forward {
		c.Reject(o.Reason)
		return o.Reason, false
	}
	if err := c.Forward(o.Path, o.FD); err != nil {
		unix.Close(o.FD)
		o.Path.Owner.Closed(o.Path, &relay.Info{Path: o.Path, Client: c.client, Local: c.local, ID: relay.MakeID(true, c.worker, 0, 0)}, relay.ClientClose)
	}
	c.forwarded = true
	return 0, true
}

// takenWorker stands in the IDs of connections that no engine has.
const takenWorker = 0x7f

// taken are the TCP connections that the engine has given away: those whose
// route is being decided and those of foreign handlers.
var taken = takenSet{conns: map[uint32]*TCPConn{}}

type takenSet struct {
	mu    sync.Mutex
	slot  uint32
	conns map[uint32]*TCPConn
}

func (s *takenSet) add(c *TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.slot++; s.conns[s.slot] != nil; s.slot++ {
	}
	c.id = relay.MakeID(false, takenWorker, s.slot, 0)
	s.conns[s.slot] = c
}

func (s *takenSet) remove(c *TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c.id.Slot())
}

func (s *takenSet) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

func (s *takenSet) list() []*TCPConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]*TCPConn, 0, len(s.conns))
	for _, c := range s.conns {
		list = append(list, c)
	}
	return list
}

func (s *takenSet) get(id relay.ID) *TCPConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.conns[id.Slot()]; c != nil && c.id == id {
		return c
	}
	return nil
}

func (s *takenSet) flows(yield func(*relay.Info) bool) {
	for _, c := range s.list() {
		if i := c.info(); !yield(&i) {
			return
		}
	}
}

func (s *takenSet) flow(id relay.ID) (relay.Info, bool) {
	if c := s.get(id); c != nil {
		return c.info(), true
	}
	return relay.Info{}, false
}

func (s *takenSet) closeFlow(id relay.ID, why relay.Reason) bool {
	c := s.get(id)
	if c == nil {
		return false
	}
	c.because(why)
	return !errors.Is(c.Close(), net.ErrClosed)
}

func (s *takenSet) closePaths(match func(*relay.Path) bool, why relay.Reason) {
	for _, c := range s.list() {
		if i := c.info(); match(i.Path) {
			c.End(why)
		}
	}
}
