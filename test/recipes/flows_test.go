package recipes

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// server is a server of inside: it says its address on a line and repeats what
// it hears, in each answer to a datagram and once on a connection.
type server struct {
	addr   string
	answer func([]byte) []byte // what it says instead, where that is not nil
	heard  atomic.Int64        // connections with bytes, and datagrams
	closer io.Closer
	wg     sync.WaitGroup
	mu     sync.Mutex
	conns  map[net.Conn]bool
}

// tcp and udp start servers at these addresses of inside.
func (s *site) tcp(addrs ...string) { s.serve("tcp", nil, addrs...) }
func (s *site) udp(addrs ...string) { s.serve("udp", nil, addrs...) }

// web starts HTTP servers that are fine whenever they are asked for /info.json.
func (s *site) web(addrs ...string) {
	s.serve("tcp", func(b []byte) []byte {
		if bytes.HasPrefix(b, []byte("GET /info.json ")) {
			return []byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
		}
		return nil
	}, addrs...)
}

func (s *site) serve(network string, answer func([]byte) []byte, addrs ...string) {
	s.Helper()
	for _, addr := range addrs {
		v := &server{addr: addr, answer: answer, conns: make(map[net.Conn]bool)}
		s.servers[network+"/"+addr] = v
		s.inside.Do(s.T, func() {
			var err error
			if network == "tcp" {
				var ln net.Listener
				if ln, err = net.Listen("tcp", addr); err == nil {
					v.closer = ln
					v.wg.Go(func() { v.accept(ln) })
				}
			} else {
				var pc net.PacketConn
				if pc, err = net.ListenPacket("udp", addr); err == nil {
					v.closer = pc
					v.wg.Go(func() { v.read(pc) })
				}
			}
			if err != nil {
				s.Error(err)
			}
		})
		if v.closer == nil {
			s.FailNow()
		}
		s.Cleanup(v.stop)
	}
}

// at is a server that was started.
func (s *site) at(network, addr string) *server { return s.servers[network+"/"+addr] }

// stop ends a server and its connections.
func (v *server) stop() {
	v.closer.Close()
	v.mu.Lock()
	for c := range v.conns {
		c.Close()
	}
	v.mu.Unlock()
	v.wg.Wait()
}

func (v *server) accept(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		v.mu.Lock()
		v.conns[c] = true
		v.mu.Unlock()
		v.wg.Go(func() {
			defer func() {
				c.Close()
				v.mu.Lock()
				delete(v.conns, c)
				v.mu.Unlock()
			}()
			v.talk(c)
		})
	}
}

func (v *server) talk(c net.Conn) {
	if v.answer == nil {
		if _, err := io.WriteString(c, v.addr+"\n"); err != nil {
			return
		}
	}
	b := make([]byte, 4096)
	for first := true; ; first = false {
		n, err := c.Read(b)
		if err != nil {
			return
		}
		said := b[:n]
		if first {
			v.heard.Add(1)
			if v.answer != nil {
				if said = v.answer(b[:n]); said != nil {
					c.Write(said)
					return
				}
				said = append([]byte(v.addr+"\n"), b[:n]...)
			}
		}
		if _, err := c.Write(said); err != nil {
			return
		}
	}
}

func (v *server) read(pc net.PacketConn) {
	b := make([]byte, 1<<16)
	for {
		n, from, err := pc.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // a client that is gone
		}
		v.heard.Add(1)
		if v.answer != nil {
			if a := v.answer(b[:n]); a != nil {
				pc.WriteTo(a, from)
				continue
			}
		}
		pc.WriteTo(append([]byte(v.addr+"\n"), b[:n]...), from)
	}
}

// dial opens a player's socket at an address of theirs.
func (s *site) dial(network, from, to string) net.Conn {
	s.Helper()
	c, err := s.dialFrom(s.players, network, from, to)
	if err != nil {
		s.Fatal(err)
	}
	return c
}

func (s *site) dialFrom(ns *kit.Netns, network, from, to string) (c net.Conn, err error) {
	d := net.Dialer{Timeout: kit.Long, LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}
	if network == "tcp" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(from)}
	}
	if strings.HasPrefix(to, ":") {
		to = public + to
	}
	ns.Do(s.T, func() { c, err = d.Dial(network, to) })
	if err != nil {
		return nil, err
	}
	s.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(kit.Long))
	return c, nil
}

// player is a flow of a player and what has come back on it.
type player struct {
	net.Conn
	server string // the address of the server that has answered; "" when the flow was cut off
	echo   []byte // what it has read: with a PROXY header, that too
}

