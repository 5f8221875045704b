package resolver

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"golang.org/x/net/http/httpguts"
)

// Remote is the service that resolvers over a network ask.
type Remote struct {
	// The URL of the service, http:// or https://.
	Endpoint string `json:"endpoint,omitempty"`

	// A file with the certificates, in PEM, of the authorities that may vouch for
	// the service. It is read at load. Default: the system's.
	CAFile string `json:"ca_file,omitempty"`

	// What is sent with every request besides, such as Authorization: HTTP header
	// fields, or gRPC metadata. Placeholders such as {env.TOKEN} and
	// {file./etc/wayhouse/token} are replaced at load; one that has no value is
	// refused.
	Headers map[string]string `json:"headers,omitempty"`

	url     *url.URL
	roots   *x509.CertPool // nil: the system's
	rootSum [sha256.Size]byte
	headers map[string]string
}

func (r *Remote) provision() error {
	repl := caddy.NewReplacer()
	endpoint, err := repl.ReplaceOrErr(r.Endpoint, true, true)
	if err != nil {
		return fmt.Errorf("endpoint: %w", err)
	}
	if r.url, err = parseEndpoint(endpoint); err != nil {
		return fmt.Errorf("endpoint: %w", err)
	}
	if r.CAFile != "" {
		if r.url.Scheme != "https" {
			return errors.New("ca_file: the endpoint is http://, where nothing is verified")
		}
		pem, err := os.ReadFile(r.CAFile)
		if err != nil {
			return fmt.Errorf("ca_file: %w", err)
		}
		r.roots = x509.NewCertPool()
		if !r.roots.AppendCertsFromPEM(pem) {
			return fmt.Errorf("ca_file: %s has no certificate in PEM", r.CAFile)
		}
		r.rootSum = sha256.Sum256(pem)
	}
	r.headers = make(map[string]string, len(r.Headers))
	for name, v := range r.Headers {
		if !httpguts.ValidHeaderFieldName(name) {
			return fmt.Errorf("headers: %q is no name of a header field", name)
		}
		if v, err = repl.ReplaceOrErr(v, true, true); err != nil {
			return fmt.Errorf("headers.%s: %w", name, err)
		}
		v = strings.TrimSpace(v) // a file ends with a newline
		if !httpguts.ValidHeaderFieldValue(v) {
			return fmt.Errorf("headers.%s: the value cannot stand in a header field", name)
		}
		r.headers[name] = v
	}
	return nil
}

func parseEndpoint(s string) (*url.URL, error) {
	if s == "" {
		return nil, errors.New("none; give a URL, as in https://matchmaker.example.com:8443")
	}
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%q is not a URL", s)
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("%q begins with neither http:// nor https://", s)
	case u.Hostname() == "":
		return nil, fmt.Errorf("%q names no host", s)
	case u.User != nil:
		return nil, errors.New("a user in the URL would be shown in logs: give headers.Authorization instead")
	case u.Fragment != "":
		return nil, fmt.Errorf("%q has a fragment, which is never sent", s)
	}
	return u, nil
}

func (r *Remote) tls() *tls.Config {
	return &tls.Config{RootCAs: r.roots, MinVersion: tls.VersionTLS12}
}
