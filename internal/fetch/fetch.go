// Package fetch asks the services that know of backends: GET requests for JSON,
// over HTTP/1.1 connections that are kept. What it is answered is bounded, a
// redirect is not followed, and secrets go to https:// or to this host only.
package fetch

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
	"unicode"
)

// renewAfter is how old an Access may become: files that hold tokens and
// certificates are replaced while the process runs.
const renewAfter = time.Minute

const (
	connectTimeout = 10 * time.Second // with the TLS handshake
	maxHeader      = 64 << 10
	maxErrorBody   = 4 << 10
	maxMessage     = 300 // bytes of an error's message that are shown
)

// Options are what requests of a Client have in common.
type Options struct {
	// The header field that carries the token, and what stands before it there.
	Header, Prefix string

	// How long a service may take to begin its answer; 0 leaves that to the
	// context of each request.
	HeaderTimeout time.Duration

	// How to connect; nil for Dial.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Client asks one service. It may be used by several goroutines.
type Client struct {
	options   Options
	load      func() (Access, error)
	now       func() time.Time
	transport http.Transport
	http      http.Client

	mu     sync.Mutex
	access Access
	tls    *tls.Config
	sum    [sha256.Size]byte // of what connections depend on
	loaded time.Time
}

// New makes a client for the service that load tells of. load is called again
// when its answer is a minute old, and when the service refuses the token; when
// it fails then, what it said before stays.
func New(o Options, load func() (Access, error)) (*Client, error) {
	if o.Dial == nil {
		o.Dial = Dial
	}
	c := &Client{options: o, load: load, now: time.Now}
	c.transport = http.Transport{
		DialContext:            o.Dial,
		DialTLSContext:         c.dialTLS,
		DisableCompression:     true,
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: maxHeader,
		ResponseHeaderTimeout:  o.HeaderTimeout,
	}
	c.http = http.Client{
		Transport:     &c.transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c, c.loadLocked()
}

// Close gives up the connections that nobody uses.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

// StatusError is an answer with another status than 200.
type StatusError struct {
	Code    int
	Message string // what the service says about it; "" for nothing
	Renew   error  // why there is no newer token
}

func (e *StatusError) Error() string {
	s := fmt.Sprintf("status %d", e.Code)
	switch {
	case e.Code >= 300 && e.Code < 400:
		s += ": redirects are not followed"
	case e.Message != "":
		s += ": " + e.Message
	}
	if e.Renew != nil {
		s += fmt.Sprintf(" (what is sent is old: %v)", e.Renew)
	}
	return s
}

// Get asks for a path below the service's URL; what is not plain in it is
// escaped. The caller closes the body of the answer, which has status 200. A
// token that is refused is read again at once, and a new one tried.
func (c *Client) Get(ctx context.Context, path string, query url.Values) (*http.Response, error) {
	access := c.current()
	resp, err := c.get(ctx, &access, path, query)
	var status *StatusError
	if !errors.As(err, &status) || status.Code != http.StatusUnauthorized && status.Code != http.StatusForbidden {
		return resp, err
	}
	newer, renew := c.renew()
	if newer.Token != access.Token {
		return c.get(ctx, &newer, path, query)
	}
	status.Renew = renew
	return nil, status
}

func (c *Client) get(ctx context.Context, a *Access, path string, query url.Values) (*http.Response, error) {
	base := *a.URL
	if base.Path == "" {
		base.Path = "/" // for JoinPath
	}
	u := base.JoinPath(path)
	u.RawQuery = query.Encode()
	req := (&http.Request{Method: http.MethodGet, URL: u, Header: http.Header{
		"Accept": {"application/json"}, "User-Agent": {"wayhouse"},
	}}).WithContext(ctx)
	if a.Token != "" {
		req.Header.Set(c.options.Header, c.options.Prefix+a.Token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var in *url.Error
		if errors.As(err, &in) { // without the URL, which the caller knows
			err = in.Err
		}
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody)) // what there is of it
	return nil, &StatusError{Code: resp.StatusCode, Message: redact(message(body), a.Token)}
}

// message is what an error's body says: Kubernetes sends an object, Consul a
// line of text.
func message(body []byte) string {
	var object struct{ Message string }
	if json.Unmarshal(body, &object) == nil {
		return object.Message
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(body)), "\n")
	if strings.HasPrefix(line, "<") || strings.HasPrefix(line, "{") {
		return ""
	}
	return line
}

// Redact makes what a service says fit for a log: no token, nothing that is not
// printed, not long.
func (c *Client) Redact(s string) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return redact(s, c.access.Token)
}

func redact(s, token string) string {
	if token != "" {
		s = strings.ReplaceAll(s, token, "…")
	}
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	if len(s) > maxMessage {
		s = strings.ToValidUTF8(s[:maxMessage], "") + "…"
	}
	return s
}

// current is how the service is reached: as it was, when it is old and nothing
// newer can be had.
func (c *Client) current() Access {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now().Sub(c.loaded) >= renewAfter {
		_ = c.loadLocked() // told when the service refuses what is old
	}
	return c.access
}

// renew is current after another look, and why nothing newer can be had.
func (c *Client) renew() (Access, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.loadLocked()
	return c.access, err
}

func (c *Client) loadLocked() error {
	c.loaded = c.now() // whatever comes of it: the next try is as far away
	a, err := c.load()
	if err != nil {
		return err
	}
	config, err := a.check()
	if err != nil {
		return err
	}
	if sum := a.sum(); sum != c.sum {
		c.sum, c.tls = sum, config
		c.transport.CloseIdleConnections()
	}
	c.access = a
	return nil
}

// Pause waits between two questions, or until ctx ends.
func Pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// dialTLS connects with the certificates of now.
func (c *Client) dialTLS(ctx context.Context, network, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	c.mu.Lock()
	config := c.tls.Clone()
	c.mu.Unlock()
	if config.ServerName == "" {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		config.ServerName = host
	}
	raw, err := c.options.Dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, config)
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, err
	}
	return conn, nil
}