// join opens a flow, sends a first packet and waits for the server that it gets
// to, or for the end of a connection. A port alone is that of edge.
func (s *site) join(network, from, to string, packets ...[]byte) *player {
	s.Helper()
	p := &player{Conn: s.dial(network, from, to)}
	for _, b := range packets {
		if _, err := p.Write(b); err != nil && network == "udp" {
			s.Fatal(err)
		}
	}
	if network == "udp" {
		b := make([]byte, 1<<16)
		n, err := p.Read(b)
		if err != nil {
			s.Errorf("%s from %s to %s: no answer: %v", network, from, to, err)
			return p
		}
		p.server, p.echo = split(b[:n])
		return p
	}
	all := bytes.Join(packets, nil)
	want := len(all) - headerLen(all) // which the proxy takes off
	r := bufio.NewReader(p)
	line, err := r.ReadString('\n')
	if line == "" && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)) {
		return p
	}
	if err != nil {
		s.Errorf("%s from %s to %s: %q, %v", network, from, to, line, err)
		return p
	}
	p.server = strings.TrimSuffix(line, "\n")
	whole := make([]byte, 0, 8192)
	for headed := false; len(whole) < want; {
		n, err := r.Read(whole[len(whole):cap(whole)])
		whole = whole[:len(whole)+n]
		if err != nil {
			s.Errorf("%s from %s to %s: %d of %d bytes came back: %v", network, from, to, len(whole), want, err)
			break
		}
		if h := headerLen(whole); h > 0 && !headed {
			want, headed = want+h, true
		}
	}
	p.echo = whole
	return p
}

func split(b []byte) (server string, echo []byte) {
	name, rest, ok := bytes.Cut(b, []byte("\n"))
	if !ok {
		return "", b
	}
	return string(name), bytes.Clone(rest)
}

// goes wants a flow at a server, "" for none.
func (s *site) goes(what, network, from, to, want string, packets ...[]byte) *player {
	s.Helper()
	p := s.join(network, from, to, packets...)
	if p.server != want {
		s.Errorf("%s: %s went to %q, want %q", what, from, p.server, want)
	}
	return p
}

// dropped wants a datagram dropped, and counted under that reason.
func (s *site) dropped(what, listener, reason, from, to string, datagram []byte) {
	s.Helper()
	before := s.proc.Metric("datagrams_dropped_total", "listener", listener, "reason", reason)
	s.unheard(what, from, to, datagram, func() bool {
		return s.proc.Metric("datagrams_dropped_total", "listener", listener, "reason", reason) > before
	})
}

// blocked wants a flow turned away by a filter, and counted under its name.
func (s *site) blocked(what, network, listener, filter, from, to string, packet []byte) {
	s.Helper()
	before := s.proc.Metric("filter_blocked_total", "listener", listener, "filter", filter)
	counted := func() bool {
		return s.proc.Metric("filter_blocked_total", "listener", listener, "filter", filter) > before
	}
	if network == "udp" {
		s.unheard(what, from, to, packet, counted)
		return
	}
	s.goes(what, network, from, to, "", packet)
	kit.Eventually(s.T, what+" is counted as "+filter, counted)
}

// unheard sends a datagram until it is counted, and wants no answer.
func (s *site) unheard(what, from, to string, datagram []byte, counted func() bool) {
	s.Helper()
	c := s.dial("udp", from, to)
	if _, err := c.Write(datagram); err != nil {
		s.Fatal(err)
	}
	if !kit.Poll(kit.Long, counted) {
		s.Errorf("%s: a datagram from %s is not counted", what, from)
	}
	c.SetReadDeadline(time.Now())
	if n, err := c.Read(make([]byte, 2048)); err == nil {
		s.Errorf("%s: %d bytes have come", what, n)
	}
}

// signature begins a PROXY header of version 2.
const signature = "\r\n\r\n\x00\r\nQUIT\n"

func headerLen(b []byte) int {
	if len(b) < 16 || string(b[:12]) != signature {
		return 0
	}
	return 16 + int(binary.BigEndian.Uint16(b[14:]))
}

// told is the client that a PROXY header of version 2 in front names, and what
// is behind it.
func (p *player) told() (client netip.AddrPort, rest []byte) {
	n := headerLen(p.echo)
	if n < 28 || len(p.echo) < n {
		return client, p.echo
	}
	a, _ := netip.AddrFromSlice(p.echo[16:20])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(p.echo[24:])), p.echo[n:]
}

// tells wants the server to know the player by a PROXY header.
func (s *site) tells(p *player) {
	s.Helper()
	if client, _ := p.told(); client.String() != p.LocalAddr().String() {
		s.Errorf("%s is told that %v is %v: % .60x", p.server, p.LocalAddr(), client, p.echo)
	}
}

// header is a PROXY header of version 2, as a balancer sends it.
func header(network, client, dst string) []byte {
	kind := byte(0x11)
	if network == "udp" {
		kind = 0x12
	}
	b := append([]byte(signature), 0x21, kind, 0, 12)
	c, d := netip.MustParseAddrPort(client), netip.MustParseAddrPort(dst)
	b = append(append(b, c.Addr().AsSlice()...), d.Addr().AsSlice()...)
	return binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, c.Port()), d.Port())
}

// packet is the first packet of the collection with that name, whole.
func (s *site) packet(id string) []byte {
	s.Helper()
	c := firstpackets.One(s.T, id)
	return bytes.Join(c.Data(s.T), nil)
}
