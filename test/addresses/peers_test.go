package addresses

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// server is a web server in the backend's namespace that logs who it thinks
// its clients are.
type server struct {
	name, port string
	log        string // file
	argv       func(dir string) []string
	config     string // of which %[1]s is the directory, %[2]s the log
}

// servers log client, port, destination and port, and HAProxy the ID and the
// host of version 2 too.
var servers = []server{
	{
		name: "nginx", port: "9201",
		argv: func(dir string) []string { return []string{"nginx", "-p", dir, "-c", dir + "/config"} },
		config: `daemon off; master_process off; pid %[1]s/pid; error_log stderr;
events {}
http {
	log_format client '$proxy_protocol_addr $proxy_protocol_port $proxy_protocol_server_addr $proxy_protocol_server_port - -';
	access_log %[2]s client;
	client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;
	server { listen 10.2.0.2:9201 proxy_protocol; listen [fd00:2::2]:9201 proxy_protocol; return 200 hello; }
}
`,
	},
	{
		name: "haproxy", port: "9202",
		argv: func(dir string) []string { return []string{"haproxy", "-db", "-f", dir + "/config"} },
		config: `global
	log stdout format raw local0
defaults
	mode http
	log global
	log-format "%%ci %%cp %%fi %%fp %%[fc_pp_unique_id] %%[fc_pp_authority]"
	timeout connect 1m
	timeout client 1m
	timeout server 1m
frontend f
	bind 10.2.0.2:9202 accept-proxy
	bind [fd00:2::2]:9202 accept-proxy
	http-request return status 200 content-type text/plain string hello
`,
	},
}

