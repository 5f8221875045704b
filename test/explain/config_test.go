package explain

import (
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// maker makes random configs, and flows for them.
type maker struct {
	*rand.Rand
	b      *backends
	cases  []firstpackets.Case
	hosts  []string
	hellos [][]byte // TLS, of hosts

	addrs int               // backends so far
	pools kit.M             // of the config that is being made
	names map[string]string // host of a backend → its pool
}

func newMaker(t *testing.T, seed uint64, b *backends) *maker {
	m := &maker{Rand: rand.New(rand.NewPCG(seed, 0)), b: b, cases: firstpackets.All(t), names: make(map[string]string)}
	m.hosts = []string{"play.example.com", "eu.example.com", "example.com"}
	for _, c := range m.cases {
		if h := c.Expect.Host; h != "" && len(h) < 60 {
			m.hosts = append(m.hosts, h)
		}
	}
	for _, h := range m.hosts[:3] {
		m.hellos = append(m.hellos, hello(h))
	}
	return m
}

func (m *maker) host() string { return m.hosts[m.IntN(len(m.hosts))] }

// of is a random one.
func of[T any](m *maker, all ...T) T { return all[m.IntN(len(all))] }

// pool adds a pool and returns its name.
func (m *maker) pool(t *testing.T, udp bool, name string) string {
	var targets []string
	for range 1 + m.IntN(3) {
		m.addrs++
		host := fmt.Sprintf("127.9.%d.%d", m.addrs>>8, m.addrs&255)
		targets = append(targets, m.b.at(t, udp, host))
		m.names[host] = name
	}
	m.pools[name] = kit.With(kit.Pool(targets...), kit.M{
		"balancer":    kit.M{"policy": of(m, "round_robin", "least_conn", "weighted", "consistent_hash", "first_available")},
		"on_all_down": of(m, "refuse", "try_all"),
	})
	return name
}

// config is a config of n listeners and says which are for UDP.
func (m *maker) config(t *testing.T, n int) (cfg kit.M, udp []bool) {
	m.pools = kit.M{}
	listeners := kit.M{}
	// A silent or undecided TCP client ends its side, which ends the wait; a UDP
	// client cannot.
	waits := map[bool]string{false: "60s", true: "400ms"}
	for i := range n {
		u := i%2 == 1
		udp = append(udp, u)
		var routes []kit.M
		for r := range 1 + m.IntN(4) {
			route := kit.Route(m.handlers(t, u, fmt.Sprintf("l%dr%d", i, r))...)
			if sets := m.sets(u); len(sets) > 0 {
				route["match"] = sets
			}
			routes = append(routes, route)
		}
		l := kit.Listener([]string{"tcp/127.0.0.1:0"}, routes...)
		if u {
			l["bind"] = []string{"udp/127.0.0.1:0"}
		}
		l["peek"] = kit.M{"timeout": waits[u], "max_bytes": of(m, 5, 64, 4096, 16384), "on_undecided": of(m, "refuse", "next")}
		l["route_hint"] = m.IntN(4) == 0
		listeners[fmt.Sprintf("l%d", i)] = l
	}
	host := "127.9.255.1"
	m.names[host] = "resolved"
	if m.pools["resolved"] == nil {
		m.pools["resolved"] = kit.Pool(m.b.at(t, false, host))
	}
	return kit.App(listeners, m.pools, kit.M{
		"workers":   2,
		"resolvers": kit.M{"asked": kit.M{"resolver": "http", "endpoint": m.b.resolver, "timeout": "60s"}},
	}), udp
}

func (m *maker) handlers(t *testing.T, udp bool, name string) []kit.M {
	toPool := kit.M{"handler": "pool", "pool": m.pool(t, udp, name)}
	switch n := m.IntN(12); {
	case n == 0 && !udp: // a session that nobody gets behind it is not counted by reason
		return []kit.M{{"handler": "throttle"}, toPool}
	case n == 1:
		return []kit.M{{"handler": "route_hint"}}
	case n == 2 && !udp:
		return []kit.M{{"handler": "resolve", "resolver": "asked"}}
	case n == 3 && !udp:
		return []kit.M{{"handler": "route_hint"}, toPool}
	}
	return []kit.M{toPool}
}

// sets are the matchers of a route: none, one set or two.
func (m *maker) sets(udp bool) (sets kit.A) {
	for range of(m, 0, 1, 1, 1, 2) {
		set := kit.M{}
		for range 1 + m.IntN(2) {
			name, options := m.matcher(udp)
			set[name] = options
		}
		sets = append(sets, set)
	}
	return sets
}

func (m *maker) matcher(udp bool) (name string, options any) {
	switch m.IntN(9) {
	case 0:
		return "client_cidr", kit.M{"cidrs": []string{fmt.Sprintf("127.%d.0.0/16", 1+m.IntN(3))}}
	case 1:
		return "dst", kit.M{"cidrs": []string{of(m, "127.0.0.0/8", "10.0.0.0/8")}}
	case 2:
		return "port", kit.M{"ports": []string{of(m, "1-40000", "40001-65535")}}
	case 3:
		p := m.packet(udp)
		if len(p) == 0 {
			p = [][]byte{{0xff}}
		}
		b := p[0][:min(len(p[0]), 1+m.IntN(8))]
		if len(b) == 0 {
			b = []byte{0xff}
		}
		return "first_bytes", kit.M{"prefix": "hex:" + hex.EncodeToString(b), "offset": of(m, 0, 0, 0, 1, 4)}
	case 4:
		low := m.IntN(60)
		return "first_bytes", kit.M{"length": kit.M{"min": low, "max": low + m.IntN(1000)}}
	case 5:
		return "sni", kit.M{"host": []string{of(m, m.host(), "*.example.com", ".example.com")}}
	case 6:
		return "regexp", kit.M{"pattern": of(m, "^hel", "^\\x00", "[a-z]{3}"), "count": 1 + m.IntN(6)}
	case 7:
		return "not", []kit.M{{"client_cidr": kit.M{"cidrs": []string{fmt.Sprintf("127.%d.0.0/16", 1+m.IntN(3))}}}}
	}
	names := []string{"minecraft", "openvpn", "a2s", "raknet", "quic", "wireguard", "stun", "dtls", "quake3", "teamspeak3", "enet"}
	s := kit.M{"name": of(m, names...)}
	if s["name"] == "minecraft" && m.IntN(2) == 0 {
		s["host"] = []string{of(m, m.host(), "*.example.com")}
	}
	return "sniffer", s
}

// packet is what a client sends first: something of a known protocol, text or
// noise, cut short or cut into pieces.
func (m *maker) packet(udp bool) (pieces [][]byte) {
	switch m.IntN(8) {
	case 0:
		pieces = [][]byte{[]byte(of(m, "hello", "hel", "help me", "\x00\x01", "GET / HTTP/1.1\r\n\r\n"))}
	case 1:
		b := make([]byte, m.IntN(1200))
		for i := range b {
			b[i] = byte(m.Uint32())
		}
		pieces = [][]byte{b}
	case 2:
		if !udp {
			return nil // silence
		}
		pieces = [][]byte{{}}
	case 3:
		pieces = [][]byte{m.hellos[m.IntN(len(m.hellos))]}
	default:
		for {
			c := &m.cases[m.IntN(len(m.cases))]
			if c.UDP() != udp {
				continue
			}
			for _, s := range c.Segments {
				b, _ := hex.DecodeString(s) // All of the package has tests of its own
				pieces = append(pieces, b)
			}
			break
		}
	}
	if udp {
		return pieces
	}
	if m.IntN(3) == 0 {
		last := len(pieces) - 1
		pieces[last] = pieces[last][:m.IntN(len(pieces[last])+1)]
	}
	if m.IntN(3) == 0 && len(pieces[0]) > 1 {
		at := 1 + m.IntN(len(pieces[0])-1)
		pieces = append([][]byte{pieces[0][:at], pieces[0][at:]}, pieces[1:]...)
	}
	return pieces
}

// clients is how many flows there were in this process.
var clients int

// client is an address that no other flow has.
func (m *maker) client() string {
	clients++
	return fmt.Sprintf("127.%d.%d.%d", 1+m.IntN(3), clients/250, 1+clients%250)
}

// hello is what a TLS client sends first.
func hello(name string) []byte {
	var r recorder
	tls.Client(&r, &tls.Config{ServerName: name}).Handshake() // with nobody
	return r
}

// recorder keeps what a client sends.
type recorder []byte

func (r *recorder) Write(b []byte) (int, error) { *r = append(*r, b...); return len(b), nil }
func (*recorder) Read([]byte) (int, error)      { return 0, errors.New("nobody answers") }
func (*recorder) Close() error                  { return nil }
func (*recorder) LocalAddr() net.Addr           { return nil }
func (*recorder) RemoteAddr() net.Addr          { return nil }
func (*recorder) SetDeadline(time.Time) error   { return nil }

func (*recorder) SetReadDeadline(time.Time) error  { return nil }
func (*recorder) SetWriteDeadline(time.Time) error { return nil }
