package addresses

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestToldChange changes the header of a pool by a reload: flows keep their
// backend and what it expects, new ones have the new header.
func TestToldChange(t *testing.T) {
	w := newWorld(t)
	w.backend.Do(t, func() {
		tellTCP(t, "10.2.0.2:9100")
		tellUDP(t, "10.2.0.2:9100")
	})
	listeners := kit.M{"tcp": kit.ToPool("tcp", "tcp/:7001"), "udp": kit.ToPool("udp", "udp/:7001")}
	config := func(tcp, udp string) kit.M {
		every := kit.M{"proxy_protocol_udp": "every"}
		if udp != "v2-udp" {
			every = nil
		}
		return kit.App(listeners, kit.M{"tcp": toldPool(tcp, "10.2.0.2:9100", nil), "udp": toldPool(udp, "10.2.0.2:9100", every)})
	}
	steps := []struct{ tcp, udp string }{{"v2", "v2-udp"}, {"none", "none"}, {"v1", "spp"}, {"v2", "v2-udp"}}
	p := kit.Start(t, config(steps[0].tcp, steps[0].udp), kit.Options{Netns: w.proxy})
	type flow struct {
		tcp, udp net.Conn
		headed   bool
		peer     string // of the session
	}
	var flows []flow
	for i, step := range steps {
		if i > 0 {
			p.MustLoad(config(step.tcp, step.udp))
		}
		f := flow{tcp: w.dial(t, "tcp", "10.1.0.1:7001", 0), udp: w.dial(t, "udp", "10.1.0.1:7001", 0), headed: step.tcp != "none"}
		for _, c := range []net.Conn{f.tcp, f.udp} {
			s := hear(t, c, []byte("a"))
			if (s.Client == addrOf(c.LocalAddr())) != f.headed || (s.Err == "") != f.headed || f.headed && s.Text != "a" {
				t.Errorf("step %d: a new flow over %s is told as %+v", i, c.LocalAddr().Network(), s)
			}
			f.peer = s.Peer.String()
		}
		flows = append(flows, f)
		for k, f := range flows {
			f.tcp.SetDeadline(time.Now().Add(kit.Long))
			text := fmt.Sprintf("still here in step %d", i)
			io.WriteString(f.tcp, text)
			b := make([]byte, len(text))
			if _, err := io.ReadFull(f.tcp, b); err != nil || string(b) != text {
				t.Errorf("step %d: the connection of step %d answers %q, %v", i, k, b, err)
			}
			s := hear(t, f.udp, []byte("b"))
			if (s.Client == addrOf(f.udp.LocalAddr())) != f.headed || s.Peer.String() != f.peer {
				t.Errorf("step %d: the session of step %d is told as %+v, from %s before", i, k, s, f.peer)
			}
		}
	}
}

