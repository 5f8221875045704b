package health

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/sock"
)

func load(t *testing.T, kind, config string) (Check, error) {
	t.Helper()
	ctx, cancel := caddy.NewContext(caddy.Context{Context: t.Context()})
	t.Cleanup(cancel)
	m, err := ctx.LoadModuleByID("wayhouse.health_checks."+kind, json.RawMessage(config))
	if err != nil {
		return nil, err
	}
	return m.(Check), nil
}

func mustLoad(t *testing.T, kind, config string) Check {
	t.Helper()
	c, err := load(t, kind, config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func ask(t *testing.T, c Check, to netip.AddrPort, timeout time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	return c.Check(ctx, to)
}

const long = 10 * time.Second // for checks that must end before

// udpBackend answers every datagram with what answer returns.
func udpBackend(t *testing.T, answer func([]byte) [][]byte) netip.AddrPort {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 65536)
		for {
			n, from, err := pc.ReadFrom(b)
			if err != nil {
				return
			}
			for _, a := range answer(b[:n]) {
				_, _ = pc.WriteTo(a, from) // the check may have gone
			}
		}
	}()
	t.Cleanup(func() { pc.Close(); <-done })
	return pc.LocalAddr().(*net.UDPAddr).AddrPort()
}

// closedPort is an address nothing listens on.
func closedPort(t *testing.T, network string) netip.AddrPort {
	t.Helper()
	if network == "udp" {
		pc, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer pc.Close()
		return pc.LocalAddr().(*net.UDPAddr).AddrPort()
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func TestTCPConnect(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := mustLoad(t, "tcp_connect", `{}`)
	if err := ask(t, c, l.Addr().(*net.TCPAddr).AddrPort(), long); err != nil {
		t.Errorf("a listening backend: %v", err)
	}
	if err := ask(t, c, closedPort(t, "tcp"), long); !errors.Is(err, syscall.ECONNREFUSED) || NoVerdict(err) {
		t.Errorf("a closed port: %v", err)
	}
}

func TestSourceAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	to := l.Addr().(*net.TCPAddr).AddrPort()
	c := mustLoad(t, "tcp_connect", `{}`).(*TCPConnect)
	c.Sources = []netip.Addr{netip.MustParseAddr("::1"), netip.MustParseAddr("127.0.0.9")}
	if err := ask(t, c, to, long); err != nil {
		t.Fatal(err)
	}
	conn, err := c.connect(to)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.close()
	if got, err := sock.LocalAddr(conn.fd); err != nil || got.Addr().String() != "127.0.0.9" {
		t.Errorf("checked from %v (%v), want 127.0.0.9", got, err)
	}
	err = ask(t, c, closedPort(t, "tcp"), long)
	if err == nil || !strings.Contains(err.Error(), "dial tcp 127.0.0.9:0->127.0.0.1:") {
		t.Errorf("error %v, want one that names both addresses", err)
	}
	c.Sources = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	if err := ask(t, c, to, long); err == nil || !strings.Contains(err.Error(), "bind: cannot assign") || !NoVerdict(err) {
		t.Errorf("from an address that is not ours: %v, want no verdict", err)
	}
}

func TestUDPProbe(t *testing.T) {
	echo := func(b []byte) [][]byte { return [][]byte{b} }
	for name, tc := range map[string]struct {
		config string
		answer func([]byte) [][]byte
		within time.Duration
		want   error
	}{
		"any answer":         {`{"send": "hex:01"}`, echo, long, nil},
		"an empty answer":    {`{"send": "hex:01"}`, func([]byte) [][]byte { return [][]byte{{}} }, long, nil},
		"the expected":       {`{"send": "ascii:ping", "expect": "ascii:pi"}`, echo, long, nil},
		"the expected later": {`{"send": "hex:01", "expect": "hex:02"}`, func([]byte) [][]byte { return [][]byte{{9}, {}, {2, 7}} }, long, nil},
		"another":            {`{"send": "hex:01", "expect": "hex:02"}`, echo, 50 * time.Millisecond, errUnexpected},
		"too short":          {`{"send": "hex:01", "expect": "hex:0102"}`, echo, 50 * time.Millisecond, errUnexpected},
		"silence":            {`{"send": "hex:01"}`, func([]byte) [][]byte { return nil }, 50 * time.Millisecond, context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			err := ask(t, mustLoad(t, "udp_probe", tc.config), udpBackend(t, tc.answer), tc.within)
			if !errors.Is(err, tc.want) || NoVerdict(err) {
				t.Errorf("error %v, want %v", err, tc.want)
			}
		})
	}
	t.Run("closed port", func(t *testing.T) {
		err := ask(t, mustLoad(t, "udp_probe", `{"send": "hex:01"}`), closedPort(t, "udp"), long)
		if !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("error %v, want refused", err)
		}
	})
}

