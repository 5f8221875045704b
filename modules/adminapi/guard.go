package adminapi

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
	"github.com/wayhouse-proxy/wayhouse/internal/metrics"
)

var (
	refused = metrics.Counter("admin_refused_total",
		"Requests to the admin API on a site that were refused: no_token, wrong_token, limited, role, host or cross_site.", "reason")
	tokenReads = metrics.Counter("admin_token_refresh_total", "Times that a file with a token was read again: ok or error.", "result")
)

// guard decides who gets in.
type guard struct {
	logger   *zap.Logger
	loopback bool // reached by TCP and from this host alone

	mu      sync.Mutex // guards what is below
	secrets []*secret
	next    time.Time // when files are read again
}

// add takes a token, unless another is the same, and then tells which.
func (g *guard) add(s *secret) (twin int) {
	g.next = time.Now().Add(rereadEvery)
	if twin = g.twin(s, s.digest); twin < 0 {
		g.secrets = append(g.secrets, s)
	}
	return twin
}

func (g *guard) twin(s *secret, d digest) int {
	return slices.IndexFunc(g.secrets, func(other *secret) bool { return other != s && other.digest == d })
}

// admit tells who asks and what they may do, or says no.
func (g *guard) admit(w http.ResponseWriter, r *http.Request) (caller, role, error) {
	if len(g.secrets) == 0 {
		return caller{name: "anonymous"}, admin, g.checkBrowser(r)
	}
	token, given := bearer(r.Header)
	if !given {
		refused.WithLabelValues("no_token").Inc()
		w.Header().Set("WWW-Authenticate", `Bearer realm="wayhouse"`)
		return caller{}, nobody, &problem{http.StatusUnauthorized, "a token is needed, as in Authorization: Bearer TOKEN"}
	}
	from := source(r)
	found, limited := guesses.judge(from, func() *secret { return g.find(token) })
	switch {
	case limited:
		refused.WithLabelValues("limited").Inc()
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
		return caller{}, nobody, &problem{http.StatusTooManyRequests, "too many wrong tokens from this address; no token is looked at for now"}
	case found == nil:
		refused.WithLabelValues("wrong_token").Inc()
		g.logger.Warn("wrong token", zap.Stringer("remote", from), zap.String("method", r.Method))
		w.Header().Set("WWW-Authenticate", `Bearer realm="wayhouse", error="invalid_token"`)
		return caller{}, nobody, &problem{http.StatusUnauthorized, "the token is not one that is known here"}
	}
	return caller{found.name, true}, found.role, nil
}

// bearer is the token of a request. Two of them are none that is known.
func bearer(h http.Header) (token string, given bool) {
	for i, v := range h["Authorization"] {
		scheme, rest, _ := strings.Cut(v, " ")
		if i > 0 {
			return "", true
		}
		token = strings.Trim(rest, " ")
		given = strings.EqualFold(scheme, "Bearer") && token != ""
	}
	return token, given
}

// find is the secret that a token is. It takes as long for every token.
func (g *guard) find(token string) *secret {
	d := digest(sha256.Sum256([]byte(token)))
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rereadLocked()
	var found *secret
	for _, s := range g.secrets {
		if subtle.ConstantTimeCompare(s.digest[:], d[:]) == 1 {
			found = s
		}
	}
	return found
}

// rereadEvery is how old what was read from a file may be.
const rereadEvery = time.Minute

// rereadLocked looks whether the tokens in files have changed.
func (g *guard) rereadLocked() {
	if time.Now().Before(g.next) {
		return
	}
	g.next = time.Now().Add(rereadEvery)
	for _, s := range g.secrets {
		if s.file == "" {
			continue
		}
		d, err := readToken(s.file)
		twin := g.twin(s, d)
		switch {
		case err != nil:
			tokenReads.WithLabelValues("error").Inc()
			g.logger.Warn("the token in a file cannot be read again; the last one stays in force", zap.String("token", s.name), zap.Error(err))
			continue
		case twin >= 0:
			tokenReads.WithLabelValues("error").Inc()
			g.logger.Warn("the token in a file has become the same as another; the last one stays in force", zap.String("token", s.name), zap.String("other", g.secrets[twin].name))
			continue
		case d != s.digest:
			s.digest = d
			g.logger.Info("token changed", zap.String("token", s.name))
		}
		tokenReads.WithLabelValues("ok").Inc()
	}
}

// source is the address that a request is held against: the client's, as
// Caddy knows it from the load balancers that the server trusts.
func source(r *http.Request) netip.Prefix {
	s, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
	if s == "" {
		s, _, _ = net.SplitHostPort(r.RemoteAddr)
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		return netip.Prefix{} // of a unix socket
	}
	a = a.Unmap().WithZone("")
	bits := 64
	if a.Is4() {
		bits = 32
	}
	p, _ := a.Prefix(bits)
	return p
}

// checkBrowser refuses what a browser asks on behalf of a foreign page: where
// no token is needed, whoever runs a browser on this host has opened the API to
// every page in it.
func (g *guard) checkBrowser(r *http.Request) error {
	if g.loopback && !ownName(r.Host) {
		refused.WithLabelValues("host").Inc()
		return &problem{http.StatusForbidden, "the Host is not localhost or a loopback address"}
	}
	if crossSite(r) {
		refused.WithLabelValues("cross_site").Inc()
		return &problem{http.StatusForbidden, "requests of other sites are not answered"}
	}
	return nil
}

// crossSite reports whether a browser says that a page of another site asks.
func crossSite(r *http.Request) bool {
	switch v := r.Header["Sec-Fetch-Site"]; {
	case len(v) == 1 && (v[0] == "same-origin" || v[0] == "none"):
		return false
	case len(v) > 0:
		return true
	}
	for _, v := range r.Header["Origin"] {
		u, err := url.Parse(v)
		if err != nil || u.Host == "" || !strings.EqualFold(u.Host, r.Host) {
			return true
		}
	}
	return false
}

// ownName reports whether a Host is one that always means this host.
func ownName(s string) bool {
	host, _, err := net.SplitHostPort(s)
	if err != nil {
		host = strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	}
	return hostport.Loopback(host) || strings.HasSuffix(strings.ToLower(host), ".localhost")
}
