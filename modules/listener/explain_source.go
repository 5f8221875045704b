package listener

import (
	"io"
	"net"
	"net/netip"
	"os"
	"time"
)

// mostDatagrams is how many the engine keeps of a session whose route is being
// decided.
const mostDatagrams = 4

// describedSource has the bytes of a described flow and no others.
type describedSource struct {
	t    *trace
	have int // pieces that have come
}

// more gives one piece more. Afterwards nothing comes: the time is over.
func (s *describedSource) more(_ time.Time, limit int) ([]byte, error) {
	pieces := s.t.q.Pieces
	if s.t.q.UDP {
		pieces = pieces[:min(len(pieces), mostDatagrams)]
	}
	var err error
	for { // an empty piece of a stream is none
		if s.have == len(pieces) {
			err = os.ErrDeadlineExceeded
			if s.t.dry < 0 {
				s.t.dry = len(s.t.e.Steps)
			}
			break
		}
		s.have++
		if s.t.q.UDP || len(pieces[s.have-1]) > 0 {
			break
		}
	}
	var buf []byte
	for _, p := range pieces[:s.have] {
		buf = append(buf, p...)
	}
	buf = buf[:min(len(buf), limit)]
	if err == nil {
		step := Step{Kind: "bytes", Bytes: len(buf)}
		if s.t.q.UDP {
			step.Datagrams = s.have
		}
		s.t.add(step)
	}
	return buf, err
}

// datagrams are those that have come; nil on TCP.
func (s *describedSource) datagrams() [][]byte {
	if !s.t.q.UDP {
		return nil
	}
	return s.t.q.Pieces[:s.have]
}

// describedConn has the addresses of a described flow, for matchers.
type describedConn struct{ q *Question }

func (c *describedConn) Read([]byte) (int, error)         { return 0, io.EOF }
func (c *describedConn) Write([]byte) (int, error)        { return 0, io.ErrClosedPipe }
func (c *describedConn) Close() error                     { return nil }
func (c *describedConn) LocalAddr() net.Addr              { return c.addr(c.q.Local) }
func (c *describedConn) RemoteAddr() net.Addr             { return c.addr(c.q.Client) }
func (c *describedConn) SetDeadline(time.Time) error      { return nil }
func (c *describedConn) SetReadDeadline(time.Time) error  { return nil }
func (c *describedConn) SetWriteDeadline(time.Time) error { return nil }

func (c *describedConn) addr(a netip.AddrPort) net.Addr {
	if c.q.UDP {
		return net.UDPAddrFromAddrPort(a)
	}
	return net.TCPAddrFromAddrPort(a)
}

// Interface guards
var (
	_ source   = (*describedSource)(nil)
	_ net.Conn = (*describedConn)(nil)
)
