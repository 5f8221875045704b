package pool

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

// TestFollow holds that a source's UDP session goes where its TCP connection
// does, that it may be late by the window, and that another source is balanced.
func TestFollow(t *testing.T) {
	// Two hosts, with the game on TCP and voice on UDP one port above.
	hosts := []string{"127.0.0.71", "127.0.0.72"}
	tcp, udp := pairs(t, hosts)
	app := fmt.Sprintf(`{"shutdown_grace": "1s", "pools": {
		"game": {"targets": [%s], "health": {"check": "none"}, "balancer": {"policy": "round_robin"}},
		"voice": {"targets": [%s], "health": {"check": "none"}, "balancer": {"policy": "first_available"}}},
		"listeners": {
			"game": {"bind": ["tcp/127.0.0.1:0"], "routes": [{"handle": [{"handler": "pool", "pool": "game"}]}]},
			"voice": {"bind": ["udp/127.0.0.1:0"], "routes": [{"handle": [{"handler": "pool", "pool": "voice", "follow": {"listener": "game", "offset": 1}}]}]}}}`,
		quoted(tcp), quoted(udp))
	if err := caddy.Load([]byte(`{"admin": {"disabled": true, "config": {"persist": false}}, "apps": {"wayhouse": `+app+`}}`), true); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { caddy.Stop() })
	for i := range 6 {
		source := fmt.Sprintf("127.0.1.%d", i+1)
		game := dialFrom(t, "tcp", source, bound(t, "game"))
		host := readLine(t, game)
		voice := dialFrom(t, "udp", source, bound(t, "voice"))
		if _, err := voice.Write([]byte("hi")); err != nil {
			t.Fatal(err)
		}
		if got := readLine(t, voice); got != host {
			t.Errorf("%s plays at %s and talks at %s", source, host, got)
		}
		game.Close()
		late := dialFrom(t, "udp", source, bound(t, "voice"))
		late.Write([]byte("hi"))
		if got := readLine(t, late); got != host {
			t.Errorf("%s has just played at %s and talks at %s", source, host, got)
		}
	}
	stranger := dialFrom(t, "udp", "127.0.1.99", bound(t, "voice"))
	stranger.Write([]byte("hi"))
	if got := readLine(t, stranger); got != hosts[0] {
		t.Errorf("a source without a connection is at %s, want the balancer's %s", got, hosts[0])
	}
}

func TestFollowMistakes(t *testing.T) {
	for name, tc := range map[string]struct{ follow, err string }{
		"no listener":      {`{}`, "follow.listener: missing"},
		"unknown listener": {`{"listener": "gmae"}`, `no listener is named "gmae"; there are game, voice`},
		"not TCP":          {`{"listener": "voice"}`, `"voice" has no TCP address`},
		"both mappings":    {`{"listener": "game", "offset": 1, "ports": {"1": 2}}`, "give one of the two"},
		"window too long":  {`{"listener": "game", "window": "2h"}`, "not between 0 and 1h"},
		"port":             {`{"listener": "game", "ports": {"http": 2}}`, "not a port and a port"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := fmt.Sprintf(`{"admin": {"disabled": true}, "apps": {"wayhouse": {
				"pools": {"p": {"targets": ["127.0.0.1:9"], "health": {"check": "none"}}},
				"listeners": {
					"game": {"bind": ["tcp/127.0.0.1:0"], "routes": [{"handle": [{"handler": "pool", "pool": "p"}]}]},
					"voice": {"bind": ["udp/127.0.0.1:0"], "routes": [{"handle": [{"handler": "pool", "pool": "p", "follow": %s}]}]}}}}}`, tc.follow)
			err := validate([]byte(cfg))
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("validating: %v, want an error with %q", err, tc.err)
			}
		})
	}
}

// pairs serves TCP on a port and UDP on the next at each host; both tell their
// host's address.
func pairs(t *testing.T, hosts []string) (tcp, udp []string) {
	for _, host := range hosts {
		for {
			ln, err := net.Listen("tcp", host+":0")
			if err != nil {
				t.Fatal(err)
			}
			port := ln.Addr().(*net.TCPAddr).Port
			pc, err := net.ListenPacket("udp", fmt.Sprintf("%s:%d", host, port+1))
			if err != nil { // taken by somebody
				ln.Close()
				continue
			}
			t.Cleanup(func() { ln.Close(); pc.Close() })
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					fmt.Fprintln(c, host)
					t.Cleanup(func() { c.Close() })
				}
			}()
			go func() {
				buf := make([]byte, 64)
				for {
					_, from, err := pc.ReadFrom(buf)
					if err != nil {
						return
					}
					pc.WriteTo([]byte(host+"\n"), from)
				}
			}()
			tcp = append(tcp, ln.Addr().String())
			udp = append(udp, pc.LocalAddr().String())
			break
		}
	}
	return tcp, udp
}

func validate(b []byte) error {
	var c caddy.Config
	if err := json.Unmarshal(b, &c); err != nil {
		return err
	}
	return caddy.Validate(&c)
}

func quoted(list []string) string { return `"` + strings.Join(list, `", "`) + `"` }

func bound(t *testing.T, name string) string {
	b := proxy.Running().Listening(name)
	if len(b) == 0 {
		t.Fatalf("listener %s has no address", name)
	}
	return b[0].Addr.String()
}

func dialFrom(t *testing.T, network, source, to string) net.Conn {
	t.Helper()
	d := net.Dialer{Timeout: 10 * time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
	if network == "udp" {
		d.LocalAddr = &net.UDPAddr{IP: net.ParseIP(source)}
	}
	c, err := d.Dial(network, to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(10 * time.Second))
	return c
}

func readLine(t *testing.T, c net.Conn) string {
	t.Helper()
	s, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatalf("reading a line: %v", err)
	}
	return strings.TrimSpace(s)
}
