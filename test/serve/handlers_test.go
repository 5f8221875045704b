package serve

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

// TestNetwork has an http server and layer4 servers listen on listeners of ours.
func TestNetwork(t *testing.T) {
	b := newBackends(t)
	web, l4 := kit.Local(kit.Port(t)), kit.Local(kit.Port(t))
	config := func(text string) kit.M {
		return kit.Apps(kit.M{
			"wayhouse": kit.M{"shutdown_grace": "1s", "listeners": kit.M{
				"web": kit.Listener([]string{"tcp/" + web}), "l4": kit.Listener([]string{"tcp/" + l4}), "l4u": kit.Listener([]string{"udp/" + l4}),
			}, "pools": b.pools()},
			"http": kit.M{"servers": kit.M{"s": kit.M{"listen": kit.A{"wayhouse/web:80"}, "protocols": kit.A{"h1"}, "routes": kit.A{
				kit.M{"handle": kit.A{kit.M{"handler": "static_response", "body": text + " {http.request.remote.host}"}}}}}}},
			"layer4": kit.M{"servers": kit.M{
				"tcp": kit.M{"listen": kit.A{"wayhouse/l4:1"}, "routes": kit.A{kit.Route(kit.M{"handler": "pool", "pool": "tcp"})}},
				"udp": kit.M{"listen": kit.A{"wayhouse/l4u:1"}, "routes": kit.A{kit.Route(kit.M{"handler": "pool", "pool": "udp"})}},
			}},
		})
	}
	p := kit.Start(t, config("hello"), kit.Options{})
	get := func() string {
		res, err := (&http.Client{Timeout: kit.Long, Transport: &http.Transport{DisableKeepAlives: true}}).Get("http://" + web)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(body)
	}
	if got := get(); got != "hello 127.0.0.1" {
		t.Errorf("the site says %q", got)
	}
	load := kit.StartLoad(t, kit.LoadOptions{TCP: l4, Conns: 20, Rate: 200})
	load.Round(t)
	for i := range 5 {
		want := fmt.Sprintf("hello %d", i)
		p.MustLoad(config(want))
		if got := get(); got != want+" 127.0.0.1" {
			t.Errorf("after the reload the site says %q", got)
		}
	}
	load.Round(t)
	perfect(t, load)
	udp := kit.StartLoad(t, kit.LoadOptions{UDP: l4, Flows: 20, Rate: 200})
	udp.Round(t)
	perfect(t, udp)
}

// TestOurHandlerInTheirServer has a layer4 server of caddy-l4 hand flows to a
// pool.
func TestOurHandlerInTheirServer(t *testing.T) {
	b := newBackends(t)
	addr := kit.Local(kit.Port(t))
	kit.Start(t, kit.Apps(kit.M{
		"wayhouse": kit.M{"pools": b.pools()},
		"layer4": kit.M{"servers": kit.M{
			"tcp": kit.M{"listen": kit.A{addr}, "routes": kit.A{kit.Match(kit.M{"regexp": kit.M{"pattern": "^WH", "count": 2}}, kit.M{"handler": "pool", "pool": "tcp"})}},
			"udp": kit.M{"listen": kit.A{"udp/" + addr}, "routes": kit.A{kit.Route(kit.M{"handler": "pool", "pool": "udp"})}},
		}},
	}), kit.Options{})
	load := kit.StartLoad(t, kit.LoadOptions{TCP: addr, UDP: addr, Conns: 20, Flows: 20, Rate: 400})
	load.Round(t)
	perfect(t, load)
}

