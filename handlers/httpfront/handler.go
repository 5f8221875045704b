// Package httpfront is the layer-4 handler that gives connections and UDP sessions
// to a server of this process, as a rule a site of Caddy's HTTP server.
package httpfront

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/mholt/caddy-l4/layer4"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/strictjson"
	"github.com/wayhouse-proxy/wayhouse/modules/listener"
	"github.com/wayhouse-proxy/wayhouse/modules/proxy"
)

func init() { caddy.RegisterModule(new(Handler)) }

// Handler gives connections and UDP sessions to the server that listens on the
// network wayhouse/NAME, in this process: a site that says bind wayhouse/NAME. It
// sees the client's address and every byte from the first.
type Handler struct {
	// The name that the server listens on, as in wayhouse/NAME, or NAME:PORT with
	// the port of the site: web:80 for what Caddy serves on port 80, where plain
	// HTTP comes in by another port. Without one it is the port that the client has
	// hit, and where the server does not have that, the only one there is, or 443.
	// Letters, digits, - _ and . are allowed in the name, and a server of the apps
	// http or layer4 has to listen on it.
	Name string `json:"name,omitempty"`

	name     string
	port     uint16
	withdraw func()
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "layer4.handlers.http_front",
		New: func() caddy.Module { return new(Handler) },
	}
}

// UnmarshalJSON decodes the handler with errors that name the key.
func (h *Handler) UnmarshalJSON(b []byte) error {
	type plain Handler
	return strictjson.Unmarshal(b, (*plain)(h))
}

// Provision makes the name known to servers.
func (h *Handler) Provision(ctx caddy.Context) error {
	if h.Name == "" {
		return errors.New("name: missing; give the NAME of the server that says bind wayhouse/NAME")
	}
	h.name = h.Name
	if name, port, ok := strings.Cut(h.Name, ":"); ok {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return fmt.Errorf("name: %q: %q is not a port from 1 to 65535", h.Name, port)
		}
		h.name, h.port = name, uint16(n)
	}
	if err := listener.CheckName(h.name); err != nil {
		return fmt.Errorf("name: %w", err)
	}
	app, err := proxy.From(ctx)
	if err != nil {
		return err
	}
	app.AddFront(h.name)
	h.withdraw = listener.DeclareFront(ctx, h.name, app)
	return nil
}

// Cleanup takes the name back.
func (h *Handler) Cleanup() error {
	if h.withdraw != nil {
		h.withdraw()
	}
	return nil
}

// Front implements listener.Front.
func (h *Handler) Front() (string, uint16) { return h.name, h.port }

// Handle gives a flow that other handlers have had to the server, and waits for
// its end.
func (h *Handler) Handle(cx *layer4.Connection, _ layer4.Handler) error {
	return listener.Pass(cx, h.name, h.port)
}

// Explain implements listener.Explainer.
func (h *Handler) Explain(*listener.Question, string) listener.Account {
	return listener.Account{Server: "wayhouse/" + h.Name}
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	http_front <name>[:<port>]
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume handler name
	if !d.NextArg() {
		return d.Errf("http_front: the name is missing, as in http_front web for the site that says bind wayhouse/web")
	}
	h.Name = d.Val()
	return caddyopt.None(d)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Handler)(nil)
	_ caddy.CleanerUpper    = (*Handler)(nil)
	_ caddyfile.Unmarshaler = (*Handler)(nil)
	_ layer4.NextHandler    = (*Handler)(nil)
	_ listener.Front        = (*Handler)(nil)
	_ listener.Explainer    = (*Handler)(nil)
)
