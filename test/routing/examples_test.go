package routing

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"io"
	"math/big"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// hello is a Minecraft client's handshake for a host and the login behind it.
func hello(host string) []byte {
	body := []byte{0, 0xff, 0x05, byte(len(host))} // packet 0, protocol 767
	body = append(body, host...)
	body = binary.BigEndian.AppendUint16(body, 25565)
	body = append(body, 2) // login
	return append([]byte{byte(len(body))}, body...)
}

// Example C: a Minecraft network. The sniffer reads the host and nothing else.
func TestMinecraftHosts(t *testing.T) {
	town := newTown(t, "survival", "creative", "lobby")
	addr, bind, _ := bind(t)
	host := func(h string) kit.M { return kit.M{"sniffer": kit.M{"name": "minecraft", "host": kit.A{h}}} }
	p := kit.Start(t, kit.App(kit.M{"minecraft": kit.With(kit.Listener([]string{bind},
		kit.Match(host("survival.example.net"), tcp("survival")),
		kit.Match(host("*.creative.example.net"), tcp("creative")),
		kit.Route(tcp("lobby"))), kit.M{"peek": kit.M{"timeout": "20s"}})}, town.pools()), kit.Options{})
	for h, want := range map[string]string{
		"survival.example.net":                  "survival",
		"SURVIVAL.example.net.":                 "survival",
		"survival.example.net\x00FML3\x00":      "survival",
		"a.creative.example.net":                "creative",
		"b.a.creative.example.net":              "creative",
		"creative.example.net":                  "lobby",
		"survival.example.net.evil.example.org": "lobby",
		"unknown.example.net":                   "lobby",
	} {
		b := hello(h)
		goes(t, fmt.Sprintf("%q", h), addr, want, b)
		goes(t, fmt.Sprintf("%q in two", h), addr, want, b[:len(b)-4], b[len(b)-4:])
	}
	goes(t, "an HTTP request", addr, "lobby", []byte("GET / HTTP/1.1\r\n\r\n"))
	if n := p.Metric("sniffer_calls_total", "name", "minecraft", "result", "ok"); n < 16 {
		t.Errorf("the sniffer has recognised %v hellos", n)
	}
}

// Example D: queries and gameplay in pools of their own.
func TestQueriesApart(t *testing.T) {
	town := newTown(t, "query", "gameplay")
	addr, _, bind := bind(t)
	kit.Start(t, kit.App(kit.M{"source": kit.Listener([]string{bind},
		kit.Match(kit.M{"first_bytes": kit.M{"prefix": "hex:FFFFFFFF", "length": kit.M{"min": 5, "max": 100}}}, udp("query")),
		kit.Route(udp("gameplay")))}, town.pools()), kit.Options{})
	query := []byte("\xff\xff\xff\xffTSource Engine Query\x00")
	reaches(t, "A2S_INFO", addr, "query", query)
	reaches(t, "A2S_INFO and its challenge", addr, "query", query, append(query, 1, 2, 3, 4))
	reaches(t, "a query, then gameplay: a session stays", addr, "query", query, []byte("\x01move"))
	reaches(t, "gameplay", addr, "gameplay", []byte("\x01move"), []byte("\x02shoot"))
	reaches(t, "gameplay, then a query", addr, "gameplay", []byte("\x01move"), query)
	reaches(t, "too short", addr, "gameplay", query[:4])
	reaches(t, "too long", addr, "gameplay", append(query, make([]byte, 100)...))
	reaches(t, "nothing", addr, "gameplay", nil)
}

// Examples E and F: raw UDP and TCP, told apart by the address or the port
// that the client uses. Unknown ones reach nobody.
func TestAddressesAndPorts(t *testing.T) {
	town := newTown(t, "survival", "creative")
	first, wild := kit.Ports(t, 100), kit.Port(t)
	last := first + 99
	to := func(m kit.M, name string) kit.M { return kit.Match(m, udp(name)) }
	p := kit.Start(t, kit.App(kit.M{
		"ports": kit.Listener([]string{fmt.Sprintf("udp/127.0.0.1:%d-%d", first, last)},
			to(kit.M{"port": kit.M{"ports": kit.A{strconv.Itoa(first + 1)}}}, "survival"),
			to(kit.M{"port": kit.M{"ports": kit.A{fmt.Sprintf("%d-%d", first+2, first+10)}}}, "creative")),
		"ports-tcp": kit.Listener([]string{fmt.Sprintf("tcp/127.0.0.1:%d-%d", first, last)},
			kit.Match(kit.M{"port": kit.M{"ports": kit.A{strconv.Itoa(last)}}}, tcp("survival"))),
		"addresses": kit.Listener([]string{fmt.Sprintf("udp/0.0.0.0:%d", wild)},
			to(kit.M{"dst": kit.M{"cidrs": kit.A{"127.0.0.11/32"}}}, "survival"),
			to(kit.M{"dst": kit.M{"cidrs": kit.A{"127.0.1.0/24"}}}, "creative")),
	}, town.pools()), kit.Options{})
	at := func(ip string, port int) string { return net.JoinHostPort(ip, strconv.Itoa(port)) }
	for port, want := range map[int]string{first + 1: "survival", first + 2: "creative", first + 10: "creative"} {
		reaches(t, "port", kit.Local(port), want, []byte("raw"))
	}
	for _, port := range []int{first, first + 11, last} {
		dropped(t, p, "another port", "ports", kit.Local(port), "no_route", []byte("raw"))
	}
	goes(t, "the last port", kit.Local(last), "survival", []byte("raw"))
	cutOff(t, p, "the first port", "ports-tcp", kit.Local(first), "no_route", []byte("raw"))
	// Callers are connected: only an answer from the address that they use counts.
	reaches(t, "an address", at("127.0.0.11", wild), "survival", []byte("raw"), []byte("again"))
	reaches(t, "an address of a prefix", at("127.0.1.77", wild), "creative", []byte("raw"), []byte("again"))
	dropped(t, p, "another address", "addresses", at("127.0.0.12", wild), "no_route", []byte("raw"))
}

