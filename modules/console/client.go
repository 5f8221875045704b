package console

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/user"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/caddyserver/caddy/v2"
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	"github.com/spf13/cobra"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
)

// What the environment may say instead of flags.
const (
	envAddress = "WAYHOUSE_ADDRESS"
	envToken   = "WAYHOUSE_TOKEN"
	envActor   = "WAYHOUSE_ACTOR"
)

const (
	defaultTimeout = 10 * time.Second
	maxToken       = 4 << 10  // bytes of a token file
	maxRefusal     = 64 << 10 // bytes of an error that are read
	maxActor       = 100      // characters
	maxAnswer      = 64 << 20 // bytes of an answer that is kept whole
)

// where adds the flags that say which instance is meant.
func where(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.String("address", "", "Admin endpoint (host:port or unix//path) or site (https://host/prefix) of the instance; "+envAddress+" or "+caddy.DefaultAdminListen+" unless given")
	fl.StringP("config", "c", "", "Config file that names the admin endpoint")
	fl.StringP("adapter", "a", "", "Name of the config adapter for it")
	fl.String("token-file", "", "File with the token for a site; "+envToken+" unless given")
	fl.String("ca-file", "", "PEM file of the certificates to trust instead of the system's")
	fl.Duration("timeout", defaultTimeout, "How long an answer may take")
}

// client asks one instance.
type client struct {
	name   string  // of the instance, for people
	base   url.URL // the calls are below it
	site   bool    // and no admin endpoint
	origin string  // "": none is sent
	token  string
	actor  string
	http   *http.Client
}

// newClient reads the flags of where.
func newClient(cmd *cobra.Command) (*client, error) {
	fl := cmd.Flags()
	text := func(name string) string { s, _ := fl.GetString(name); return s }
	timeout, _ := fl.GetDuration("timeout")
	if timeout <= 0 {
		return nil, misused("--timeout: %v is no time to answer in", timeout)
	}
	address, err := locate(text("address"), text("config"), text("adapter"))
	if err != nil {
		return nil, err
	}
	token, err := readToken(text("token-file"))
	if err != nil {
		return nil, err
	}
	c := &client{name: address}
	if c.actor, err = whoAmI(os.Getenv(envActor)); err != nil {
		return nil, err
	}
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		ResponseHeaderTimeout: timeout,
		TLSHandshakeTimeout:   timeout,
		IdleConnTimeout:       time.Minute,
	}
	c.http = &http.Client{Transport: t, CheckRedirect: func(r *http.Request, _ []*http.Request) error {
		return fmt.Errorf("it answers with a redirect to %s, which is not followed", r.URL.Redacted())
	}}
	if c.site = strings.Contains(address, "://"); c.site {
		err = c.useSite(address, token, text("ca-file"), t)
	} else {
		err = c.useEndpoint(address, text("token-file"), text("ca-file"), t)
	}
	if err != nil {
		return nil, err
	}
	dial := t.DialContext
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &patient{conn, timeout}, nil
	}
	return c, nil
}

// patient is a connection that may be silent for so long. An answer with a
// hundred thousand sessions may take longer than that as a whole.
type patient struct {
	net.Conn
	timeout time.Duration
}

func (p *patient) Read(b []byte) (int, error) {
	p.SetReadDeadline(time.Now().Add(p.timeout))
	return p.Conn.Read(b)
}

func (p *patient) Write(b []byte) (int, error) {
	p.SetWriteDeadline(time.Now().Add(p.timeout))
	return p.Conn.Write(b)
}

// locate finds the address: the one that is given, the one that a config has,
// the environment's, Caddy's.
func locate(address, config, adapter string) (string, error) {
	switch {
	case address != "":
		return address, nil
	case config == "" && adapter != "":
		return "", misused("--adapter: needs --config")
	case config == "":
		return cmp.Or(os.Getenv(envAddress), caddy.DefaultAdminListen), nil
	}
	doc, _, _, err := caddycmd.LoadConfig(config, adapter)
	if err != nil {
		return "", misused("--config: %v", err)
	}
	var c struct {
		Admin *struct {
			Disabled bool   `json:"disabled"`
			Listen   string `json:"listen"`
		} `json:"admin"`
	}
	switch err := json.Unmarshal(doc, &c); {
	case err != nil:
		return "", misused("--config: %s: %v", config, err)
	case c.Admin == nil || c.Admin.Listen == "" && !c.Admin.Disabled:
		return caddy.DefaultAdminListen, nil
	case c.Admin.Disabled:
		return "", misused("--config: %s has its admin endpoint off; name a site with --address", config)
	}
	return caddy.NewReplacer().ReplaceKnown(c.Admin.Listen, ""), nil
}

