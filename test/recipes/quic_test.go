package recipes

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func quicGame(s *site) {
	const one, two = "10.0.0.11:4433", "10.0.0.12:4433"
	s.arena(one)
	s.arena(two)
	// Nobody here can reach an authority: the site vouches for itself.
	s.text = strings.Replace(s.text, "{\n", "{\n\tlocal_certs\n\tskip_install_trust\n", 1)
	s.start()
	at := make(map[string]bool)
	for i := range 6 {
		from := fmt.Sprintf("203.0.113.%d", 10+i)
		a := s.enter(from, "arena.example.com")
		if b := s.enter(from, "eu.arena.example.com"); a != b {
			s.Errorf("%s is in %s, and then in %s", from, a, b)
		}
		at[a] = true
	}
	if !at[one] || !at[two] || len(at) != 2 {
		s.Errorf("six players are in %v", at)
	}
	for _, version := range []int{1, 3} {
		kit.Eventually(s.T, fmt.Sprintf("HTTP/%d", version), func() bool {
			got, err := s.fetch(version, "203.0.113.7")
			if err == nil && got != "the site of the game" {
				s.Errorf("HTTP/%d: %q", version, got)
			}
			return err == nil // it may be making its certificate
		})
	}
	s.goes("TLS to another name", "tcp", "203.0.113.7", ":443", "", s.packet("tls-curl"))
	if p := s.dial("tcp", "203.0.113.7", ":80"); p != nil {
		fmt.Fprintf(p, "GET / HTTP/1.1\r\nHost: www.example.com\r\nConnection: close\r\n\r\n")
		if b, err := io.ReadAll(p); err != nil || !strings.Contains(string(b), "https://www.example.com/") {
			s.Errorf("plain HTTP is answered %v, %.200s", err, b)
		}
	}
}

// arena is a game over QUIC that says its address on a stream.
func (s *site) arena(addr string) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"arena.example.com"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		s.Fatal(err)
	}
	pc := s.packetConn(s.inside, addr)
	tr := &quic.Transport{Conn: pc}
	ln, err := tr.Listen(&tls.Config{NextProtos: []string{"arena"}, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, nil)
	if err != nil {
		s.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept(context.Background())
			if err != nil {
				return
			}
			wg.Go(func() {
				if st, err := c.OpenUniStream(); err == nil {
					io.WriteString(st, addr)
					st.Close()
				}
				<-c.Context().Done()
			})
		}
	})
	s.Cleanup(func() {
		tr.Close()
		ln.Close()
		pc.Close()
		wg.Wait()
	})
}

func (s *site) packetConn(ns *kit.Netns, addr string) (pc net.PacketConn) {
	s.Helper()
	var err error
	ns.Do(s.T, func() { pc, err = net.ListenPacket("udp4", addr) })
	if err != nil {
		s.Fatal(err)
	}
	return pc
}

// enter plays a game over QUIC and tells which server that is.
func (s *site) enter(from, name string) string {
	s.Helper()
	pc := s.packetConn(s.players, from+":0")
	defer pc.Close()
	tr := &quic.Transport{Conn: pc}
	defer tr.Close()
	ctx, cancel := context.WithTimeout(context.Background(), kit.Long)
	defer cancel()
	c, err := tr.Dial(ctx, edgeUDP, &tls.Config{ServerName: name, InsecureSkipVerify: true, NextProtos: []string{"arena"}}, nil)
	if err != nil {
		s.Fatalf("%s from %s: %v", name, from, err)
	}
	defer c.CloseWithError(0, "")
	st, err := c.AcceptUniStream(ctx)
	if err != nil {
		s.Fatal(err)
	}
	b, err := io.ReadAll(st)
	if err != nil {
		s.Fatal(err)
	}
	return string(b)
}

var edgeUDP = &net.UDPAddr{IP: net.ParseIP(public), Port: 443}

// fetch gets the site by one version of HTTP.
func (s *site) fetch(version int, from string) (string, error) {
	config := &tls.Config{ServerName: "www.example.com", InsecureSkipVerify: true}
	c := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		TLSClientConfig: config, DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return s.dialFrom(s.players, "tcp", from, ":443")
		},
	}}
	if version == 3 {
		pc := s.packetConn(s.players, from+":0")
		defer pc.Close()
		q := &quic.Transport{Conn: pc}
		defer q.Close()
		h := &http3.Transport{TLSClientConfig: config, Dial: func(ctx context.Context, _ string, t *tls.Config, o *quic.Config) (*quic.Conn, error) {
			return q.Dial(ctx, edgeUDP, t, o)
		}}
		defer h.Close()
		c.Transport = h
	}
	res, err := c.Get("https://www.example.com/")
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return string(b), err
}

// clientHello is what a client of TLS sends first to a server of that name.
func (s *site) clientHello(name string) []byte {
	s.Helper()
	here, there := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		tls.Client(here, &tls.Config{ServerName: name}).Handshake()
	}()
	head := make([]byte, 5)
	if _, err := io.ReadFull(there, head); err != nil {
		s.Fatal(err)
	}
	rest := make([]byte, int(head[3])<<8|int(head[4]))
	if _, err := io.ReadFull(there, rest); err != nil {
		s.Fatal(err)
	}
	there.Close()
	<-done
	here.Close()
	return append(head, rest...)
}
