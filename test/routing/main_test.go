// Package routing holds the tests of how flows find their pool: every first
// packet of the collection through real listeners, cut anywhere; the ways of
// routing that games use, from a matchmaker to a sniffer of somebody else's;
// and clients that would like to end up where they should not.
package routing

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// place is a backend that says its name and then repeats what it hears: a TCP
// connection begins with the name on a line of its own, an answer to a datagram
// too. Tests see by the name where a flow went, and by the echo that nothing
// was added to its bytes or taken from them.
type place struct {
	name     string
	tcp, udp string

	conns, datagrams atomic.Int64
}

func newPlace(t testing.TB, name string) *place {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &place{name: name, tcp: ln.Addr().String(), udp: pc.LocalAddr().String()}
	var wg sync.WaitGroup
	wg.Go(func() { p.accept(ln, &wg) })
	wg.Go(func() { p.answer(pc) })
	t.Cleanup(func() {
		ln.Close()
		pc.Close()
		wg.Wait()
	})
	return p
}

func (p *place) accept(ln net.Listener, wg *sync.WaitGroup) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		p.conns.Add(1)
		wg.Go(func() {
			defer c.Close()
			if _, err := io.WriteString(c, p.name+"\n"); err == nil {
				// Not by splice, whose pipes outlive the tests.
				io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
			}
		})
	}
}

func (p *place) answer(pc net.PacketConn) {
	b := make([]byte, 1<<16)
	for {
		n, from, err := pc.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // a client that is gone
		}
		p.datagrams.Add(1)
		pc.WriteTo(append([]byte(p.name+"\n"), b[:n]...), from)
	}
}

// heard is how many connections and datagrams a place has had.
func (p *place) heard() int64 { return p.conns.Load() + p.datagrams.Load() }

// town is places by name, with pools of the same names.
type town map[string]*place

func newTown(t testing.TB, names ...string) town {
	town := town{}
	for _, n := range names {
		town[n] = newPlace(t, n)
	}
	return town
}

// pools are a pool of TCP and one of UDP for each place, the latter with /udp
// behind the name.
func (to town) pools() kit.M {
	m := kit.M{}
	for n, p := range to {
		m[n], m[n+"-udp"] = kit.Pool(p.tcp), kit.Pool(p.udp)
	}
	return m
}

// tcp and udp are the handlers that send a flow to a place.
func tcp(name string) kit.M { return kit.M{"handler": "pool", "pool": name} }
func udp(name string) kit.M { return kit.M{"handler": "pool", "pool": name + "-udp"} }

// nowhere is the name of no place: the flow was cut off.
const nowhere = "(nowhere)"

// client is a TCP connection to a listener.
type client struct {
	c    *net.TCPConn
	sent []byte
}

func dial(t testing.TB, addr string) *client { return dialFrom(t, "", addr) }

func dialFrom(t testing.TB, from, addr string) *client {
	t.Helper()
	d := net.Dialer{}
	if from != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(kit.Long))
	return &client{c: c.(*net.TCPConn)}
}

// send sends bytes as one segment, if they fit, and waits until the other
// side's kernel has them. It does not mind a connection that has been cut off.
func (c *client) send(b []byte) {
	c.sent = append(c.sent, b...)
	if _, err := c.c.Write(b); err != nil {
		return
	}
	rc, err := c.c.SyscallConn()
	if err != nil {
		return
	}
	kit.Poll(kit.Long, func() bool {
		var info *unix.TCPInfo
		cerr := rc.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
		const established = 1
		return cerr != nil || err != nil || info.State != established || info.Unacked == 0
	})
}

// where ends the connection and tells where it went; an error, when it was
// there that something was wrong.
func (c *client) where() (name string, err error) {
	defer func() {
		c.c.SetLinger(0) // no port has to wait
		c.c.Close()
	}()
	r := bufio.NewReader(c.c)
	name, err = r.ReadString('\n')
	if name == "" && (err == io.EOF || errors.Is(err, unix.ECONNRESET)) {
		return nowhere, nil
	}
	if err != nil {
		return name, fmt.Errorf("instead of a name: %q, %w", name, err)
	}
	name = strings.TrimSuffix(name, "\n")
	echo := make([]byte, len(c.sent))
	if n, err := io.ReadFull(r, echo); err != nil {
		return name, fmt.Errorf("%d of %d bytes came back: %w", n, len(echo), err)
	}
	if !bytes.Equal(echo, c.sent) {
		return name, errors.New("other bytes came back than were sent")
	}
	return name, nil
}

// goes wants a connection that sends these segments to be at a place.
func goes(t *testing.T, what, addr, want string, segments ...[]byte) {
	t.Helper()
	goesFrom(t, what, "", addr, want, segments...)
}

