package testkit

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"testing"
)

// Seen is what a backend knows of one flow.
type Seen struct {
	From       netip.AddrPort // of its last message
	Messages   int
	Last       uint64 // sequence number
	Duplicated int
	Reordered  int // sequence numbers that were skipped or came late
	Sources    int // how many different addresses it came from in a row
}

// ledger keeps what backends saw, by flow.
type ledger struct {
	mu      sync.Mutex
	flows   map[uint32]*Seen
	damaged int
}

func (l *ledger) saw(f *Frame, from netip.AddrPort) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.flows == nil {
		l.flows = make(map[uint32]*Seen)
	}
	s := l.flows[f.Flow]
	if s == nil {
		s = &Seen{Last: f.Seq - 1}
		l.flows[f.Flow] = s
	}
	switch {
	case f.Seq == s.Last+1:
	case f.Seq == s.Last:
		s.Duplicated++
	default:
		s.Reordered++
	}
	if s.From != from {
		s.Sources++
	}
	s.From, s.Last = from, max(s.Last, f.Seq)
	s.Messages++
}

func (l *ledger) damage() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.damaged++
}

// Flow is what the backend saw of a flow.
func (l *ledger) Flow(id uint32) Seen {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s := l.flows[id]; s != nil {
		return *s
	}
	return Seen{}
}

// Flows is how many flows sent something.
func (l *ledger) Flows() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.flows)
}

// Total adds up what all flows sent.
func (l *ledger) Total() (sum Seen, damaged int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.flows {
		sum.Messages += s.Messages
		sum.Duplicated += s.Duplicated
		sum.Reordered += s.Reordered
		sum.Sources = max(sum.Sources, s.Sources)
	}
	return sum, l.damaged
}

// TCPBackend answers frames over TCP.
type TCPBackend struct {
	ledger
	ID   uint16
	Addr string

	ln       net.Listener
	wg       sync.WaitGroup
	connMu   sync.Mutex
	conns    map[net.Conn]bool
	accepted int
	closed   bool
}

// NewTCPBackend starts one at addr, which may have port 0.
func NewTCPBackend(t testing.TB, id uint16, addr string) *TCPBackend {
	t.Helper()
	b := &TCPBackend{ID: id}
	b.Listen(t, addr)
	t.Cleanup(b.Kill)
	return b
}

// Listen starts a backend that was killed anew.
func (b *TCPBackend) Listen(t testing.TB, addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatalf("starting backend %d: %v", b.ID, err)
	}
	b.Addr, b.ln, b.closed, b.conns = ln.Addr().String(), ln, false, make(map[net.Conn]bool)
	b.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if b.track(c) {
				b.wg.Go(func() { b.serve(c) })
			}
		}
	})
}

func (b *TCPBackend) track(c net.Conn) bool {
	b.connMu.Lock()
	defer b.connMu.Unlock()
	if b.closed {
		c.Close()
		return false
	}
	b.conns[c] = true
	return true
}

func (b *TCPBackend) serve(c net.Conn) {
	counted := false
	defer func() {
		c.Close()
		b.connMu.Lock()
		defer b.connMu.Unlock()
		delete(b.conns, c)
	}()
	from := c.RemoteAddr().(*net.TCPAddr).AddrPort()
	var buf, out []byte
	for {
		var f Frame
		var err error
		if f, buf, err = ReadFrame(c, buf); err != nil {
			if !errors.Is(err, io.EOF) && (errors.Is(err, errDamaged) || errors.Is(err, errNotFrame)) {
				b.damage()
			}
			return
		}
		if !counted {
			counted = true
			b.connMu.Lock()
			b.accepted++
			b.connMu.Unlock()
		}
		b.saw(&f, from)
		f.Backend, f.From = b.ID, from
		out = f.Append(out[:0])
		if _, err := c.Write(out); err != nil {
			return
		}
	}
}

// Conns is how many connections it has, those of health checks included.
func (b *TCPBackend) Conns() int {
	b.connMu.Lock()
	defer b.connMu.Unlock()
	return len(b.conns)
}

// Served is how many connections have sent it a message.
func (b *TCPBackend) Served() int {
	b.connMu.Lock()
	defer b.connMu.Unlock()
	return b.accepted
}

// Kill does to clients what the death of the process would: the port refuses
// and connections are reset.
func (b *TCPBackend) Kill() {
	b.ln.Close()
	b.connMu.Lock()
	b.closed = true
	for c := range b.conns {
		c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
	b.connMu.Unlock()
	b.wg.Wait()
}

// UDPBackend answers frames over UDP, and anything else with itself.
type UDPBackend struct {
	ledger
	ID   uint16
	Addr string

	pc   *net.UDPConn
	done chan struct{}
}

// NewUDPBackend starts one at addr, which may have port 0.
func NewUDPBackend(t testing.TB, id uint16, addr string) *UDPBackend {
	t.Helper()
	b := &UDPBackend{ID: id}
	b.Listen(t, addr)
	t.Cleanup(b.Kill)
	return b
}

// Listen starts a backend that was killed anew.
func (b *UDPBackend) Listen(t testing.TB, addr string) {
	t.Helper()
	ua, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	pc, err := net.ListenUDP("udp", ua)
	if err != nil {
		t.Fatalf("starting backend %d: %v", b.ID, err)
	}
	pc.SetReadBuffer(4 << 20)
	done := make(chan struct{})
	b.Addr, b.pc, b.done = pc.LocalAddr().String(), pc, done
	go func() {
		defer close(done)
		b.serve(pc)
	}()
}

func (b *UDPBackend) serve(pc *net.UDPConn) {
	buf := make([]byte, 1<<16)
	var out []byte
	for {
		n, from, err := pc.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // a client that is gone
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		f, size, err := ParseFrame(buf[:n])
		switch {
		case errors.Is(err, errDamaged), err == nil && size != n:
			b.damage()
			continue
		case err != nil:
			out = append(out[:0], buf[:n]...)
		default:
			b.saw(&f, from)
			f.Backend, f.From = b.ID, from
			out = f.Append(out[:0])
		}
		pc.WriteToUDPAddrPort(out, from)
	}
}

// Kill closes the port.
func (b *UDPBackend) Kill() {
	b.pc.Close()
	<-b.done
}

// Local is an address on loopback.
func Local(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