// region is a TLS server with a certificate for its own name.
type region struct {
	addr string
	cert *x509.Certificate
}

func newRegion(t *testing.T, names ...string) *region {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: names, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})
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
				io.Copy(c, c)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		wg.Wait()
	})
	return &region{addr: ln.Addr().String(), cert: cert}
}

// shakes makes a TLS connection to a name that has to end at the region, and
// has some bytes come back.
func (r *region) shakes(addr, name string) error {
	roots := x509.NewCertPool()
	roots.AddCert(r.cert)
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: kit.Long}, Config: &tls.Config{
		ServerName: name, InsecureSkipVerify: true, // a name need not be one of the certificate's
		VerifyConnection: func(s tls.ConnectionState) error {
			if _, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots}); err != nil {
				return fmt.Errorf("ended at %v: %w", s.PeerCertificates[0].DNSNames, err)
			}
			return nil
		},
	}}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(kit.Long))
	if _, err := io.WriteString(c, "hello"); err != nil {
		return err
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
		return fmt.Errorf("%q came back, %w", b, err)
	}
	return nil
}

// Example B: regions by server name. TLS ends at the backends, and the hellos
// are those of today, with a key share that takes more than a segment.
func TestRegions(t *testing.T) {
	eu, us, lobby := newRegion(t, "eu"), newRegion(t, "us"), newRegion(t, "lobby")
	addr, bind, _ := bind(t)
	suffix := func(s string) kit.M { return kit.M{"sni": kit.M{"host": kit.A{s}}} }
	hash := func(r *region) kit.M {
		return kit.With(kit.Pool(r.addr), kit.M{"balancer": kit.M{"policy": "consistent_hash"}})
	}
	kit.Start(t, kit.App(kit.M{"tls": kit.With(kit.Listener([]string{bind},
		kit.Match(suffix(".eu.example.com"), tcp("eu")),
		kit.Match(suffix(".us.example.com"), tcp("us")),
		kit.Route(tcp("lobby"))), kit.M{"peek": kit.M{"timeout": "20s"}})},
		kit.M{"eu": hash(eu), "us": hash(us), "lobby": hash(lobby)}), kit.Options{})
	for name, want := range map[string]*region{
		"play.eu.example.com": eu, "a.b.EU.Example.com": eu, "eu.example.com": eu,
		"play.us.example.com": us, "example.com": lobby, "noteu.example.com": lobby,
		"play.eu.example.com.example.org": lobby,
		"127.0.0.1":                       lobby, // no name at all is sent for an address
	} {
		if err := want.shakes(addr, name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A flow that matches no route of a listener without a catch-all ends without
// a word, whatever it has sent.
func TestNoRoute(t *testing.T) {
	town := newTown(t, "query")
	addr, btcp, budp := bind(t)
	p := kit.Start(t, kit.App(kit.M{
		"strict": kit.With(kit.Listener([]string{btcp, budp},
			kit.Match(kit.M{"sniffer": kit.M{"name": "a2s"}}, udp("query")),
			kit.Match(kit.M{"sni": kit.M{"host": kit.A{"query.example.com"}}}, tcp("query"))),
			kit.M{"peek": kit.M{"timeout": "500ms"}}),
	}, town.pools()), kit.Options{})
	for name, b := range map[string][]byte{
		"empty": nil, "one byte": {0}, "noise": []byte("some bytes"), "a query of another game": []byte("\xff\xff\xff\xffgetstatus"),
		"the largest datagram": make([]byte, 65507),
	} {
		dropped(t, p, name, "strict", addr, "no_route", b)
	}
	for name, b := range map[string][]byte{"silent": nil, "one byte": {0}, "half of a header": {22, 3}, "noise": []byte("some bytes")} {
		cutOff(t, p, name, "strict", addr, "no_route", b)
	}
	if n := town["query"].heard(); n != 0 {
		t.Errorf("the backend has heard of %d flows", n)
	}
}
