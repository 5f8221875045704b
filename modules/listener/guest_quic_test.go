package listener_test

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
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/quic-go/quic-go"

	"github.com/wayhouse-proxy/wayhouse/modules/flow"
)

// TestGuestQUIC has a QUIC server on a listener's network: each of its clients is
// one guest, and one that is denied shakes no hands.
func TestGuestQUIC(t *testing.T) {
	port := ports(t, 1)[0]
	load(t, fmt.Sprintf(`{"listeners": {"quic": {"bind": ["udp/127.0.0.1:%d"], "filters": [{"filter": "acl", "deny": ["127.0.0.3"]}]}}}`, port))
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"game.test"}, NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	pc := listenOn(t, "quic").(net.PacketConn)
	server := &quic.Transport{Conn: pc}
	ln, err := server.Listen(&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{cert}, PrivateKey: key}}, NextProtos: []string{"game"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	defer server.Close()
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept(t.Context())
			if err != nil {
				return
			}
			go func() {
				if s, err := c.AcceptStream(t.Context()); err == nil {
					io.Copy(s, s)
					s.Close()
				}
			}()
		}
	}()

	ask := func(from string, wait time.Duration) error {
		local, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(from)})
		if err != nil {
			t.Fatal(err)
		}
		defer local.Close()
		client := &quic.Transport{Conn: local}
		defer client.Close()
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		c, err := client.Dial(ctx, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port}, &tls.Config{InsecureSkipVerify: true, ServerName: "game.test", NextProtos: []string{"game"}}, nil)
		if err != nil {
			return err
		}
		defer c.CloseWithError(0, "")
		s, err := c.OpenStreamSync(ctx)
		if err != nil {
			return err
		}
		sent := make([]byte, 100_000)
		go func() {
			s.Write(sent)
			s.Close()
		}()
		if got, err := io.ReadAll(s); err != nil || len(got) != len(sent) {
			return fmt.Errorf("read %d of %d bytes: %w", len(got), len(sent), err)
		}
		return nil
	}
	stats := flow.ListenerOf("quic")
	for i, from := range []string{"127.0.0.1", "127.0.0.2"} {
		if err := ask(from, time.Minute); err != nil {
			t.Fatal(err)
		}
		if n := stats.Sessions.Load(); n != int64(i+1) {
			t.Errorf("%d sessions are counted, want %d", n, i+1)
		}
	}
	refused := func() float64 { return testutil.ToFloat64(stats.Rule("acl").Counter()) }
	before := refused()
	if err := ask("127.0.0.3", time.Second); err == nil || refused() == before { // which has been refused by then
		t.Errorf("one that is denied: %v, %v datagrams refused", err, refused()-before)
	}
	if n := stats.Sessions.Load(); n != 2 {
		t.Errorf("%d sessions are counted, want 2", n)
	}
}
