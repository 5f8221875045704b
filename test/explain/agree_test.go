package explain

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
	"github.com/wayhouse-proxy/wayhouse/modules/flow"
	"github.com/wayhouse-proxy/wayhouse/modules/intent"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/pool"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// wait is how long a UDP flow may take to be answered or dropped.
const wait = 30 * time.Second

const (
	configs      = 10
	perConfig    = 20 // listeners
	perListener  = 5  // flows
	agreeingSeed = 20261130
)

// job is a flow and what was said of it.
type job struct {
	listener string
	udp      bool
	to       string
	q        listener.Question
	names    map[string]string
}

// TestExplainAgrees sends 1,000 flows through random configs after having asked
// what would become of each: the backend that answers, if one does, must be the
// one that was named.
func TestExplainAgrees(t *testing.T) {
	t.Logf("seed %d", agreeingSeed)
	ends := make(map[string]int)
	var mu sync.Mutex
	for n := range kit.Scaled(configs, 10*configs) {
		t.Run(fmt.Sprint("config ", n), func(t *testing.T) {
			m := newMaker(t, agreeingSeed+uint64(n), startBackends(t))
			cfg, udp := m.config(t, perConfig)
			load(t, cfg)
			m.states(t)
			jobs := make([][]job, perConfig)
			for i, u := range udp {
				for range perListener {
					jobs[i] = append(jobs[i], m.job(t, fmt.Sprint("l", i), u))
				}
			}
			var wg sync.WaitGroup
			for _, list := range jobs {
				wg.Go(func() { // one flow after the other: they take turns at the backends
					for _, j := range list {
						end := j.check(t, cfg)
						mu.Lock()
						ends[end]++
						mu.Unlock()
					}
				})
			}
			wg.Wait()
		})
	}
	t.Logf("%v", ends)
	for _, end := range []string{listener.EndPool, listener.EndNoRoute, listener.EndCutOff, listener.EndResolver} {
		if ends[end] < 10 {
			t.Errorf("%d flows of %v end with %s: the test tells nothing about it", ends[end], ends, end)
		}
	}
}

func load(t *testing.T, config kit.M) {
	t.Helper()
	config["admin"] = kit.M{"disabled": true, "config": kit.M{"persist": false}}
	config["logging"] = kit.M{"logs": kit.M{"default": kit.M{"level": "ERROR"}}}
	b, err := json.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := caddy.Load(b, true); err != nil {
		t.Fatalf("loading %s: %v", b, err)
	}
	t.Cleanup(func() {
		if err := caddy.Stop(); err != nil {
			t.Errorf("stopping: %v", err)
		}
	})
}

// states drains and disables some backends.
func (m *maker) states(t *testing.T) {
	for name := range m.pools {
		p := pool.Running(name)
		if p == nil {
			t.Fatalf("no pool %s", name)
		}
		for _, b := range p.Backends() {
			if name != "resolved" && m.IntN(4) == 0 {
				b.SetState(of(m, pool.Draining, pool.Disabled))
			}
		}
	}
}

func (m *maker) job(t *testing.T, name string, udp bool) job {
	bound := proxy.Running().Listening(name)
	if len(bound) != 1 {
		t.Fatalf("%s listens on %v", name, bound)
	}
	client := m.client()
	if m.IntN(3) == 0 {
		hint := "nowhere"
		if m.IntN(4) > 0 {
			hint = name + "r0" // of the listener's own network
		}
		intent.RouteHints.Set(netip.MustParseAddr(client), hint, time.Hour)
	}
	return job{
		listener: name, udp: udp, to: bound[0].Addr.String(), names: m.names,
		q: listener.Question{UDP: udp, Client: netip.AddrPortFrom(netip.MustParseAddr(client), 20000), Pieces: m.packet(udp), Final: true},
	}
}

