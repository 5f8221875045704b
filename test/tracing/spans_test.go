package tracing

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// environment has spans sent to a receiver, often.
func environment(url string, more ...string) []string {
	return append([]string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + url, "OTEL_BSP_SCHEDULE_DELAY=50"}, more...)
}

// headed is a TCP server that answers with the traceparent that its PROXY header
// has, in the field 0xE7.
func headed(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				fmt.Fprintln(c, fieldOf(bufio.NewReader(c)))
				io.Copy(io.Discard, c)
			}()
		}
	}()
	return ln.Addr().String()
}

func fieldOf(r *bufio.Reader) string {
	h, err := proxyproto.Read(r)
	if err != nil {
		return err.Error()
	}
	fields, err := h.TLVs()
	if err != nil {
		return err.Error()
	}
	for _, f := range fields {
		if f.Type == 0xe7 {
			return string(f.Value)
		}
	}
	return "none"
}

// headedUDP is headed for datagrams.
func headedUDP(t *testing.T) string {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			fmt.Fprintln(writerTo{pc, from}, fieldOf(bufio.NewReader(bytes.NewReader(b[:n]))))
		}
	}()
	return pc.LocalAddr().String()
}

type writerTo struct {
	net.PacketConn
	to net.Addr
}

func (w writerTo) Write(p []byte) (int, error) { return w.WriteTo(p, w.to) }

// ask opens a flow and returns the line that the backend answers with.
func ask(t *testing.T, network, addr, first string) string {
	t.Helper()
	c, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(20 * time.Second))
	if half := len(first) / 2; network == "tcp" && half > 0 {
		io.WriteString(c, first[:half])
		first = first[half:]
	}
	io.WriteString(c, first)
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil && err != io.EOF && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("%s %s: %v", network, addr, err)
	}
	return strings.TrimSpace(line)
}

