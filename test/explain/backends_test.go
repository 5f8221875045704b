package explain

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
)

// backends stand at every address of 127.9.0.0/16, on one port each for TCP and
// UDP, and send their own address to everybody.
type backends struct {
	tcpPort string
	udp     map[string]bool
	wg      sync.WaitGroup
	close   []io.Closer

	resolver string // URL of one that always answers with the pool "resolved"
}

func startBackends(t *testing.T) *backends {
	t.Helper()
	b := &backends{udp: make(map[string]bool)}
	l, err := net.Listen("tcp4", "0.0.0.0:0") // takes what is sent to any of them
	if err != nil {
		t.Fatal(err)
	}
	_, b.tcpPort, _ = net.SplitHostPort(l.Addr().String())
	b.close = append(b.close, l)
	b.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b.wg.Go(func() {
				defer c.Close()
				host, _, _ := net.SplitHostPort(c.LocalAddr().String())
				io.WriteString(c, host)
				io.Copy(io.Discard, c)
			})
		}
	})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"pool": "resolved"}`)
	}))
	b.resolver = srv.URL
	t.Cleanup(func() {
		srv.Close()
		for _, c := range b.close {
			c.Close()
		}
		b.wg.Wait()
	})
	return b
}

// at is the backend of an address, which has a socket for UDP from now on.
func (b *backends) at(t *testing.T, udp bool, host string) (target string) {
	t.Helper()
	if !udp {
		return net.JoinHostPort(host, b.tcpPort)
	}
	pc, err := net.ListenPacket("udp4", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	b.close = append(b.close, pc)
	b.wg.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			_, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			pc.WriteTo([]byte(host), from)
		}
	})
	return pc.LocalAddr().String()
}