// useEndpoint is about Caddy's own admin endpoint, which has no login.
func (c *client) useEndpoint(address, tokenFile, caFile string, t *http.Transport) error {
	for flag, value := range map[string]string{"--token-file": tokenFile, "--ca-file": caFile} {
		if value != "" {
			return misused("%s: the address %s is an admin endpoint, which takes none; a site's begins with https://", flag, address)
		}
	}
	a, err := caddy.ParseNetworkAddress(address)
	if err != nil || a.PortRangeSize() > 1 || a.IsFdNetwork() || !a.IsUnixNetwork() && (a.Network != "tcp" || a.StartPort == 0) {
		return misused("--address: %q is none of host:port, unix//path and https://host/prefix", address)
	}
	t.Proxy = nil
	c.base = url.URL{Scheme: "http", Host: a.JoinHostPort(0)}
	network, to := "tcp", c.base.Host
	if a.IsUnixNetwork() {
		// Caddy takes any host on a socket; the permissions it may be made with
		// are no part of its path.
		network, c.base.Host = "unix", "127.0.0.1"
		to, _, _ = strings.Cut(a.Host, "|")
	} else {
		if a.Host == "" {
			c.base.Host = net.JoinHostPort("localhost", fmt.Sprint(a.StartPort))
			to = c.base.Host
		}
		c.origin = c.base.String()
	}
	t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, to)
	}
	return nil
}

// useSite is about a site with the handler wayhouse_admin.
func (c *client) useSite(address, token, caFile string, t *http.Transport) error {
	u, err := url.Parse(address)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return misused("--address: not a site's address, as in https://games.example.com/wayhouse")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return misused("--address: %s://%s%s is all that it may have; a token comes by --token-file or %s", u.Scheme, u.Host, u.Path, envToken)
	}
	if u.Scheme == "http" {
		if caFile != "" {
			return misused("--ca-file: the address %s has no TLS", address)
		}
		if token != "" && !fetch.Loopback(u) {
			return misused("--address: %s: a token goes by https, or to this host alone", address)
		}
	}
	if caFile != "" {
		pem, err := os.ReadFile(caFile)
		if err != nil {
			return misused("--ca-file: %v", err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return misused("--ca-file: %s has no certificate in PEM", caFile)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: roots}
	}
	if fetch.Loopback(u) {
		t.Proxy = nil
	}
	u.Path, u.RawPath = strings.TrimRight(u.Path, "/"), strings.TrimRight(u.RawPath, "/")
	c.base, c.token = *u, token
	return nil
}

// readToken reads the token from a file, or takes the environment's.
func readToken(file string) (string, error) {
	token, from := os.Getenv(envToken), envToken
	if file != "" {
		f, err := os.Open(file)
		if err != nil {
			return "", misused("--token-file: %v", err)
		}
		defer f.Close()
		b, err := io.ReadAll(io.LimitReader(f, maxToken+1))
		if err != nil {
			return "", misused("--token-file: %v", err)
		}
		token, from = strings.TrimSpace(string(b)), "--token-file"
		if token == "" || len(b) > maxToken {
			return "", misused("--token-file: %s is empty or longer than %d bytes", file, maxToken)
		}
	}
	for _, r := range token {
		if r <= ' ' || r > '~' {
			return "", misused("%s: a token is one word of printable ASCII", from)
		}
	}
	return token, nil
}

// whoAmI is the actor that changes are kept under.
func whoAmI(given string) (string, error) {
	if given != "" {
		if strings.ContainsFunc(given, func(r rune) bool { return !unicode.IsPrint(r) }) || len([]rune(given)) > maxActor {
			return "", misused("%s: not at most %d printable characters", envActor, maxActor)
		}
		return given, nil
	}
	name := os.Getenv("USER")
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, _ := os.Hostname()
	actor := []rune(clean(cmp.Or(name, "unknown") + "@" + cmp.Or(host, "unknown")))
	return string(actor[:min(len(actor), maxActor)]), nil
}