// TestSpans has flows of every kind, and the tree of spans of each.
func TestSpans(t *testing.T) {
	r := newReceiver(t)
	tcp, udp, gone := headed(t), headedUDP(t), kit.Local(kit.Port(t))
	var parents atomic.Pointer[string]
	matchmaker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		p := req.Header.Get("Traceparent")
		parents.Store(&p)
		if req.URL.Path == "/empty" {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		pool := "udp"
		if req.URL.Path == "/tcp" {
			pool = "tcp"
		}
		fmt.Fprintf(w, `{"pool": %q}`, pool)
	}))
	defer matchmaker.Close()
	with := kit.M{"proxy_protocol_tlvs": kit.A{"traceparent"}}
	pools := kit.M{
		"tcp":  kit.With(kit.Pool(tcp), kit.With(with, kit.M{"proxy_protocol": "v2"})),
		"udp":  kit.With(kit.Pool(udp), kit.With(with, kit.M{"proxy_protocol": "v2-udp"})),
		"gone": kit.Pool(gone),
		"next": kit.With(kit.Pool(gone, tcp), kit.With(with, kit.M{"proxy_protocol": "v2", "balancer": kit.M{"policy": "first_available"}})),
	}
	pool := func(name string) kit.M { return kit.M{"handler": "pool", "pool": name} }
	hello := kit.M{"first_bytes": kit.M{"prefix": "ascii:hello world"}}
	resolve := func(name string) kit.M { return kit.M{"handler": "resolve", "resolver": name} }
	const match, connect, call, peek = "route.match", "backend.connect", "resolver.call", "peek"
	cases := map[string]struct {
		network string
		route   kit.M
		spans   []string // in it
		outcome string
		pool    any
		answers bool
	}{
		"direct":       {"tcp", kit.Route(pool("tcp")), []string{connect}, "established", "tcp", true},
		"direct-udp":   {"udp", kit.Route(pool("udp")), []string{connect}, "established", "udp", true},
		"looked":       {"tcp", kit.Match(hello, pool("tcp")), []string{connect, peek, match}, "established", "tcp", true},
		"looked-udp":   {"udp", kit.Match(hello, pool("udp")), []string{connect, match}, "established", "udp", true},
		"resolved":     {"tcp", kit.Route(resolve("tcp")), []string{connect, call, match}, "established", "tcp", true},
		"resolved-udp": {"udp", kit.Route(resolve("udp")), []string{connect, call, match}, "established", "udp", true},
		"empty":        {"tcp", kit.Route(resolve("empty")), []string{call, match}, "no_route", nil, false},
		"copied":       {"tcp", kit.Route(kit.M{"handler": "throttle"}, pool("tcp")), []string{connect, match}, "established", "tcp", true},
		"gone":         {"tcp", kit.Route(pool("gone")), []string{connect}, "error", "gone", false},
		"next":         {"tcp", kit.Route(pool("next")), []string{connect, connect}, "established", "next", true},
	}
	listeners, addrs := kit.M{}, map[string]string{}
	for name, c := range cases {
		addrs[name] = kit.Local(kit.Port(t))
		listeners[name] = kit.M{"bind": kit.A{c.network + "/" + addrs[name]}, "routes": kit.A{c.route}, "peek": kit.M{"timeout": "10s"}}
	}
	resolvers := kit.M{}
	for _, name := range []string{"tcp", "udp", "empty"} {
		resolvers[name] = kit.M{"resolver": "http", "endpoint": matchmaker.URL + "/" + name, "timeout": "5s"}
	}
	config := kit.App(listeners, pools, kit.M{"tracing": kit.M{}, "resolvers": resolvers})
	p := kit.Start(t, config, kit.Options{Env: environment(r.URL)})
	for i, name := range slices.Sorted(maps.Keys(cases)) {
		if i == len(cases)/2 {
			p.MustLoad(config) // the spans go on
		}
		c := cases[name]
		t.Run(name, func(t *testing.T) {
			parents.Store(nil)
			before := time.Now()
			answer := ask(t, c.network, addrs[name], "hello world")
			root, children := r.tree(t, name)
			kit.Poll(5*time.Second, func() bool { // they may be in another batch
				root, children = r.tree(t, name)
				n := 0
				for _, list := range children {
					n += len(list)
				}
				return n >= len(c.spans)
			})
			var got []string
			for child, list := range children {
				for _, s := range list {
					got = append(got, child)
					if s.StartTimeUnixNano < root.StartTimeUnixNano || s.EndTimeUnixNano > root.EndTimeUnixNano || s.EndTimeUnixNano < s.StartTimeUnixNano {
						t.Errorf("%s is from %d to %d, the set-up from %d to %d", child, s.StartTimeUnixNano, s.EndTimeUnixNano, root.StartTimeUnixNano, root.EndTimeUnixNano)
					}
					if string(s.ParentSpanId) != string(root.SpanId) {
						t.Errorf("%s is not in the set-up", child)
					}
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, c.spans) {
				t.Errorf("the spans %v, want %v", got, c.spans)
			}
			if root.StartTimeUnixNano < uint64(before.UnixNano()) || root.EndTimeUnixNano > uint64(time.Now().UnixNano()) {
				t.Error("the set-up is of another time")
			}
			if root.attrs["wayhouse.outcome"] != c.outcome || root.attrs["wayhouse.pool"] != c.pool || root.attrs["network.transport"] != c.network ||
				root.attrs["client.address"] != "127.0.0.1" || root.attrs["client.port"] == nil || len(root.ParentSpanId) > 0 {
				t.Errorf("the set-up has %v", root.attrs)
			}
			trace := hex.EncodeToString(root.TraceId)
			if want := "00-" + trace + "-" + hex.EncodeToString(root.SpanId) + "-01"; c.answers && answer != want {
				t.Errorf("the backend is told %q, want %q", answer, want)
			}
			if calls := children[call]; len(calls) == 1 {
				want := "00-" + trace + "-" + hex.EncodeToString(calls[0].SpanId) + "-01"
				if got := parents.Load(); got == nil || *got != want {
					t.Errorf("the resolver is told %v, want %q", got, want)
				}
			}
		})
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.services["wayhouse"] || len(r.services) != 1 {
		t.Errorf("spans of the services %v", r.services)
	}
}

// TestSampler has the sampler that the environment names: nothing is exported, and
// the backend is told that it is not sampled. Without tracing it is told nothing,
// and nobody is sent anything.
func TestSampler(t *testing.T) {
	for name, tc := range map[string]struct {
		tracing bool
		flags   string
	}{"never": {true, "-00"}, "off": {false, "none"}} {
		t.Run(name, func(t *testing.T) {
			r, addr := newReceiver(t), kit.Local(kit.Port(t))
			pool := kit.With(kit.Pool(headed(t)), kit.M{"proxy_protocol": "v2", "proxy_protocol_tlvs": kit.A{"traceparent"}})
			options := kit.M{}
			if tc.tracing {
				options["tracing"] = kit.M{}
			}
			p := kit.Start(t, kit.App(kit.M{"l": kit.ToPool("p", "tcp/"+addr)}, kit.M{"p": pool}, options),
				kit.Options{Env: environment(r.URL, "OTEL_TRACES_SAMPLER=always_off")})
			if answer := ask(t, "tcp", addr, "x"); !strings.HasSuffix(answer, tc.flags) {
				t.Errorf("the backend is told %q, want %s", answer, tc.flags)
			}
			if n := p.Metric("trace_spans_total"); n != 0 {
				t.Errorf("%v spans are counted", n)
			}
			p.Signal(15)
			p.Exit() // what there is was sent by now
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.requests > 0 {
				t.Errorf("%d requests to the receiver", r.requests)
			}
		})
	}
}

// TestDeadReceiver has nobody to send spans to: flows do not notice, failures are
// counted, and the process ends in time.
func TestDeadReceiver(t *testing.T) {
	const flows = 300
	addr := kit.Local(kit.Port(t))
	b := kit.NewTCPBackend(t, 1, "127.0.0.1:0")
	p := kit.Start(t, kit.App(kit.M{"l": kit.ToPool("p", "tcp/"+addr)}, kit.M{"p": kit.Pool(b.Addr)}, kit.M{"tracing": kit.M{}}),
		kit.Options{Env: environment("http://"+kit.Local(kit.Port(t)), "OTEL_BSP_EXPORT_TIMEOUT=100", "OTEL_EXPORTER_OTLP_TIMEOUT=100")})
	for range flows {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	kit.Eventually(t, "all are set up", func() bool { return p.Metric("trace_spans_total", "result", "ended") >= flows })
	kit.Eventually(t, "a failure is counted", func() bool { return p.Metric("trace_spans_total", "result", "failed") > 0 })
	if n := strings.Count(p.Log(), "exporting spans failed"); n != 1 {
		t.Errorf("told of %d times", n)
	}
	began := time.Now()
	p.Signal(15)
	p.Exit()
	if took := time.Since(began); took > 15*time.Second {
		t.Errorf("the end took %v", took)
	}
}

// TestBadExporter refuses a config whose exporter there is not, and the one that
// runs goes on.
func TestBadExporter(t *testing.T) {
	addr := kit.Local(kit.Port(t))
	b := kit.NewTCPBackend(t, 1, "127.0.0.1:0")
	config := func(options kit.M) kit.M {
		return kit.App(kit.M{"l": kit.ToPool("p", "tcp/"+addr)}, kit.M{"p": kit.Pool(b.Addr)}, options)
	}
	p := kit.Start(t, config(nil), kit.Options{Env: []string{"OTEL_TRACES_EXPORTER=pigeon"}})
	if err := p.Load(config(kit.M{"tracing": kit.M{}})); err == nil || !strings.Contains(err.Error(), "tracing: making the exporter") {
		t.Errorf("loaded: %v", err)
	}
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// TestFront has a route lead to a server of another app: the set-up of a session is
// over when the server has it, and the session log has its beginning.
func TestFront(t *testing.T) {
	for _, network := range []string{"tcp", "udp"} {
		t.Run(network, func(t *testing.T) {
			r, addr := newReceiver(t), kit.Local(kit.Port(t))
			config := kit.App(kit.M{"l": kit.Listener([]string{network + "/" + addr}, kit.Route(kit.M{"handler": "http_front", "name": "web"}))}, nil,
				kit.M{"tracing": kit.M{}, "connection_log": kit.M{"open": true}})
			server := map[string]string{"tcp": "wayhouse/web", "udp": "wayhouse_udp/web"}[network]
			config["apps"].(kit.M)["layer4"] = kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{server}, "routes": kit.A{kit.Route(kit.M{"handler": "echo"})}}}}
			p := kit.Start(t, config, kit.Options{Env: environment(r.URL)})
			if answer := ask(t, network, addr, "hello\n"); answer != "hello" {
				t.Errorf("the server answers %q", answer)
			}
			root, children := r.tree(t, "l")      // while the session goes on
			kit.Poll(5*time.Second, func() bool { // it may be in another batch
				root, children = r.tree(t, "l")
				return len(children["route.match"]) > 0
			})
			if root.attrs["wayhouse.outcome"] != "handler" || root.attrs["network.transport"] != network || len(children["route.match"]) != 1 {
				t.Errorf("the set-up has %v and %v", root.attrs, children)
			}
			kit.Eventually(t, "the session log has the beginning", func() bool {
				return strings.Contains(p.Log(), `"msg":"session_open"`) || strings.Contains(p.Log(), `"event":"session_open"`)
			})
		})
	}
}
