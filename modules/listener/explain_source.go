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

// addrConn has the addresses of a flow, for matchers, and nothing else.
type addrConn struct {
	udp           bool
	client, local netip.AddrPort
}

func (c *addrConn) Read([]byte) (int, error)         { return 0, io.EOF }
func (c *addrConn) Write([]byte) (int, error)        { return 0, io.ErrClosedPipe }
func (c *addrConn) Close() error                     { return nil }
func (c *addrConn) LocalAddr() net.Addr              { return c.addr(c.local) }
func (c *addrConn) RemoteAddr() net.Addr             { return c.addr(c.client) }
func (c *addrConn) SetDeadline(time.Time) error      { return nil }
func (c *addrConn) SetReadDeadline(time.Time) error  { return nil }
func (c *addrConn) SetWriteDeadline(time.Time) error { return nil }

func (c *addrConn) addr(a netip.AddrPort) net.Addr {
	if c.udp {
		return net.UDPAddrFromAddrPort(a)
	}
	return net.TCPAddrFromAddrPort(a)
}

// Interface guards
var (
	_ datagramSource = (*describedSource)(nil)
	_ net.Conn       = (*addrConn)(nil)
)