// refusal is an answer of the instance that is no success.
type refusal struct {
	status int
	text   string
}

func (r *refusal) Error() string { return r.text }

// at is a path of the API; each part is one segment, whatever it has in it.
func at(parts ...string) (path string, err error) {
	for _, p := range parts {
		if p == "" || p == "." || p == ".." {
			return "", misused("%q cannot be a name", p)
		}
		path += "/" + url.PathEscape(p)
	}
	return path, nil
}

// ask sends a request and returns a good answer, whose body is to be closed.
// body nil is none.
func (c *client) ask(ctx context.Context, method, path string, query url.Values, body any) (*http.Response, error) {
	var doc []byte
	if body != nil {
		var err error
		if doc, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	u := c.base
	plain, err := url.PathUnescape(path)
	if err != nil {
		return nil, err
	}
	u.RawPath, u.Path = u.EscapedPath()+path, u.Path+plain
	u.RawQuery = query.Encode()
	var res *http.Response
	for try := 0; ; try++ {
		req, err := http.NewRequestWithContext(ctx, method, u.String(), bytes.NewReader(doc))
		if err != nil {
			return nil, err
		}
		if body != nil {
			req.Header.Set("Content-Type", "application/json")
		}
		req.Header.Set("Accept", "application/json")
		req.Header.Set("User-Agent", "wayhouse")
		if c.origin != "" {
			req.Header.Set("Origin", c.origin)
		}
		if c.token != "" {
			req.Header.Set("Authorization", "Bearer "+c.token)
		}
		if method != http.MethodGet {
			req.Header.Set("X-Actor", c.actor)
		}
		res, err = c.http.Do(req)
		if err == nil {
			break
		}
		// A reload moves the endpoint to a new server. What asks may be asked again.
		again := method == http.MethodGet && try < 3 && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET))
		if !again {
			return nil, c.unreachable(ctx, err)
		}
	}
	if res.StatusCode/100 == 2 {
		return res, nil
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(res.Body, maxRefusal))
	return nil, &refusal{res.StatusCode, c.reason(res, b)}
}

func (c *client) unreachable(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	var ue *url.Error
	if errors.As(err, &ue) { // its text repeats the request
		err = ue.Err
	}
	return fmt.Errorf("asking %s: %w", c.name, err)
}

// reason is what the instance says is wrong.
func (c *client) reason(res *http.Response, body []byte) string {
	var j struct {
		Error  string `json:"error"`
		Status string `json:"status"` // of /healthz and /readyz
		Reason string `json:"reason"`
	}
	json.Unmarshal(body, &j) // or whoever is in between has answered
	text := j.Error
	if text == "" && j.Reason != "" {
		text = j.Status + ": " + j.Reason
	}
	switch {
	case text == "" && res.StatusCode == http.StatusNotFound:
		text = fmt.Sprintf("%s answers %s: it does not serve this call of the API of wayhouse", c.name, res.Status)
	case text == "":
		text = fmt.Sprintf("%s answers %s", c.name, res.Status)
	}
	if res.StatusCode == http.StatusUnauthorized && c.token == "" {
		text += "; name a file that has it with --token-file, or set " + envToken
	}
	return text
}

// get decodes the answer to a GET into v.
func (c *client) get(ctx context.Context, path string, query url.Values, v any) error {
	res, err := c.ask(ctx, http.MethodGet, path, query, nil)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body := &io.LimitedReader{R: res.Body, N: maxAnswer}
	if err := json.NewDecoder(body).Decode(v); err != nil {
		if body.N == 0 {
			return fmt.Errorf("the answer of %s has more than %d MiB", c.name, maxAnswer>>20)
		}
		return c.garbled(ctx, err)
	}
	return nil
}

// garbled is about an answer that breaks off or is no JSON.
func (c *client) garbled(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		return fmt.Errorf("the answer of %s breaks off", c.name)
	}
	return fmt.Errorf("the answer of %s is not what the API of wayhouse says: %w", c.name, err)
}