// TestTheirHandlers has caddy-l4's handlers in routes of ours, alone and in
// front of a pool.
func TestTheirHandlers(t *testing.T) {
	b := newBackends(t)
	toTCP, toUDP := kit.M{"handler": "pool", "pool": "tcp"}, kit.M{"handler": "pool", "pool": "udp"}
	throttle := kit.M{"handler": "throttle", "read_bytes_per_second": 1 << 30, "read_burst_size": 1 << 20}
	ports := map[string]string{}
	listeners := kit.M{}
	listen := func(name, network string, routes ...kit.M) {
		ports[name] = kit.Local(kit.Port(t))
		listeners[name] = kit.Listener([]string{network + "/" + ports[name]}, routes...)
	}
	listen("echo", "tcp", kit.Route(kit.M{"handler": "echo"}))
	listen("echo-udp", "udp", kit.Route(kit.M{"handler": "echo"}))
	listen("throttle", "tcp", kit.Route(throttle, toTCP))
	listen("throttle-udp", "udp", kit.Route(throttle, toUDP))
	listen("subroute", "tcp", kit.Route(kit.M{"handler": "subroute", "routes": kit.A{
		kit.Match(kit.M{"regexp": kit.M{"pattern": "^WH", "count": 2}}, toTCP)}}))
	listen("matched", "tcp",
		kit.Match(kit.M{"regexp": kit.M{"pattern": "^SSH", "count": 3}}, kit.M{"handler": "echo"}),
		kit.Match(kit.M{"remote_ip": kit.M{"ranges": kit.A{"127.0.0.0/8"}}}, toTCP))
	listen("through", "tcp",
		kit.Match(kit.M{"regexp": kit.M{"pattern": "^WH", "count": 2}}, throttle), // lets it through to the next
		kit.Match(kit.M{"regexp": kit.M{"pattern": "^WH", "count": 2}}, toTCP))
	listen("header", "tcp", kit.Route(kit.M{"handler": "proxy_protocol", "allow": kit.A{"127.0.0.0/8"}}, toTCP))
	listen("tls", "tcp", kit.Match(kit.M{"tls": kit.M{}}, kit.M{"handler": "tls"}, toTCP))
	c := kit.App(listeners, b.pools())
	c["apps"].(kit.M)["tls"] = kit.M{
		"certificates": kit.M{"automate": kit.A{"game.test"}},
		"automation":   kit.M{"policies": kit.A{kit.M{"issuers": kit.A{kit.M{"module": "internal"}}}}},
	}
	c["apps"].(kit.M)["pki"] = kit.M{"certificate_authorities": kit.M{"local": kit.M{"install_trust": false}}}
	p := kit.Start(t, c, kit.Options{})

	for name, addr := range ports {
		network := "tcp"
		if strings.HasSuffix(name, "-udp") {
			network = "udp"
		}
		switch name {
		case "echo", "echo-udp":
			c, err := net.Dial(network, addr)
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(kit.Long))
			fmt.Fprint(c, "hello")
			got := make([]byte, 5)
			if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
				t.Errorf("%s: %q, %v", name, got, err)
			}
			c.Close()
		case "header", "tls":
		default:
			o := kit.LoadOptions{Conns: 10, TCP: addr, Rate: 200, Body: 20}
			if network == "udp" {
				o = kit.LoadOptions{Flows: 10, UDP: addr, Rate: 200, Body: 20}
			}
			load := kit.StartLoad(t, o)
			load.Round(t)
			if r := load.Stop(); !r.Perfect() {
				t.Errorf("%s: the load noticed: %v", name, &r)
			}
		}
	}

	ask := func(name string, c net.Conn) {
		t.Helper()
		defer c.Close()
		c.SetDeadline(time.Now().Add(kit.Long))
		q := kit.Frame{Flow: 1 << 29, Seq: 1, Body: []byte("question")}
		if _, err := c.Write(q.Append(nil)); err != nil {
			t.Errorf("%s: %v", name, err)
			return
		}
		if a, _, err := kit.ReadFrame(bufio.NewReader(c), nil); err != nil || string(a.Body) != "question" {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
	h, err := net.Dial("tcp", ports["header"])
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(h, "PROXY TCP4 203.0.113.9 192.0.2.1 5000 7777\r\n")
	ask("header", h)
	var s *tls.Conn
	kit.Eventually(t, "the certificate is there", func() bool { // it is made after the start
		s, err = tls.Dial("tcp", ports["tls"], &tls.Config{ServerName: "game.test", InsecureSkipVerify: true}) // the CA is the process's own
		return err == nil
	})
	ask("tls", s)
	plain, err := net.Dial("tcp", ports["tls"])
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	plain.SetDeadline(time.Now().Add(kit.Long))
	fmt.Fprint(plain, "this is no ClientHello at all")
	if n, err := plain.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("a client without TLS got %d bytes, %v", n, err)
	}
	kit.Settles(t, "active_connections", 0.0, func() float64 { return p.Metric("active_connections") })
}
