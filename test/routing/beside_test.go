package routing

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// delays are how long answers took.
type delays []time.Duration

func (d delays) String() string {
	d = slices.Sorted(slices.Values(d))
	return fmt.Sprintf("p50 %v, p99 %v", d[len(d)/2], d[len(d)*99/100])
}

func (d delays) p99() time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[len(d)*99/100]
}

// others are flows about which nobody has to be asked: a connection and a
// session that are there, and ever new ones. Those that say hello have no
// sessions.
type others struct {
	addr, name string
	hello      []byte // with which connections begin
	tcp        net.Conn
	r          *bufio.Reader
	udp        net.Conn // nil: without sessions
	opened     int64    // connections
}

func newOthers(t *testing.T, addr, name string, hello []byte) *others {
	t.Helper()
	o := &others{addr: addr, name: name, hello: hello}
	var err error
	if o.tcp, o.r, err = o.dial(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.tcp.Close() })
	if hello != nil {
		return o
	}
	if o.udp, err = net.Dial("udp", addr); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.udp.Close() })
	return o
}

func (o *others) dial() (net.Conn, *bufio.Reader, error) {
	c, err := net.Dial("tcp", o.addr)
	if err != nil {
		return nil, nil, err
	}
	o.opened++
	c.SetDeadline(time.Now().Add(kit.Long))
	c.Write(o.hello)
	r := bufio.NewReader(c)
	name, err := r.ReadString('\n')
	if err == nil && name != o.name+"\n" {
		err = fmt.Errorf("reached %q, want %s", name, o.name)
	}
	if err == nil {
		_, err = r.Discard(len(o.hello)) // comes back
	}
	if err != nil {
		c.Close()
	}
	return c, r, err
}

// ask has each kind of flow ask n times, at a pace that leaves the machine to
// those whom it is beside, and wants every answer.
func (o *others) ask(t *testing.T, n int) (there, fresh delays) {
	t.Helper()
	tick := time.NewTicker(4 * time.Millisecond)
	defer tick.Stop()
	b := make([]byte, 64)
	for i := range n {
		<-tick.C
		q := fmt.Sprintf("question %d", i)
		began := time.Now()
		o.tcp.SetDeadline(began.Add(kit.Long))
		io.WriteString(o.tcp, q)
		if _, err := io.ReadFull(o.r, b[:len(q)]); err != nil || string(b[:len(q)]) != q {
			t.Fatalf("on the connection that is there: %q, %v", b[:len(q)], err)
		}
		there = append(there, time.Since(began))

		began = time.Now()
		c, _, err := o.dial()
		if err != nil {
			t.Fatalf("on a new connection: %v", err)
		}
		fresh = append(fresh, time.Since(began))
		c.(*net.TCPConn).SetLinger(0) // no port has to wait
		c.Close()

		if o.udp == nil {
			continue
		}
		began = time.Now()
		if err := o.datagram(o.udp, q); err != nil {
			t.Fatalf("of the session that is there: %v", err)
		}
		there = append(there, time.Since(began))

		began = time.Now()
		if c, err = net.Dial("udp", o.addr); err == nil {
			err = o.datagram(c, q)
			c.Close()
		}
		if err != nil {
			t.Fatalf("of a new session: %v", err)
		}
		fresh = append(fresh, time.Since(began))
	}
	return there, fresh
}

func (o *others) datagram(c net.Conn, q string) error {
	c.SetDeadline(time.Now().Add(kit.Long))
	if _, err := io.WriteString(c, q); err != nil {
		return err
	}
	b := make([]byte, 128)
	n, err := c.Read(b)
	if err == nil && string(b[:n]) != o.name+"\n"+q {
		err = fmt.Errorf("answered %q", b[:n])
	}
	return err
}

// notice has others ask before and while something happens to flows that are
// not theirs, n times each. In a soak they must not notice it: within is by how
// much the slowest hundredth of their answers may be later. The machine may be
// somebody else's too, so that it is done three times before it is believed.
func (o *others) notice(t *testing.T, n int, what string, within time.Duration, during func(ask func())) {
	t.Helper()
	o.ask(t, n/10) // what is done once
	for range kit.Scaled(1, 3) {
		there, fresh := o.ask(t, n)
		var there2, fresh2 delays
		during(func() { there2, fresh2 = o.ask(t, n) })
		t.Logf("flows that are there: %v, beside %s %v; new ones: %v, %v", there, what, there2, fresh, fresh2)
		if !kit.Soak() || kit.Race || there2.p99() <= there.p99()+within && fresh2.p99() <= fresh.p99()+within {
			return
		}
	}
	t.Errorf("others notice %s: their answers are more than %v later", what, within)
}

