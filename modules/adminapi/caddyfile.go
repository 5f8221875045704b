package adminapi

import (
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
)

func init() {
	httpcaddyfile.RegisterHandlerDirective("wayhouse_admin", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		m := new(Handler)
		return m, m.UnmarshalCaddyfile(h.Dispenser)
	})
	httpcaddyfile.RegisterDirectiveOrder("wayhouse_admin", httpcaddyfile.After, "metrics")
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	wayhouse_admin [<matcher>] {
//		token <value> [read|operate|admin [<name>]]
//		insecure_no_auth
//	}
func (h *Handler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()         // consume directive name
	if d.NextArg() { // which no error shows: it may be a token
		return d.Err("wayhouse_admin: takes no arguments; tokens stand in its block")
	}
	return caddyopt.Block(d, caddyopt.Options{
		"token": caddyopt.Many(caddyopt.Func(func(d *caddyfile.Dispenser) error {
			t := new(Token)
			h.Tokens = append(h.Tokens, t)
			if !d.Args(&t.Token) {
				return d.Err("token: a value is missing")
			}
			d.Args(&t.Role, &t.Name)
			if d.NextArg() {
				return d.Err("token: more than a token, its role and a name; quote what has blanks")
			}
			return nil
		})),
		"insecure_no_auth": caddyopt.Word(&h.InsecureNoAuth),
	})
}

var _ caddyfile.Unmarshaler = (*Handler)(nil)