// TestToldTarget has a resolver name targets, which are told who the client is,
// and pools whose header is for flows of the other kind.
func TestToldTarget(t *testing.T) {
	w := newWorld(t)
	answers := map[string]string{
		"target-tcp": `{"target": "10.2.0.2:9100"}`, "target-udp": `{"target": "10.2.0.2:9100"}`,
		"misfit-tcp": `{"pool": "for-udp"}`, "misfit-udp": `{"pool": "for-tcp"}`, "copied-udp": `{"pool": "for-tcp"}`,
	}
	w.backend.Do(t, func() {
		tellTCP(t, "10.2.0.2:9100")
		tellUDP(t, "10.2.0.2:9100")
		ln, err := net.Listen("tcp", "10.2.0.2:9300")
		if err != nil {
			t.Fatal(err)
		}
		srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			var q struct{ Listener string }
			json.NewDecoder(r.Body).Decode(&q)
			io.WriteString(rw, answers[q.Listener])
		})}
		done := make(chan struct{})
		go func() { srv.Serve(ln); close(done) }()
		t.Cleanup(func() { srv.Close(); <-done })
	})
	resolve := func(resolver string) kit.M { return kit.M{"handler": "resolve", "resolver": resolver} }
	listener := func(bind string, handlers ...kit.M) kit.M {
		return kit.Listener([]string{bind}, kit.Route(handlers...))
	}
	resolver := func(version string) kit.M {
		r := kit.M{"resolver": "http", "endpoint": "http://10.2.0.2:9300/", "timeout": "1m", "allow_targets": kit.A{"10.2.0.0/24"}}
		if version != "" {
			r["proxy_protocol"] = version
		}
		return r
	}
	throttle := kit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20}
	config := kit.App(kit.M{
		"target-tcp": listener("tcp/:7001", resolve("v2")), "target-udp": listener("udp/:7002", resolve("v2-udp")),
		"misfit-tcp": listener("tcp/:7003", resolve("plain")), "misfit-udp": listener("udp/:7004", resolve("plain")),
		"copied-udp": listener("udp/:7005", throttle, resolve("plain")),
	}, kit.M{"for-tcp": toldPool("v2", "10.2.0.2:9100", nil), "for-udp": toldPool("v2-udp", "10.2.0.2:9100", nil)},
		kit.M{"resolvers": kit.M{"v2": resolver("v2"), "v2-udp": resolver("v2-udp"), "plain": resolver("")}})
	p := kit.Start(t, config, kit.Options{Netns: w.proxy})

	for network, port := range map[string]string{"tcp": "7001", "udp": "7002"} {
		for _, to := range []string{"10.1.0.1:", "[fd00:1::1]:"} {
			c := w.dial(t, network, to+port, 0)
			if s := hear(t, c, []byte("a")); s.Client != addrOf(c.LocalAddr()) || s.Dest != addrOf(c.RemoteAddr()) || s.Err != "" {
				t.Errorf("a target is told %+v, want %s to %s", s, c.LocalAddr(), c.RemoteAddr())
			}
		}
	}

	c := w.dial(t, "tcp", "10.1.0.1:7003", 0)
	c.SetDeadline(time.Now().Add(kit.Long))
	io.WriteString(c, "PROXY TCP4 6.6.6.6 6.6.6.6 6 6\r\n")
	if b, err := io.ReadAll(c); len(b) > 0 {
		t.Errorf("a connection to a pool for datagrams gets %q, %v", b, err)
	}
	if n := p.Metric("proxy_protocol_misfits_total", "pool", "for-udp"); n != 1 {
		t.Errorf("%v misfits of TCP, want 1", n)
	}
	for i, port := range []string{"7004", "7005"} {
		io.WriteString(w.dial(t, "udp", "10.1.0.1:"+port, 0), "hello")
		kit.Settles(t, "misfits of UDP", float64(i+1), func() float64 { return p.Metric("proxy_protocol_misfits_total", "pool", "for-tcp") })
	}
	kit.Settles(t, "datagrams dropped for want of a header", 1, func() float64 {
		return p.Metric("datagrams_dropped_total", "listener", "misfit-udp", "reason", "proxy_header")
	})
	if n := p.Metric("lb_selections_total"); n != 0 {
		t.Errorf("%v backends have been chosen for what does not fit", n)
	}
	if err := p.Load(kit.App(kit.M{"l": listener("udp/:7001", resolve("v2"))}, kit.M{}, kit.M{"resolvers": kit.M{"v2": resolver("v2")}})); err == nil || !strings.Contains(err.Error(), "resolvers.v2.proxy_protocol: v2 is for TCP") {
		t.Errorf("a resolver whose header is for TCP is taken for UDP: %v", err)
	}
}

// TestToldExplained: explain names the header that a backend would get, and
// that it would get none.
func TestToldExplained(t *testing.T) {
	base := kit.Ports(t, 5)
	at := func(network string, i int) string { return network + "/" + kit.Local(base+i) }
	more := kit.M{"proxy_protocol_udp": "every"}
	p := kit.Start(t, kit.App(kit.M{
		"v1": kit.ToPool("v1", at("tcp", 0)), "v2": kit.ToPool("v2", at("tcp", 1)), "udp": kit.ToPool("udp", at("udp", 2)),
		"spp": kit.ToPool("spp", at("udp", 3)), "none": kit.ToPool("none", at("tcp", 4)),
	}, kit.M{
		"v1": toldPool("v1", "127.0.0.1:1", nil), "v2": toldPool("v2", "127.0.0.1:1", nil), "udp": toldPool("v2-udp", "127.0.0.1:1", more),
		"spp": toldPool("spp", "127.0.0.1:1", nil), "none": kit.Pool("127.0.0.1:1"),
	}), kit.Options{})
	for i, tc := range []struct{ listener, want string }{
		{"v1", "v1 of 203.0.113.7:50000 to %s"}, {"v2", "v2 of 203.0.113.7:50000 to %s"}, {"udp", "v2-udp of 203.0.113.7:50000 to %s, every"},
		{"spp", "spp of 203.0.113.7:50000 to %s"}, {"none", ""},
	} {
		ask := kit.M{"listener": tc.listener, "src": "203.0.113.7:50000"}
		if i == 2 || i == 3 {
			ask["bytes"] = "ascii:x"
		}
		want := tc.want
		if want != "" {
			want = fmt.Sprintf(want, kit.Local(base+i))
		}
		body, _ := json.Marshal(ask)
		status, answer := p.Do(http.MethodPost, "/explain", body)
		var e struct {
			Steps []struct {
				Header string `json:"proxy_protocol"`
			}
		}
		if err := json.Unmarshal([]byte(answer), &e); err != nil || status != http.StatusOK {
			t.Fatalf("%d %s: %v", status, answer, err)
		}
		got := ""
		for _, s := range e.Steps {
			got += s.Header
		}
		_, text := p.Do(http.MethodPost, "/explain?format=text", body)
		if got != want || strings.Contains(text, "header ") != (want != "") || !strings.Contains(text, want) {
			t.Errorf("%s: the header is %q, want %q; as text: %s", tc.listener, got, want, text)
		}
	}
}