// deadResolver is a service that does not answer, in one of the ways there are.
func deadResolver(t *testing.T, how string) (url string) {
	t.Helper()
	switch how {
	case "refuses":
		return "http://" + kit.Local(kit.Port(t))
	case "accepts nothing": // what it is sent stays in its kernel
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ln.Close() })
		return "http://" + ln.Addr().String()
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if how == "fails" {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		<-r.Context().Done() // hangs
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// TestDeadResolver has more flows ask a dead resolver than calls may be under
// way, again and again. They end, counted; flows that ask nobody go on as ever,
// and so do those of another resolver.
func TestDeadResolver(t *testing.T) {
	for _, how := range []string{"hangs", "refuses", "accepts nothing", "fails"} {
		t.Run(how, func(t *testing.T) { besideDead(t, how) })
	}
}

func besideDead(t *testing.T, how string) {
	town := newTown(t, "free", "asked")
	free, ftcp, fudp := bind(t)
	stuck, stcp, sudp := bind(t)
	lively, ltcp, _ := bind(t)
	good := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"pool": "asked"}`) }))
	t.Cleanup(good.Close)
	pools := town.pools()
	p := kit.Start(t, kit.App(kit.M{
		"free-tcp": kit.Listener([]string{ftcp}, kit.Route(tcp("free"))),
		"free-udp": kit.Listener([]string{fudp}, kit.Route(udp("free"))),
		"stuck":    kit.Listener([]string{stcp, sudp}, kit.Route(kit.M{"handler": "resolve", "resolver": "dead"})),
		"lively":   kit.Listener([]string{ltcp}, kit.Route(kit.M{"handler": "resolve", "resolver": "good"})),
	}, pools, kit.M{"resolvers": kit.M{
		"dead": kit.M{"resolver": "http", "endpoint": deadResolver(t, how), "timeout": "1s"},
		"good": kit.M{"resolver": "http", "endpoint": good.URL, "timeout": "1m"},
	}}), kit.Options{})

	calls := func(result string) float64 {
		return p.Metric("resolver_requests_total", "resolver", "dead", "result", result)
	}
	var opened atomic.Int64
	sessions := int64(0)
	newOthers(t, free, "free", nil).notice(t, kit.Scaled(100, 2500), "a resolver that "+how, 5*time.Millisecond, func(ask func()) {
		const atOnce = 300 // more than calls may be under way
		stop := make(chan struct{})
		pace := time.NewTicker(time.Second / atOnce)
		defer pace.Stop()
		var wg sync.WaitGroup
		for range atOnce {
			wg.Go(func() {
				for {
					c, err := net.Dial("tcp", stuck)
					if err != nil {
						t.Errorf("a connection that has to wait: %v", err)
						return
					}
					opened.Add(1)
					c.SetDeadline(time.Now().Add(kit.Long))
					io.WriteString(c, "hello")
					if _, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
						t.Errorf("without an answer it is not cut off: %v", err)
					}
					c.(*net.TCPConn).SetLinger(0)
					c.Close()
					select {
					case <-stop:
						return
					case <-pace.C:
					}
				}
			})
		}
		before := opened.Load()
		kit.Eventually(t, "the resolver is asked", func() bool { return opened.Load() >= before+atOnce })
		u := call(t, stuck)
		sessions++
		u.send(t, []byte("hello"))
		ask()
		goes(t, "a flow of another resolver", lively, "asked", []byte("hello"))
		close(stop)
		wg.Wait()
		if err := u.silent(); err != nil {
			t.Errorf("a session without an answer has heard something: %v", err)
		}
	})
	want := opened.Load() + sessions
	kit.Settles(t, "calls without an answer", float64(want), func() float64 { return calls("timeout") + calls("error") })
	if late := calls("timeout"); (how == "hangs" || how == "accepts nothing") != (late > 0) {
		t.Errorf("%v of %d calls are counted as timeouts", late, want)
	}
	kit.Settles(t, "connections that no route took", float64(opened.Load()), func() float64 {
		return p.Metric("listener_connections_total", "listener", "stuck", "result", "no_route")
	})
	kit.Settles(t, "connections left", 1.0, func() float64 { return p.Metric("active_connections") }) // that of others
	if n := town["asked"].heard(); n != sessions {
		t.Errorf("the place of the other resolver has had %d flows, want %d", n, sessions)
	}
}