// run starts the server in a namespace and waits until it takes connections.
func (s *server) run(t *testing.T, ns *kit.Netns, addr string) {
	t.Helper()
	_, err := exec.LookPath(s.name)
	kit.Require(t, err, s.name+" command (package "+s.name+")")
	dir := t.TempDir()
	s.log = filepath.Join(dir, "log")
	config := fmt.Sprintf(strings.TrimSuffix(s.config, "\n")+"%.0[1]s%.0[2]s\n", dir, s.log)
	if err := os.WriteFile(filepath.Join(dir, "config"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(filepath.Join(dir, "stdout"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if s.name == "haproxy" {
		s.log = out.Name()
	}
	cmd := exec.Command("ip", append([]string{"netns", "exec", ns.Name}, s.argv(dir)...)...)
	errs := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = out, errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		<-ended
		if t.Failed() {
			t.Logf("%s: %s", s.name, errs)
		}
	})
	kit.Eventually(t, s.name+" takes connections", func() bool {
		var err error
		ns.Do(t, func() {
			var c net.Conn
			if c, err = net.Dial("tcp", net.JoinHostPort(addr, s.port)); err == nil {
				c.Close()
			}
		})
		return err == nil
	})
}

// TestServers: nginx and HAProxy log the true client and the address it has
// hit, by both versions, of both families, and behind rules that redirect.
func TestServers(t *testing.T) {
	w := newWorld(t)
	w.redirect(t)
	listeners, pools := kit.M{}, kit.M{}
	ports := make(map[string]int)
	for _, s := range servers {
		for _, version := range []string{"v1", "v2"} {
			name := s.name + "-" + version
			ports[name] = 7001 + len(ports)
			more := kit.M{}
			if version == "v2" {
				more["proxy_protocol_tlvs"] = kit.A{"authority", "unique_id", "crc32c"}
			}
			pools[name], pools[name+"-6"] = toldPool(version, "10.2.0.2:"+s.port, more), toldPool(version, "[fd00:2::2]:"+s.port, more)
			listeners[name] = kit.ToPool(name, fmt.Sprintf("tcp/:%d", ports[name]))
		}
	}
	listeners["seen"] = kit.With(kit.Listener([]string{"tcp/:7777"}, families("nginx-v2", "nginx-v2-6")...), kit.M{"transparent": true})
	p := kit.Start(t, kit.App(listeners, pools), kit.Options{Netns: w.proxy})
	visit := func(t *testing.T, s *server, to string, v2 bool) {
		t.Helper()
		c := w.dial(t, "tcp", to, 0)
		id := "-"
		if v2 && s.name == "haproxy" {
			kit.Eventually(t, "the connection is listed", func() bool {
				var sessions []struct{ ID, Peer string }
				p.JSON("/sessions?proto=tcp", &sessions)
				for _, session := range sessions {
					if session.Peer == addrOf(c.LocalAddr()).String() {
						id = session.ID
					}
				}
				return id != "-"
			})
		}
		io.WriteString(c, "GET / HTTP/1.0\r\n\r\n")
		answer, err := io.ReadAll(c)
		if err != nil || !bytes.Contains(answer, []byte("200")) || !bytes.HasSuffix(bytes.TrimSpace(answer), []byte("hello")) {
			t.Fatalf("%s answers %q, %v", s.name, answer, err)
		}
		from, dest := addrOf(c.LocalAddr()), addrOf(c.RemoteAddr())
		want := fmt.Sprintf("%s %d %s %d %s -\n", from.Addr(), from.Port(), dest.Addr(), dest.Port(), id)
		logged := ""
		if !kit.Poll(kit.Long, func() bool {
			b, _ := os.ReadFile(s.log)
			logged = string(b)
			return strings.Contains(logged, want)
		}) {
			t.Errorf("%s has not logged %q: %s", s.name, want, logged)
		}
	}
	for i := range servers {
		s := &servers[i]
		t.Run(s.name, func(t *testing.T) {
			s.run(t, w.backend, "10.2.0.2")
			for _, version := range []string{"v1", "v2"} {
				for _, host := range []string{"10.1.0.1", "[fd00:1::1]"} {
					visit(t, s, fmt.Sprintf("%s:%d", host, ports[s.name+"-"+version]), version == "v2")
				}
			}
			if s.name == "nginx" {
				visit(t, s, "198.51.100.7:7777", true)
				visit(t, s, "[2001:db8:ace:1::7]:30005", true)
			}
		})
	}
}

// TestBalancer has HAProxy in front, which tells by either version who its
// clients are: a backend is told the same.
func TestBalancer(t *testing.T) {
	w := newWorld(t)
	w.backend.Do(t, func() { tellTCP(t, "10.2.0.2:9100") })
	accept := kit.M{"accept_proxy": kit.M{"from": kit.A{"10.1.0.2"}, "require": true}}
	p := kit.Start(t, kit.App(kit.M{"behind": kit.With(kit.ToPool("told", "tcp/10.1.0.1:7001"), accept)},
		kit.M{"told": toldPool("v2", "10.2.0.2:9100", nil)}), kit.Options{Netns: w.proxy})
	balancer := server{
		name: "haproxy", port: "9301", argv: servers[1].argv,
		config: `defaults
	mode tcp
	timeout connect 1m
	timeout client 1m
	timeout server 1m
listen v1
	bind 10.1.0.2:9301
	server s 10.1.0.1:7001 send-proxy
listen v2
	bind 10.1.0.2:9302
	server s 10.1.0.1:7001 send-proxy-v2
listen silent
	bind 10.1.0.2:9303
	server s 10.1.0.1:7001
`,
	}
	balancer.run(t, w.client, "10.1.0.2")
	for _, to := range []string{"10.1.0.2:9301", "10.1.0.2:9302"} {
		c := w.dial(t, "tcp", to, 0)
		s := hear(t, c, []byte("a"))
		if s.Err != "" || s.Client != addrOf(c.LocalAddr()) || s.Dest != addrOf(c.RemoteAddr()) || s.Text != "a" {
			t.Errorf("told %+v, want %s to %s", s, c.LocalAddr(), to)
		}
		var sessions []struct{ Peer, Local string }
		p.JSON("/sessions?proto=tcp", &sessions)
		if !slices.ContainsFunc(sessions, func(s struct{ Peer, Local string }) bool { return s.Peer == c.LocalAddr().String() && s.Local == to }) {
			t.Errorf("/sessions has %v, want %s at %s", sessions, c.LocalAddr(), to)
		}
	}
	c := w.dial(t, "tcp", "10.1.0.2:9303", 0)
	c.SetDeadline(time.Now().Add(kit.Long))
	io.WriteString(c, "a")
	if b, err := io.ReadAll(c); len(b) > 0 {
		t.Errorf("without a header the answer is %q, %v", b, err)
	}
	kit.Settles(t, "connections refused for want of a header", 1.0, func() float64 {
		return p.Metric("filter_blocked_total", "listener", "behind", "filter", "proxy_header")
	})
}