// check asks, sends and compares.
func (j *job) check(t *testing.T, cfg kit.M) (end string) {
	fail := func(format string, args ...any) {
		text, _ := json.Marshal(cfg["apps"].(kit.M)["wayhouse"].(kit.M)["listeners"].(kit.M)[j.listener])
		t.Errorf("%s\nlistener %s: %s\nclient %s sends %.200x", fmt.Sprintf(format, args...), j.listener, text, j.q.Client, j.q.Pieces)
	}
	e, err := proxy.Running().Listeners[j.listener].Explain(j.q)
	if err != nil {
		fail("explaining: %v", err)
		return ""
	}
	c, err := j.dial()
	if err != nil {
		fail("dialing: %v", err)
		return ""
	}
	defer c.Close()
	got, err := j.send(c, e)
	if err != nil {
		fail("sending: %v", err)
		return e.End.What
	}
	want := ""
	switch e.End.What {
	case listener.EndPool:
		want, _, _ = net.SplitHostPort(e.End.Backend)
		if at := j.names[want]; want != "" && at != e.End.Pool {
			fail("%s is of the pool %s, not of %s", want, at, e.End.Pool)
		}
	case listener.EndResolver:
		want = "127.9.255.1"
	case listener.EndHandler: // a hint's handler that lets the flow go on behind others
		return e.End.What
	}
	if got != want {
		var text strings.Builder
		e.WriteText(&text)
		fail("answered by %q, and explained so:\n%s", got, &text)
	}
	if e.End.What == listener.EndPool {
		j.settle(t, e.End.Pool)
	}
	return e.End.What
}

func (j *job) dial() (net.Conn, error) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(j.q.Client)}
	network := "tcp"
	if j.udp {
		d.LocalAddr, network = net.UDPAddrFromAddrPort(j.q.Client), "udp"
	}
	c, err := d.Dial(network, j.to)
	if err == nil {
		c.SetDeadline(time.Now().Add(kit.Long))
	}
	return c, err
}

// send sends the flow and returns the backend that answers, "" when none does.
func (j *job) send(c net.Conn, e *listener.Explanation) (string, error) {
	if j.udp {
		return j.sendDatagrams(c, e)
	}
	for _, p := range j.q.Pieces {
		if _, err := c.Write(p); err != nil {
			break // cut off by now: the answer says so
		}
	}
	c.(*net.TCPConn).CloseWrite()
	b, err := io.ReadAll(c)
	if err != nil && len(b) == 0 && !isTimeout(err) {
		return "", nil // a reset
	}
	return string(b), nil
}

func isTimeout(err error) bool {
	ne, ok := err.(net.Error)
	return ok && ne.Timeout()
}

// sendDatagrams sends as many datagrams as were looked at, for each one behind
// a refusal is a session of its own.
func (j *job) sendDatagrams(c net.Conn, e *listener.Explanation) (string, error) {
	looked := 0
	for _, s := range e.Steps {
		looked = max(looked, s.Datagrams)
	}
	dropped := j.dropped()
	for _, p := range j.q.Pieces[:max(looked, 1)] {
		if _, err := c.Write(p); err != nil {
			return "", err
		}
	}
	// Either an answer comes or the session is dropped.
	answer := make(chan string, 1)
	go func() {
		b := make([]byte, 64)
		n, _ := c.Read(b)
		answer <- string(b[:n])
	}()
	got, is := "", false
	if !kit.Poll(wait, func() bool {
		select {
		case got = <-answer:
			is = true
		default:
		}
		return is || j.dropped() > dropped
	}) {
		return "", fmt.Errorf("neither an answer nor a drop in %v", wait)
	}
	if !is {
		c.SetReadDeadline(time.Now()) // ends the read
		got = <-answer
	}
	return got, nil
}

// dropped counts the listener's datagrams that nobody got.
func (j *job) dropped() (n uint64) {
	cs := flow.ListenerOf(j.listener).Workers(2)
	for i := range cs {
		for r := range cs[i].Dropped {
			n += cs[i].Dropped[r].Load()
		}
	}
	return n
}

// settle waits until a connection's place is free again.
func (j *job) settle(t *testing.T, name string) {
	if j.udp {
		return
	}
	p := pool.Running(name)
	kit.Settles(t, "flows at the backends of "+name, 0, func() (n int64) {
		for _, b := range p.Backends() {
			n += b.Active()
		}
		return n
	})
}