func TestHTTP(t *testing.T) {
	hosts := make(chan string, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/ok":
			select {
			case hosts <- r.Host:
			default:
			}
		case "/query":
			if r.URL.Query().Get("deep") != "1" {
				w.WriteHeader(http.StatusBadRequest)
			}
		case "/moved":
			http.Redirect(w, r, "/ok", http.StatusFound)
		case "/endless":
			for {
				if _, err := w.Write(make([]byte, 4096)); err != nil {
					return
				}
			}
		case "/header":
			w.Header().Set("X", strings.Repeat("x", 2*maxBody))
		case "/never":
			<-r.Context().Done()
		default:
			w.WriteHeader(http.StatusTeapot)
		}
	}))
	t.Cleanup(srv.Close)
	addr := srv.Listener.Addr().(*net.TCPAddr).AddrPort()
	for name, tc := range map[string]struct {
		config string
		within time.Duration
		err    string
	}{
		"ok":              {`{"path": "/ok", "host": "game.example"}`, long, ""},
		"query":           {`{"path": "/query?deep=1"}`, long, ""},
		"default path":    {`{}`, long, "status 418, not 200"},
		"another status":  {`{"path": "/tea", "status": 418}`, long, ""},
		"no redirects":    {`{"path": "/moved"}`, long, "status 302, not 200"},
		"endless body":    {`{"path": "/endless"}`, long, ""},
		"too long header": {`{"path": "/header"}`, long, "exceeded"},
		"hangs":           {`{"path": "/never"}`, 50 * time.Millisecond, "deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			err := ask(t, mustLoad(t, "http", tc.config), addr, tc.within)
			if (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("error %v, want %q", err, tc.err)
			}
		})
	}
	if got := <-hosts; got != "game.example" {
		t.Errorf("Host %q, want game.example", got)
	}
	t.Run("another port", func(t *testing.T) {
		c := mustLoad(t, "http", fmt.Sprintf(`{"path": "/ok", "port": %d}`, addr.Port()))
		if err := ask(t, c, netip.AddrPortFrom(addr.Addr(), 1), long); err != nil {
			t.Error(err)
		}
		if got := <-hosts; got != addr.String() {
			t.Errorf("Host %q, want %v", got, addr)
		}
	})
}

