package proxy

import (
	"context"
	"crypto/x509"
	"fmt"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddytls"
	"github.com/caddyserver/certmagic"
)

// Sites that say bind wayhouse/NAME and get their certificates by ACME. Their
// challenges arrive at the listeners of this app, and the HTTP server answers
// them. Two things stand in the way, for whoever solves a challenge first looks
// whether the port is open, and opens it when it is not:
//
//   - The Caddyfile has it look at the address that the site binds, and
//     wayhouse/NAME is none.
//   - The app http may start before this one, which would then find ports 80 and
//     443 taken.

// ServerListens implements listener.Config.
func (a *App) ServerListens() error { return a.issuers() }

// prepareIssuers has the ACME issuers of the config look at every address, and
// not before the listeners are bound.
func (a *App) prepareIssuers() error {
	mod, err := a.ctx.AppIfConfigured("tls")
	if err != nil {
		return nil // there are none, or it is for that app to say what is wrong
	}
	app, ok := mod.(*caddytls.TLS)
	if !ok || app.Automation == nil {
		return nil
	}
	for i, policy := range app.Automation.Policies {
		changed := false
		for j, iss := range policy.Issuers {
			of, ok := iss.(interface{ GetACMEIssuer() *caddytls.ACMEIssuer })
			if !ok {
				continue
			}
			acme := of.GetACMEIssuer()
			if c := acme.Challenges; c != nil && strings.HasPrefix(c.BindHost, "wayhouse/") {
				c.BindHost = ""
				if err := acme.Provision(a.ctx); err != nil {
					return fmt.Errorf("apps.tls.automation.policies[%d].issuers[%d]: %w", i, j, err)
				}
			}
			if iss == certmagic.Issuer(acme) { // no other module that has one inside
				policy.Issuers[j] = &lateIssuer{acme, a.bound}
			}
			changed = true
		}
		if changed {
			if err := policy.RebuildCertMagic(app); err != nil {
				return fmt.Errorf("apps.tls.automation.policies[%d]: %w", i, err)
			}
		}
	}
	return nil
}

// lateIssuer is an ACME issuer that waits until the listeners are bound.
type lateIssuer struct {
	*caddytls.ACMEIssuer
	bound <-chan struct{}
}

// Issue implements certmagic.Issuer.
func (i *lateIssuer) Issue(ctx context.Context, csr *x509.CertificateRequest) (*certmagic.IssuedCertificate, error) {
	select {
	case <-i.bound:
		return i.ACMEIssuer.Issue(ctx, csr)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Interface guards
var (
	_ certmagic.Issuer            = (*lateIssuer)(nil)
	_ certmagic.PreChecker        = (*lateIssuer)(nil)
	_ certmagic.Revoker           = (*lateIssuer)(nil)
	_ certmagic.RenewalInfoGetter = (*lateIssuer)(nil)
	_ caddytls.ConfigSetter       = (*lateIssuer)(nil)
)
