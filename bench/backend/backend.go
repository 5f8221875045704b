// Package backend is what stands behind the proxies in a benchmark: one
// thread and one epoll that echo datagrams, echo TCP, and send and check bulk
// streams. The first byte of a TCP connection chooses: see Down, Up and echo.
package backend

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/bench/mmsg"
	"github.com/wayhouse-proxy/wayhouse/bench/payload"
)

// The first bytes of a bulk stream's header. Any other first byte is the first
// of a connection that is echoed.
const (
	Down = 'D' // the backend sends the stream and then ends its side
	Up   = 'U' // the backend reads the stream and answers with Ack
)

// HeaderLen is the length of a bulk stream's header: Down or Up, the stream's
// number and its length, little endian.
const HeaderLen = 1 + 4 + 8

// Ack is the answer to an Up stream that has arrived whole and unchanged; any
// other byte says that it was not.
const Ack = 'K'

// Header makes the header of a bulk stream.
func Header(mode byte, stream uint32, length uint64) []byte {
	b := []byte{mode}
	b = binary.LittleEndian.AppendUint32(b, stream)
	return binary.LittleEndian.AppendUint64(b, length)
}

// Backend is bound sockets and the connections to them. Run owns all of it.
type Backend struct {
	ep, udp, tcp int
	port         uint16
	batch        *mmsg.Batch
	buf          []byte
	pattern      *payload.Pattern
	conns        map[int32]*conn
}

type conn struct {
	fd     int
	mode   byte // 0 while nothing has come, then Down, Up, or 'e'
	head   []byte
	stream uint32
	off    uint64 // bytes of the stream sent or read
	length uint64
	bad    bool // a byte of the stream was wrong
}

// Listen binds UDP and TCP to one port of all IPv4 addresses; 0 is one that is
// free for both.
func Listen(port uint16) (*Backend, error) {
	b := &Backend{
		ep: -1, udp: -1, tcp: -1,
		batch: mmsg.New(64, 65536), buf: make([]byte, payload.MaxChunk),
		pattern: payload.NewPattern(), conns: map[int32]*conn{},
	}
	if err := b.listen(port); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

func (b *Backend) listen(port uint16) (err error) {
	if b.ep, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	for try := 0; ; try++ {
		if b.udp, err = socket(unix.SOCK_DGRAM, port); err != nil {
			return fmt.Errorf("udp port %d: %w", port, err)
		}
		sa, err := unix.Getsockname(b.udp)
		if err != nil {
			return os.NewSyscallError("getsockname", err)
		}
		b.port = uint16(sa.(*unix.SockaddrInet4).Port)
		if b.tcp, err = socket(unix.SOCK_STREAM, b.port); err == nil {
			break
		}
		if port != 0 || try == 20 || !errors.Is(err, unix.EADDRINUSE) {
			return fmt.Errorf("tcp port %d: %w", b.port, err)
		}
		unix.Close(b.udp) // free for UDP alone
	}
	unix.SetsockoptInt(b.udp, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 32<<20)
	unix.SetsockoptInt(b.udp, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 32<<20)
	if err := unix.Listen(b.tcp, 65535); err != nil {
		return os.NewSyscallError("listen", err)
	}
	for _, fd := range []int{b.udp, b.tcp} {
		if err := b.watch(fd, unix.EPOLLIN, unix.EPOLL_CTL_ADD); err != nil {
			return err
		}
	}
	return nil
}

// Port is where it listens.
func (b *Backend) Port() uint16 { return b.port }

func socket(typ int, port uint16) (int, error) {
	fd, err := unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if typ == unix.SOCK_STREAM {
		err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	}
	if err == nil {
		err = os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrInet4{Port: int(port)}))
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (b *Backend) watch(fd int, events uint32, op int) error {
	return os.NewSyscallError("epoll_ctl", unix.EpollCtl(b.ep, op, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}))
}

