package addresses

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	proxyproto "github.com/pires/go-proxyproto"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// told is what a backend has learnt of a flow, which it answers with.
type told struct {
	Peer, Client, Dest netip.AddrPort
	Host, ID, CRC      string
	Text               string
	Err                string
}

// read is what a stream or a datagram begins with, as another implementation
// than ours reads it.
func (s *told) read(in io.Reader) *bufio.Reader {
	raw := new(bytes.Buffer)
	r := bufio.NewReader(io.TeeReader(in, raw))
	h, err := proxyproto.Read(r)
	if err != nil {
		s.Err = err.Error()
		return r
	}
	s.Client, s.Dest = addrOf(h.SourceAddr), addrOf(h.DestinationAddr)
	fields, err := h.TLVs()
	if err != nil {
		s.Err = err.Error()
	}
	for _, f := range fields {
		switch f.Type {
		case proxyproto.PP2_TYPE_AUTHORITY:
			s.Host = string(f.Value)
		case proxyproto.PP2_TYPE_UNIQUE_ID:
			s.ID = string(f.Value)
		case proxyproto.PP2_TYPE_CRC32C:
			s.CRC = checksum(raw.Bytes(), f.Value)
		}
	}
	return r
}

// checksum looks whether that of a header of version 2, whose last field it is,
// is right.
func checksum(b, sum []byte) string {
	const fixed = 16
	head := bytes.Clone(b[:fixed+int(binary.BigEndian.Uint16(b[fixed-2:]))])
	clear(head[len(head)-4:])
	if want := crc32.Checksum(head, crc32.MakeTable(crc32.Castagnoli)); binary.BigEndian.Uint32(sum) != want {
		return fmt.Sprintf("%x, want %x", sum, want)
	}
	return "right"
}

// tellTCP starts a backend that answers the first byte behind the header with
// what it was told, and what follows with itself.
func tellTCP(t *testing.T, addr string) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(kit.Long))
				s := told{Peer: addrOf(c.RemoteAddr())}
				text := make([]byte, 1)
				in := s.read(c)
				io.ReadFull(in, text)
				s.Text = string(text)
				answer, _ := json.Marshal(s)
				c.Write(answer)
				io.Copy(c, in)
			})
		}
	})
	t.Cleanup(func() { ln.Close(); wg.Wait() })
}

// tellUDP is the same for datagrams. Those that begin with spp's header are
// answered with that in front.
func tellUDP(t *testing.T, addr string) {
	pc, err := net.ListenPacket("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1<<16)
		for {
			n, from, err := pc.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue
			}
			s := told{Peer: addrOf(from)}
			const magic, size = 0x56ec, 38
			head := []byte(nil)
			if n >= size && binary.BigEndian.Uint16(b) == magic {
				head = b[:size]
				addr := func(at, port int) netip.AddrPort {
					return netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[at:])).Unmap(), binary.BigEndian.Uint16(b[port:]))
				}
				s.Client, s.Dest, s.Text = addr(2, 34), addr(18, 36), string(b[size:n])
			} else {
				text, _ := io.ReadAll(s.read(bytes.NewReader(b[:n])))
				s.Text = string(text)
			}
			answer, _ := json.Marshal(s)
			pc.WriteTo(append(bytes.Clone(head), answer...), from)
		}
	}()
	t.Cleanup(func() { pc.Close(); <-done })
}

