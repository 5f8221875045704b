package routing

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/firstpackets"
	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// tlsHello is what Go's TLS client says first to a name.
func tlsHello(t *testing.T, name string) []byte {
	t.Helper()
	a, z := net.Pipe()
	defer a.Close()
	go tls.Client(z, &tls.Config{ServerName: name}).Handshake()
	a.SetReadDeadline(time.Now().Add(kit.Long))
	head := make([]byte, 5)
	if _, err := io.ReadFull(a, head); err != nil {
		t.Fatal(err)
	}
	b := append(head, make([]byte, int(head[3])<<8|int(head[4]))...)
	if _, err := io.ReadFull(a, b[5:]); err != nil {
		t.Fatal(err)
	}
	return b
}

// TestSlowClients has clients that say nothing, too little, or one byte of a
// hello at a time. The budget is for the whole: they are cut off and never
// reach the route for others, and those who say what they want do not notice.
func TestSlowClients(t *testing.T) {
	town := newTown(t, "strict", "lax")
	addr, btcp, _ := bind(t)
	closed, ctcp, _ := bind(t)
	peek := kit.M{"peek": kit.M{"timeout": fmt.Sprintf("%ds", kit.Scaled(1, 5))}}
	strict := kit.Match(kit.M{"sni": kit.M{"host": kit.A{"strict.example.com"}}}, tcp("strict"))
	minecraft := kit.Match(kit.M{"sniffer": kit.M{"name": "minecraft"}}, tcp("strict"))
	p := kit.Start(t, kit.App(kit.M{
		"open":   kit.With(kit.Listener([]string{btcp}, strict, kit.Route(tcp("lax"))), peek),
		"closed": kit.With(kit.Listener([]string{ctcp}, minecraft, strict), peek),
	}, town.pools()), kit.Options{})
	hello := tlsHello(t, "strict.example.com")
	goes(t, "a hello", addr, "strict", hello)
	goes(t, "a hello", closed, "strict", hello)

	n := kit.Scaled(50, 1000)
	var slow, honest sync.WaitGroup
	// Who has sent nothing when the budget ends goes on to the lax route, and is
	// meant to: the first byte has to follow soon, however many there are.
	opening := make(chan struct{}, 8)
	open := func(addr string, segments ...[]byte) *client {
		opening <- struct{}{}
		defer func() { <-opening }()
		c := dial(t, addr)
		for _, s := range segments {
			c.send(s)
		}
		return c
	}
	var slowest, quickest atomic.Int64
	quickest.Store(int64(time.Hour))
	ends := func(what, addr string, segments ...[]byte) {
		slow.Go(func() {
			c := open(addr, segments...)
			began := time.Now()
			if got, err := c.where(); got != nowhere || err != nil {
				t.Errorf("%s: went to %s, %v", what, got, err)
			}
			took := int64(time.Since(began))
			slowest.Store(max(slowest.Load(), took))
			quickest.Store(min(quickest.Load(), took))
		})
	}
	for range n {
		ends("one byte", addr, hello[:1])
		ends("five bytes", addr, hello[:5])
		ends("nothing", closed)
		ends("one byte", closed, hello[:1])
		ends("five bytes", closed, hello[:5])
		slow.Go(func() { drip(t, open(addr, hello[:1]), hello[1:]) })
	}
	for range 4 {
		honest.Go(func() {
			for i := range n {
				goes(t, fmt.Sprint("honest client ", i), addr, "strict", hello)
				goes(t, fmt.Sprint("honest client ", i), addr, "lax", []byte("hello"))
			}
		})
	}
	honest.Wait()
	slow.Wait()
	t.Logf("%d clients with less than a hello were cut off between %v and %v after their last byte", 5*n, time.Duration(quickest.Load()), time.Duration(slowest.Load()))
	if got, want := town["strict"].heard(), int64(2+4*n); got != want {
		t.Errorf("the strict place has had %d connections, want %d", got, want)
	}
	if got, want := town["lax"].heard(), int64(4*n); got != want {
		t.Errorf("the lax place has had %d connections, want %d", got, want)
	}
	kit.Settles(t, "connections that no route took", float64(6*n), func() float64 {
		return p.Metric("listener_connections_total", "result", "no_route")
	})
	kit.Settles(t, "connections left", 0.0, func() float64 { return p.Metric("active_connections") })
	goes(t, "a silent client of a listener with a route that needs no bytes", addr, "lax")
}

// drip sends what is left of a hello by single bytes, for longer than the budget is. Were it
// for each byte, the hello would arrive whole.
func drip(t *testing.T, c *client, hello []byte) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	sent := 0
	for ; sent < len(hello); sent++ {
		if _, err := c.c.Write(hello[sent : sent+1]); err != nil {
			break
		}
		<-tick.C
	}
	if got, err := c.where(); got != nowhere || err != nil {
		t.Errorf("a hello of which %d bytes of %d were sent: went to %s, %v", sent, len(hello), got, err)
	}
}

// TestNothingIsSentUnasked opens more sessions than may wait for a decision.
// Until a backend has spoken no client hears anything: there is nothing to
// amplify.
func TestNothingIsSentUnasked(t *testing.T) {
	var half []byte // of a hello in two datagrams
	for _, c := range firstpackets.All(t, "quic") {
		if len(c.Segments) == 2 {
			half = c.Data(t)[0]
		}
	}
	if half == nil {
		t.Fatal("the vectors have no QUIC hello in two datagrams")
	}
	town := newTown(t, "strict", "lax")
	addr, _, budp := bind(t)
	p := kit.Start(t, kit.App(kit.M{"quic": kit.With(kit.Listener([]string{budp},
		kit.Match(kit.M{"sni": kit.M{"host": kit.A{"strict.example.com"}}}, udp("strict")),
		kit.Route(udp("lax"))), kit.M{"peek": kit.M{"timeout": "4s"}})}, town.pools()), kit.Options{})
	drops := func(why string) float64 { return p.Metric("datagrams_dropped_total", "reason", why) }
	var callers []*caller
	opened := 0
	for drops("pending_full") == 0 {
		for range 64 { // no more than fit in a socket's buffer
			c := call(t, addr)
			c.send(t, half)
			callers = append(callers, c)
		}
		opened += 64
		kit.Eventually(t, "the proxy has seen the datagrams", func() bool {
			return p.Metric("active_udp_sessions")+drops("pending_full")+drops("no_route") >= float64(opened)
		})
		if opened > 10000 {
			t.Fatal("the limit of sessions that wait is not reached")
		}
	}
	t.Logf("%d sessions, %v datagrams refused for want of room", opened, drops("pending_full"))
	reaches(t, "a session that need not wait", addr, "lax", []byte("hello"))
	kit.Settles(t, "datagrams dropped", float64(opened), func() float64 { return drops("pending_full") + drops("no_route") })
	var errs []error
	for _, c := range callers {
		errs = append(errs, c.silent())
	}
	if err := errors.Join(errs...); err != nil {
		t.Errorf("clients have heard something: %v", err)
	}
	if n := town["strict"].heard() + town["lax"].heard(); n != 1 {
		t.Errorf("backends have had %d flows, want 1", n)
	}
}