func goesFrom(t *testing.T, what, from, addr, want string, segments ...[]byte) {
	t.Helper()
	c := dialFrom(t, from, addr)
	for _, s := range segments {
		c.send(s)
	}
	if got, err := c.where(); got != want || err != nil {
		t.Errorf("%s: went to %s, %v; want %s", what, got, err, want)
	}
}

// caller is a UDP client of a listener.
type caller struct {
	c    *net.UDPConn
	sent [][]byte
}

func call(t testing.TB, addr string) *caller { return callFrom(t, "", addr) }

func callFrom(t testing.TB, from, addr string) *caller {
	t.Helper()
	d := net.Dialer{}
	if from != "" {
		d.LocalAddr = &net.UDPAddr{IP: net.ParseIP(from)}
	}
	c, err := d.Dial("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &caller{c: c.(*net.UDPConn)}
}

func (c *caller) send(t testing.TB, b []byte) {
	t.Helper()
	c.sent = append(c.sent, b)
	if _, err := c.c.Write(b); err != nil {
		t.Fatal(err)
	}
}

// where waits for the answers to all datagrams and tells from where they came.
func (c *caller) where() (name string, err error) {
	c.c.SetReadDeadline(time.Now().Add(kit.Long))
	b := make([]byte, 1<<16)
	for i, want := range c.sent {
		n, err := c.c.Read(b)
		if err != nil {
			return name, fmt.Errorf("answer %d: %w", i, err)
		}
		from, echo, _ := bytes.Cut(b[:n], []byte("\n"))
		switch {
		case i > 0 && string(from) != name:
			return name, fmt.Errorf("answer %d comes from %q", i, from)
		case !bytes.Equal(echo, want):
			return string(from), fmt.Errorf("answer %d is %d bytes, and not the %d that were sent", i, len(echo), len(want))
		}
		name = string(from)
	}
	return name, nil
}

// silent reports whether nothing has come, not even an error by ICMP.
func (c *caller) silent() error {
	rc, err := c.c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := rc.Control(func(fd uintptr) {
		var n int
		n, _, err = unix.Recvfrom(int(fd), make([]byte, 1<<16), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if err == nil {
			err = fmt.Errorf("%d bytes have come", n)
		} else if err == unix.EAGAIN {
			err = nil
		}
	})
	return errors.Join(cerr, err)
}

// reaches wants a UDP client that sends these datagrams to be at a place.
func reaches(t *testing.T, what, addr, want string, datagrams ...[]byte) {
	t.Helper()
	reachesFrom(t, what, "", addr, want, datagrams...)
}

func reachesFrom(t *testing.T, what, from, addr, want string, datagrams ...[]byte) {
	t.Helper()
	c := callFrom(t, from, addr)
	for _, d := range datagrams {
		c.send(t, d)
	}
	if got, err := c.where(); got != want || err != nil {
		t.Errorf("%s: went to %s, %v; want %s", what, got, err, want)
	}
}

// dropped wants a datagram to a listener dropped, counted once under why, and
// the client to hear nothing of it.
func dropped(t *testing.T, p *kit.Process, what, listener, addr, why string, datagram []byte) {
	t.Helper()
	droppedFrom(t, p, what, "", listener, addr, why, datagram)
}

func droppedFrom(t *testing.T, p *kit.Process, what, from, listener, addr, why string, datagram []byte) {
	t.Helper()
	count := func() float64 { return p.Metric("datagrams_dropped_total", "listener", listener, "reason", why) }
	before := count()
	c := callFrom(t, from, addr)
	c.send(t, datagram)
	ok := kit.Poll(kit.Long, func() bool { return count() > before || c.silent() != nil })
	if err := c.silent(); err != nil || !ok || count() != before+1 {
		t.Errorf("%s: silence broken by %v; %v datagrams counted as %s, want 1", what, err, count()-before, why)
	}
}

// cutOff wants a connection closed without a word and counted once as why.
func cutOff(t *testing.T, p *kit.Process, what, listener, addr, why string, segments ...[]byte) {
	t.Helper()
	count := func() float64 { return p.Metric("listener_connections_total", "listener", listener, "result", why) }
	before := count()
	goes(t, what, addr, nowhere, segments...)
	kit.Settles(t, what+": connections counted as "+why, before+1, count)
}

// bind is a free address, as a listener has it for TCP and for UDP.
func bind(t testing.TB) (addr, tcp, udp string) {
	t.Helper()
	addr = kit.Local(kit.Port(t))
	return addr, "tcp/" + addr, "udp/" + addr
}