// hear sends what a client says, and returns what the backend has been told.
func hear(t *testing.T, c net.Conn, pieces ...[]byte) (s told) {
	t.Helper()
	c.SetDeadline(time.Now().Add(kit.Long))
	for _, p := range pieces {
		if _, err := c.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	if err := json.NewDecoder(bufio.NewReaderSize(c, 1<<16)).Decode(&s); err != nil {
		t.Fatalf("%s to %s: %v", c.LocalAddr(), c.RemoteAddr(), err)
	}
	return s
}

// toldPool is a pool whose backend takes headers.
func toldPool(version, backend string, more kit.M) kit.M {
	return kit.With(kit.With(kit.Pool(backend), kit.M{"proxy_protocol": version}), more)
}

// TestTold: a backend learns which client it has and which address that has
// hit, by whatever header, of IPv4 and IPv6 clients on one wildcard socket, with
// a backend of either family, and behind rules that redirect. A header that a
// client forges is payload.
func TestTold(t *testing.T) {
	w := newWorld(t)
	w.redirect(t)
	for _, a := range []string{"203.0.113.7/32", "2001:db8:7::7/128"} {
		w.proxy.Run(t, "ip", "addr", "add", a, "dev", "lo")
	}
	w.backend.Do(t, func() {
		for _, a := range []string{"10.2.0.2:9100", "[fd00:2::2]:9100"} {
			tellTCP(t, a)
			tellUDP(t, a)
		}
	})
	all := kit.M{"proxy_protocol_tlvs": kit.A{"authority", "unique_id", "crc32c"}}
	forms := []struct {
		name, version, network string
		more                   kit.M
		later                  bool // the second datagram has the header too
	}{
		{"v1", "v1", "tcp", nil, false}, {"v2", "v2", "tcp", all, false},
		{"until-reply", "v2-udp", "udp", all, false}, {"first", "v2-udp", "udp", kit.M{"proxy_protocol_udp": "first"}, false},
		{"every", "v2-udp", "udp", kit.With(all, kit.M{"proxy_protocol_udp": "every"}), true}, {"spp", "spp", "udp", nil, true},
	}
	listeners, pools := kit.M{}, kit.M{}
	for i, f := range forms {
		for k, backend := range []string{"10.2.0.2:9100", "[fd00:2::2]:9100"} {
			name := fmt.Sprintf("%s-%d", f.name, k)
			pools[name] = toldPool(f.version, backend, f.more)
			listeners[name] = kit.ToPool(name, fmt.Sprintf("%s/:%d", f.network, 7001+2*i+k))
		}
	}
	for network, form := range map[string]string{"tcp": "v2", "udp": "every"} {
		listeners["seen-"+network] = kit.With(kit.Listener([]string{network + "/:7777"}, families(form+"-0", form+"-1")...), kit.M{"transparent": true})
	}
	p := kit.Start(t, kit.App(listeners, pools), kit.Options{Netns: w.proxy})

	nobody := &net.UDPAddr{IP: net.IPv4(6, 6, 6, 6), Port: 6}
	forged, err := proxyproto.HeaderProxyFromAddrs(2, nobody, nobody).Format() // to a backend this is payload
	if err != nil {
		t.Fatal(err)
	}
	check := func(t *testing.T, c net.Conn, network string, fields, later bool) (s told) {
		t.Helper()
		text := []byte("P") // of PROXY, as far as one byte goes
		if network == "udp" {
			text = forged
		}
		s = hear(t, c, text)
		client, dest := addrOf(c.LocalAddr()), addrOf(c.RemoteAddr())
		if s.Err != "" || s.Client != client || s.Dest != dest || s.Text != string(text) {
			t.Errorf("told %+v, want %s to %s", s, client, dest)
		}
		if fields {
			var sessions []struct{ ID, Peer string }
			p.JSON("/sessions?proto="+network, &sessions)
			id := ""
			for _, s := range sessions {
				if s.Peer == client.String() {
					id = s.ID
				}
			}
			if s.ID == "" || s.ID != id || s.CRC != "right" {
				t.Errorf("told the ID %q and the checksum is %q; GET /sessions says %q", s.ID, s.CRC, id)
			}
		}
		if network == "udp" {
			if again := hear(t, c, []byte("b")); (again.Client == client) != later || again.Text != "b" {
				t.Errorf("told %+v with the second datagram, want a header %v", again, later)
			}
		}
		return s
	}
	for i, f := range forms {
		for k := range 2 {
			for _, to := range []string{"10.1.0.1", "203.0.113.7", "[fd00:1::1]", "[2001:db8:7::7]"} {
				t.Run(fmt.Sprintf("%s/%d/%s", f.name, k, to), func(t *testing.T) {
					c := w.dial(t, f.network, fmt.Sprintf("%s:%d", to, 7001+2*i+k), 0)
					check(t, c, f.network, f.more["proxy_protocol_tlvs"] != nil, f.later)
				})
			}
		}
	}
	for _, network := range []string{"tcp", "udp"} {
		for _, to := range []string{"198.51.100.7:7777", "198.51.100.7:30005", "[2001:db8:ace:1::7]:7777", "[2001:db8:ace:1::7]:30005"} {
			t.Run("transparent/"+network+"/"+to, func(t *testing.T) {
				c := w.dial(t, network, to, 0)
				if s := check(t, c, network, true, true); s.Peer != s.Client {
					t.Errorf("the backend sees %s and is told %s", s.Peer, s.Client)
				}
			})
		}
	}
	for _, f := range forms {
		if n := p.Metric("proxy_protocol_headers_total", "pool", f.name+"-0", "version", f.version); n < 4 {
			t.Errorf("%v headers of %s are counted, want one of each client", n, f.name)
		}
	}
}

// TestToldHost: the host that a client has named is in the header, whether a
// server name or what a sniffer has found.
func TestToldHost(t *testing.T) {
	w := newWorld(t)
	w.backend.Do(t, func() {
		tellTCP(t, "10.2.0.2:9100")
		tellUDP(t, "10.2.0.2:9100")
	})
	all := kit.M{"proxy_protocol_tlvs": kit.A{"authority", "crc32c"}}
	pools := kit.M{"tcp": toldPool("v2", "10.2.0.2:9100", all), "udp": toldPool("v2-udp", "10.2.0.2:9100", all), "bare": toldPool("v2", "10.2.0.2:9100", nil)}
	route := func(matchers kit.M, pool string) kit.M {
		return kit.Match(matchers, kit.M{"handler": "pool", "pool": pool})
	}
	sni := func(host string) kit.M { return kit.M{"sni": kit.M{"host": kit.A{host}}} }
	minecraft := kit.M{"sniffer": kit.M{"name": "minecraft"}}
	listener := func(bind string, routes ...kit.M) kit.M {
		return kit.With(kit.Listener([]string{bind}, routes...), kit.M{"peek": kit.M{"timeout": "30s"}})
	}
	kit.Start(t, kit.App(kit.M{
		"sni":     listener("tcp/:7001", route(sni("default.example.net"), "tcp")),
		"quic":    listener("udp/:7002", route(sni("h3.example.com"), "udp")),
		"sniffed": listener("tcp/:7003", route(minecraft, "tcp")),
		"copied": listener("tcp/:7004", kit.Match(minecraft,
			kit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20}, kit.M{"handler": "pool", "pool": "tcp"})),
		"unnamed": kit.ToPool("tcp", "tcp/:7005"),
		"bare":    listener("tcp/:7006", route(minecraft, "bare")),
	}, pools), kit.Options{Netns: w.proxy})
	for name, tc := range map[string]struct {
		network string
		port    int
		packets string
		want    string
	}{
		"a server name in two segments": {"tcp", 7001, "tls-seg-in-name", "default.example.net"},
		"that of QUIC":                  {"udp", 7002, "quic-v1-quicgo", "h3.example.com"},
		"what a sniffer finds":          {"tcp", 7003, "mc-1.20.4-status", "mc.example.com"},
		"through another handler":       {"tcp", 7004, "mc-1.20.4-status", "mc.example.com"},
		"when nobody looks":             {"tcp", 7005, "mc-1.20.4-status", ""},
		"when it is not wanted":         {"tcp", 7006, "mc-1.20.4-status", ""},
	} {
		t.Run(name, func(t *testing.T) {
			packets := firstpackets.One(t, tc.packets)
			for _, to := range []string{"10.1.0.1", "[fd00:1::1]"} {
				c := w.dial(t, tc.network, fmt.Sprintf("%s:%d", to, tc.port), 0)
				s := hear(t, c, packets.Data(t)...)
				if s.Err != "" || s.Host != tc.want || s.Client != addrOf(c.LocalAddr()) || (s.CRC != "right") != (tc.port == 7006) {
					t.Errorf("told %+v, want the host %q", s, tc.want)
				}
			}
		})
	}
}