// Run serves until stop can be read or is closed at its other end.
func (b *Backend) Run(stop int) error {
	if err := b.watch(stop, unix.EPOLLIN|unix.EPOLLRDHUP, unix.EPOLL_CTL_ADD); err != nil {
		return err
	}
	events := make([]unix.EpollEvent, 256)
	for {
		n, err := unix.EpollWait(b.ep, events, -1)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("epoll_wait", err)
		}
		for _, ev := range events[:n] {
			switch fd := int(ev.Fd); fd {
			case stop:
				return nil
			case b.udp:
				b.echoDatagrams()
			case b.tcp:
				if err := b.accept(); err != nil {
					return err
				}
			default:
				if c := b.conns[ev.Fd]; c != nil && !b.serve(c) {
					delete(b.conns, ev.Fd)
					unix.Close(fd)
				}
			}
		}
	}
}

// Close closes every socket, after Run has returned.
func (b *Backend) Close() {
	for fd := range b.conns {
		unix.Close(int(fd))
	}
	for _, fd := range []int{b.tcp, b.udp, b.ep} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

func (b *Backend) echoDatagrams() {
	n, errno := b.batch.Recv(b.udp)
	if errno != 0 {
		return // nothing there, or an ICMP error of a socket that is gone
	}
	b.batch.Echo(n)
	b.batch.SendAll(b.udp, n)
}

// accept takes up to 64 connections. Running out of files is an error: the
// figures would mean nothing.
func (b *Backend) accept() error {
	for range 64 {
		fd, _, err := unix.Accept4(b.tcp, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch err {
		case nil:
		case unix.EAGAIN:
			return nil
		case unix.EINTR, unix.ECONNABORTED:
			continue
		default:
			return os.NewSyscallError("accept4", err)
		}
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
		if err := b.watch(fd, unix.EPOLLIN, unix.EPOLL_CTL_ADD); err != nil {
			return err
		}
		b.conns[int32(fd)] = &conn{fd: fd}
	}
	return nil
}

// serve does one turn of a connection and reports whether it lives on.
func (b *Backend) serve(c *conn) bool {
	if c.mode == Down && c.off < c.length {
		return b.send(c)
	}
	n, err := unix.Read(c.fd, b.buf)
	if err == unix.EAGAIN || err == unix.EINTR {
		return true
	}
	if err != nil || n == 0 {
		return false
	}
	data := b.buf[:n]
	if c.mode == 0 {
		if c.mode = data[0]; c.mode != Down && c.mode != Up {
			c.mode = 'e'
		}
	}
	if c.mode == 'e' {
		// What is echoed is small and fits the socket's buffer; one who
		// sends more without reading loses the connection.
		m, err := unix.Write(c.fd, data)
		return err == nil && m == n
	}
	if need := HeaderLen - len(c.head); need > 0 {
		take := min(need, n)
		c.head, data = append(c.head, data[:take]...), data[take:]
		if len(c.head) < HeaderLen {
			return true
		}
		c.stream = binary.LittleEndian.Uint32(c.head[1:])
		c.length = binary.LittleEndian.Uint64(c.head[5:])
		if c.mode == Down {
			return b.watch(c.fd, unix.EPOLLOUT, unix.EPOLL_CTL_MOD) == nil
		}
	}
	return b.check(c, data)
}

// send sends the next chunk of a Down stream, and after the last ends our side
// and waits for the client to end its.
func (b *Backend) send(c *conn) bool {
	n, err := unix.Write(c.fd, b.pattern.At(c.stream, c.off, int(min(payload.MaxChunk, c.length-c.off))))
	if err == unix.EAGAIN || err == unix.EINTR {
		return true
	}
	if err != nil {
		return false
	}
	if c.off += uint64(n); c.off < c.length {
		return true
	}
	return unix.Shutdown(c.fd, unix.SHUT_WR) == nil && b.watch(c.fd, unix.EPOLLIN, unix.EPOLL_CTL_MOD) == nil
}

// check compares data with the next bytes of an Up stream, and answers after
// the last.
func (b *Backend) check(c *conn, data []byte) bool {
	if !b.pattern.Match(c.stream, c.off, data) {
		c.bad = true
	}
	c.off += uint64(len(data))
	if c.off < c.length {
		return true
	}
	answer := byte(Ack)
	if c.bad || c.off > c.length {
		answer = 'X'
	}
	if len(data) > 0 || c.length == 0 {
		_, err := unix.Write(c.fd, []byte{answer})
		return err == nil
	}
	return true
}