func TestNoVerdict(t *testing.T) {
	for err, want := range map[error]bool{
		syscall.EMFILE: true, syscall.ENFILE: true, syscall.ENOMEM: true, syscall.ENOBUFS: true, syscall.EADDRNOTAVAIL: true,
		syscall.EAGAIN: true, syscall.EPERM: true,
		syscall.ECONNREFUSED: false, syscall.ETIMEDOUT: false, syscall.EHOSTUNREACH: false, syscall.ENETUNREACH: false,
		context.DeadlineExceeded: false, context.Canceled: true, errUnexpected: false,
	} {
		wrapped := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", err)}
		if got := NoVerdict(wrapped); got != want {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
	if NoVerdict(nil) {
		t.Error("success is a verdict")
	}
}

// A descriptor shortage, made by a limit no process can reach.
func TestShortageIsNoVerdict(t *testing.T) {
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	tcp, udp := mustLoad(t, "tcp_connect", `{}`), mustLoad(t, "udp_probe", `{"send": "hex:01"}`)
	to := closedPort(t, "tcp")
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	errTCP, errUDP := ask(t, tcp, to, long), ask(t, udp, to, long)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(errTCP, syscall.EMFILE) || !NoVerdict(errTCP) || !errors.Is(errUDP, syscall.EMFILE) || !NoVerdict(errUDP) {
		t.Errorf("errors %v and %v, want two that are no verdict", errTCP, errUDP)
	}
}

func TestConfig(t *testing.T) {
	for in, want := range map[string]string{
		`tcp_connect {}`: "",
		`tcp_connect {"interval": "1s", "timeout": "1s", "rise": 1, "fall": 1}`: "",
		`none {"interval": "1s"}`:                       "",
		`udp_probe {"send": "hex:00ff"}`:                "",
		`http {"path": "/x", "port": 1, "status": 204}`: "",

		`tcp_connect {"send": "hex:01"}`:                 `unknown field "send"`,
		`none {"path": "/"}`:                             `unknown field "path"`,
		`udp_probe {"send": "hex:01", "path": "/"}`:      `unknown field "path"`,
		`http {"expect": "hex:01"}`:                      `unknown field "expect"`,
		`tcp_connect {"interval": 0}`:                    `interval: 0s is not above zero`,
		`tcp_connect {"interval": "-1s"}`:                `interval: -1s is not above zero`,
		`http {"timeout": "0s"}`:                         `timeout: 0s is not above zero`,
		`none {"rise": 0}`:                               `rise: 0 is less than 1`,
		`udp_probe {"send": "hex:01", "fall": 0}`:        `fall: 0 is less than 1`,
		`udp_probe {}`:                                   `send: missing`,
		`udp_probe {"send": "01"}`:                       `send: "01" is neither hex:DIGITS nor ascii:TEXT`,
		`udp_probe {"send": "hex:01", "expect": "hex:"}`: `expect: nothing stands behind the colon`,
		`udp_probe {"send": "hex:1"}`:                    `send: "1" is not made of pairs`,
		`udp_probe {"send": "ascii:é"}`:                  `is not ASCII`,
		`http {"path": "x"}`:                             `path: "x" is not a path that starts with /`,
		`http {"path": "http://x/"}`:                     `is not a path that starts with /`,
		`http {"port": 70000}`:                           `port: 70000 is not between`,
		`http {"status": 99}`:                            `status: 99 is not between`,
		`http {"host": "a b"}`:                           `host: "a b" cannot stand`,
	} {
		t.Run(in, func(t *testing.T) {
			kind, config, _ := strings.Cut(in, " ")
			_, err := load(t, kind, config)
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want %q", err, want)
			}
		})
	}
}

func TestCaddyfile(t *testing.T) {
	for in, want := range map[string]string{
		"tcp_connect": `{"check":"tcp_connect"}`,
		"tcp_connect {\n interval 1s\n timeout 100ms\n rise 1\n fall 2\n}":                `{"check":"tcp_connect","fall":2,"interval":1000000000,"rise":1,"timeout":100000000}`,
		"udp_probe {\n send hex:01\n expect hex:02\n interval 2s\n}":                      `{"check":"udp_probe","expect":"hex:02","interval":2000000000,"send":"hex:01"}`,
		"http {\n path /healthz\n port 8080\n status 204\n host game.example\n fall 1\n}": `{"check":"http","fall":1,"host":"game.example","path":"/healthz","port":8080,"status":204}`,
		"none {\n rise 5\n}": `{"check":"none","rise":5}`,

		"ping":                                       `unrecognized health check "ping"; there are http, none, tcp_connect, udp_probe`,
		"tcp_connect 5s":                             `unexpected argument "5s"`,
		"tcp_connect {\n send hex:01\n}":             `unrecognized option "send" of tcp_connect; there are fall, interval, rise, timeout, at Testfile:2`,
		"http {\n path /\n path /\n}":                `path: given twice, first in line 2, at Testfile:3`,
		"none {\n rise 1\n rise 2\n}":                `rise: given twice`,
		"none {\n rise\n}":                           `rise: a value is missing`,
		"none {\n rise 1 2\n}":                       `rise: unexpected argument "2"`,
		"none {\n rise two\n}":                       `rise: "two" is not a whole number`,
		"none {\n interval 5\n}":                     `interval: "5" is not a duration`,
		"udp_probe {\n send hex:01 {\n rise 1\n}\n}": `send: takes no block`,
	} {
		t.Run(in, func(t *testing.T) {
			d := caddyfile.NewTestDispenser(in)
			d.Next()
			raw, err := UnmarshalCaddyfile(d)
			got := string(raw)
			if err != nil {
				got = err.Error()
			}
			if strings.HasPrefix(want, "{") && got != want || !strings.Contains(got, want) {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}
