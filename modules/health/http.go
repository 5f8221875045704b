package health

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"golang.org/x/net/http/httpguts"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
)

func init() { caddy.RegisterModule(new(HTTP)) }

// HTTP finds a backend healthy that answers a GET request with a given status,
// on its own port or on another of the same address. It speaks plain HTTP/1.1
// and follows no redirect.
type HTTP struct {
	Settings

	// The path to request, which begins with /, with the query if there is one.
	// Default: /.
	Path string `json:"path,omitempty"`

	// The port to ask, from 1 to 65535. Default: the backend's.
	Port int `json:"port,omitempty"`

	// The status of a healthy backend, from 200 to 599. Default: 200.
	Status *int `json:"status,omitempty"`

	// The Host header. Default: the address that is asked.
	Host string `json:"host,omitempty"`

	path   *url.URL
	client *http.Client
}

// CaddyModule returns the Caddy module information.
func (*HTTP) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.health_checks.http",
		New: func() caddy.Module { return new(HTTP) },
	}
}

// maxBody bounds what is read of an answer's header and of its body.
const maxBody = 64 << 10

// Provision sets the defaults and reads the path.
func (c *HTTP) Provision(ctx caddy.Context) (err error) {
	if c.Path == "" {
		c.Path = "/"
	}
	if c.path, err = url.ParseRequestURI(c.Path); err != nil || !strings.HasPrefix(c.Path, "/") {
		return fmt.Errorf("path: %q is not a path that starts with /", c.Path)
	}
	or(&c.Status, http.StatusOK)
	c.client = &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				to, err := netip.ParseAddrPort(addr)
				if err != nil {
					return nil, err
				}
				return c.dial(ctx, network, to)
			},
			DisableKeepAlives:      true,
			DisableCompression:     true,
			MaxResponseHeaderBytes: maxBody,
		},
	}
	return c.Settings.Provision(ctx)
}

// Validate checks what Provision has left.
func (c *HTTP) Validate() error {
	if c.Port < 0 || c.Port > 65535 {
		return fmt.Errorf("port: %d is not between 1 and 65535", c.Port)
	}
	if *c.Status < 200 || *c.Status > 599 {
		return fmt.Errorf("status: %d is not between 200 and 599", *c.Status)
	}
	if !httpguts.ValidHostHeader(c.Host) {
		return fmt.Errorf("host: %q cannot stand in a Host header", c.Host)
	}
	return c.Settings.Validate()
}

// Check sends the request and compares the status.
func (c *HTTP) Check(ctx context.Context, to netip.AddrPort) error {
	if c.Port != 0 {
		to = netip.AddrPortFrom(to.Addr(), uint16(c.Port))
	}
	u := *c.path
	u.Scheme, u.Host = "http", to.String()
	req := (&http.Request{
		Method: http.MethodGet, URL: &u, Host: c.Host,
		Header: http.Header{"User-Agent": {"wayhouse-health-check"}},
	}).WithContext(ctx)
	resp, err := c.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != *c.Status {
		return fmt.Errorf("status %d, not %d", resp.StatusCode, *c.Status)
	}
	// Read what is there, so that the backend does not see a reset; that the
	// body ends is not asked for.
	_, _ = io.CopyN(io.Discard, resp.Body, maxBody)
	return nil
}

// Cleanup gives back what the client holds.
func (c *HTTP) Cleanup() error {
	if c.client != nil {
		c.client.CloseIdleConnections()
	}
	return nil
}

// UnmarshalCaddyfile sets up the check from Caddyfile tokens. Syntax, beside
// the options of tcp_connect:
//
//	http {
//		path   <path>
//		port   <number>
//		status <number>
//		host   <name>
//	}
func (c *HTTP) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	return block(d, &c.Settings, caddyopt.Options{
		"path":   caddyopt.String(&c.Path),
		"port":   caddyopt.Int(&c.Port),
		"status": caddyopt.Ptr(&c.Status, caddyopt.Int),
		"host":   caddyopt.String(&c.Host),
	})
}

// Interface guards
var (
	_ Check                 = (*HTTP)(nil)
	_ caddy.Provisioner     = (*HTTP)(nil)
	_ caddy.Validator       = (*HTTP)(nil)
	_ caddy.CleanerUpper    = (*HTTP)(nil)
	_ caddyfile.Unmarshaler = (*HTTP)(nil)
)
