package udprelay

import (
	"fmt"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/relay"
	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

// TestListenHalfDone has a worker end while an endpoint is being made, when
// another one has opened a session on it: nothing of the endpoint is left.
func TestListenHalfDone(t *testing.T) {
	e := startEngine(t, 2)
	own := new(owner)
	p := newPath(e, echoBackend(t, "127.0.0.1:0"), own)
	opened := make(chan struct{}, 64)
	toBackend := forwardTo(p)
	probe, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := probe.LocalAddr().(*net.UDPAddr).AddrPort()
	probe.Close()
	before := openFDs(t)

	hold, held := make(chan struct{}), make(chan struct{})
	e.workers[1].post(func(w *worker) {
		close(held)
		<-hold
		w.stop = true
	})
	<-held
	done := make(chan error, 1)
	go func() {
		_, err := e.Listen(addr, sock.Options{}, acceptFunc(func(o *Opening) Decision {
			opened <- struct{}{}
			return toBackend(o)
		}))
		done <- err
	}()
	for i := 0; len(opened) == 0; i++ { // the kernel gives some of the clients to the first worker
		if i == 1000 {
			t.Fatal("the first worker has had none of 1000 clients")
		}
		c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(addr))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(c, "x") // refused as long as nothing is bound
		c.Close()
		e.workers[0].call(func(*worker) {})
	}
	close(hold)
	if err := <-done; err == nil {
		t.Fatal("listening with a worker that has ended")
	}
	if n := e.workers[0].sessions.Load(); n != 0 {
		t.Errorf("%d sessions are left", n)
	}
	if why, _, ok := own.lastClosed(); !ok || why != relay.Error {
		t.Errorf("the owner was told %v, %v; want the end of a session by an error", why, ok)
	}
	const ofWorker = 3 // the one that has ended gives them back
	eventually(t, "descriptors as before", func() bool { return openFDs(t) <= before-ofWorker })
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: addr.Addr().As4(), Port: int(addr.Port())}); err != nil {
		t.Errorf("binding %s afterwards: %v", addr, err)
	}
}
