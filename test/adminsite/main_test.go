// Package adminsite tests the admin API's two doors on a real process: Caddy's
// admin endpoint, and the handler wayhouse_admin on a site. Who may do what, at
// every path and with every method; what browsers are led to do; what abuse
// costs; and where secrets do not turn up.
package adminsite

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	kit "github.com/wayhouse-proxy/wayhouse/internal/testkit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// The tokens of the sites of these tests, by their roles.
var tokens = map[string]string{
	"read":    "read-token-0123456789",
	"operate": "operate-token-0123456",
	"admin":   "admin-token-012345678",
}

// handler is the handler of a site with these tokens.
func handler() kit.M {
	list := kit.A{}
	for _, role := range []string{"read", "operate", "admin"} {
		list = append(list, kit.M{"token": tokens[role], "role": role, "name": "the-" + role})
	}
	return kit.M{"handler": "wayhouse_admin", "tokens": list}
}

// site is the http app with one server.
func site(listen string, handlers ...kit.M) kit.M {
	return kit.M{"servers": kit.M{"site": kit.M{
		"listen": kit.A{listen}, "automatic_https": kit.M{"disable": true}, "protocols": kit.A{"h1"}, "routes": kit.A{kit.M{"handle": handlers}},
	}}}
}

// both is a config of the wayhouse app with a site beside it, of which it
// returns the address.
func both(t *testing.T, app kit.M, handlers ...kit.M) (config kit.M, addr string) {
	t.Helper()
	addr = kit.Local(kit.Port(t))
	apps := app["apps"].(kit.M)
	apps["http"] = site(addr, handlers...)
	return app, addr
}

// client speaks HTTP/1.1 as it is told to: no path is cleaned and no header is
// added but Host.
type client struct {
	t       testing.TB
	network string
	addr    string
	from    string // "": any
	host    string

	c  net.Conn
	br *bufio.Reader
}

func newClient(t testing.TB, network, addr string) *client {
	c := &client{t: t, network: network, addr: addr, host: "localhost"}
	t.Cleanup(c.close)
	return c
}

func (c *client) close() {
	if c.c != nil {
		c.c.Close()
		c.c = nil
	}
}

func (c *client) dial() error {
	d := net.Dialer{Timeout: kit.Long}
	if c.from != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(c.from)}
	}
	conn, err := d.Dial(c.network, c.addr)
	if err != nil {
		return err
	}
	c.c, c.br = conn, bufio.NewReader(conn)
	return nil
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   string
}

// do sends a request without a body. It begins anew where the server has closed
// the connection, as it does on a reload.
func (c *client) do(method, target string, headers ...string) answer {
	c.t.Helper()
	return c.send(method, target, "", headers...)
}

func (c *client) send(method, target, body string, headers ...string) answer {
	c.t.Helper()
	var b strings.Builder
	b.WriteString(method + " " + target + " HTTP/1.1\r\nHost: " + c.host + "\r\n")
	for i := 0; i < len(headers); i += 2 {
		b.WriteString(headers[i] + ": " + headers[i+1] + "\r\n")
	}
	if body != "" {
		b.WriteString("Content-Length: " + strconv.Itoa(len(body)) + "\r\n")
	}
	b.WriteString("\r\n" + body)
	var err error
	for range 10 {
		if c.c == nil {
			if err = c.dial(); err != nil {
				break
			}
		}
		var a answer
		if a, err = c.once(method, b.String()); err == nil {
			return a
		}
		c.close()
		if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			break
		}
	}
	c.t.Fatalf("%s %s: %v", method, target, err)
	return answer{}
}

func (c *client) once(method, text string) (answer, error) {
	c.c.SetDeadline(time.Now().Add(kit.Long))
	if _, err := io.WriteString(c.c, text); err != nil {
		return answer{}, err
	}
	res, err := http.ReadResponse(c.br, &http.Request{Method: method})
	if err != nil {
		return answer{}, err
	}
	body, err := io.ReadAll(res.Body)
	res.Body.Close()
	if res.Close {
		c.close()
	}
	return answer{res.StatusCode, res.Header, string(body)}, err
}

// bearer is the header with the token of a role.
func bearer(role string) []string { return []string{"Authorization", "Bearer " + tokens[role]} }

// socket is the admin socket of a process.
func socket(p *kit.Process) string { return strings.TrimPrefix(p.Admin, "unix/") }
