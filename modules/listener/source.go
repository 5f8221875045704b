package listener

import (
	"errors"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay/udprelay"
)

// Where the first bytes of a flow come from while its route is decided.

// source has the first bytes of a flow.
type source interface {
	// more waits until there is more than have stands for and returns all
	// there is. io.EOF says that nothing more will come.
	more(deadline time.Time, limit int) ([]byte, error)
}

// datagramSource is a source of whole datagrams.
type datagramSource interface {
	// datagrams are those that more has last told of; nil on TCP.
	datagrams() [][]byte
}

// errNotYet is the answer of a source that cannot wait and has nothing new.
var errNotYet = errors.New("no more bytes yet")

// shownSource is of a walk on a worker, which is shown what comes.
type shownSource struct{}

func (shownSource) more(time.Time, int) ([]byte, error) { return nil, errNotYet }

// discard takes n bytes that were peeked out of the socket.
func (c *TCPConn) discard(n int) error {
	if n == 0 {
		return nil
	}
	_, err := io.ReadFull(c, make([]byte, n))
	return err
}

// tcpSource peeks, so that an engine can begin with the untouched socket.
type tcpSource struct {
	c    *TCPConn
	have int
}

func (s *tcpSource) more(deadline time.Time, limit int) ([]byte, error) {
	s.c.SetReadDeadline(deadline)
	defer s.c.SetReadDeadline(time.Time{})
	rc, err := s.c.SyscallConn()
	if err != nil {
		return nil, err
	}
	buf := make([]byte, limit)
	var n int
	var end error
	err = rc.Read(func(fd uintptr) bool {
		n, _, end = unix.Recvfrom(int(fd), buf, unix.MSG_PEEK)
		switch {
		case end == unix.EAGAIN || end == unix.EINTR:
			end = nil
			return false
		case end != nil:
			return true
		case n > s.have:
			return true
		case n == 0:
			end = io.EOF
			return true
		case finished(int(fd)):
			// The last bytes may have come since they were looked at.
			if n, _, end = unix.Recvfrom(int(fd), buf, unix.MSG_PEEK); end == nil && n <= s.have {
				end = io.EOF
			}
			return true
		}
		return false // until the next edge: new bytes, or the end
	})
	if err == nil {
		err = end
	}
	n = max(n, 0)
	s.have = max(s.have, n)
	return buf[:n], err
}

// finished reports whether the client will send nothing more.
func finished(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, _ := unix.Poll(p, 0)
	return n > 0
}

// udpSource looks at the datagrams that wait for the decision.
type udpSource struct {
	c    *udprelay.Conn
	have int
	tmp  [][]byte
}

func (s *udpSource) more(deadline time.Time, limit int) ([]byte, error) {
	n, err := s.c.Wait(deadline, s.have)
	s.have = max(s.have, n)
	s.tmp = s.c.Datagrams(s.tmp[:0])
	var buf []byte
	for _, d := range s.tmp {
		buf = append(buf, d...)
	}
	return buf[:min(len(buf), limit)], err
}

func (s *udpSource) datagrams() [][]byte { return s.tmp }

// streamSource reads what a handler has left behind.
type streamSource struct {
	conn net.Conn
	buf  []byte
}

func (s *streamSource) more(deadline time.Time, limit int) ([]byte, error) {
	s.conn.SetReadDeadline(deadline)
	defer s.conn.SetReadDeadline(time.Time{})
	old := len(s.buf)
	s.buf = append(s.buf, make([]byte, limit-old)...)
	n, err := s.conn.Read(s.buf[old:])
	s.buf = s.buf[:old+n]
	if errors.Is(err, os.ErrDeadlineExceeded) || n > 0 {
		return s.buf, err
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return s.buf, err
}
