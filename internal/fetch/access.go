package fetch

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"

	"golang.org/x/net/http/httpguts"
	"golang.org/x/sys/unix"

	"github.com/wayhouse-proxy/wayhouse/internal/hostport"
)

// Access is how a service is reached, as files say it at one time.
type Access struct {
	URL   *url.URL
	Token string // "" for none

	// Of the authorities that may vouch for the service, in PEM; nil for the
	// system's.
	Roots []byte

	// What shows who asks, in PEM; nil for nothing.
	Cert, Key []byte

	// The name in the service's certificate; "" for the URL's host.
	ServerName string
}

// Check says what is wrong with it: certificates that are none, and secrets that
// would go over the network in the clear.
func (a *Access) Check() error {
	_, err := a.check()
	return err
}

// check is Check, and makes of the certificates what connections need.
func (a *Access) check() (*tls.Config, error) {
	if a.URL.Scheme == "http" && !Loopback(a.URL) {
		switch {
		case a.Token != "":
			return nil, fmt.Errorf("%s: a token would go over the network in the clear; use https://", a.URL)
		case a.Cert != nil:
			return nil, fmt.Errorf("%s: a certificate shows who asks over https:// only", a.URL)
		}
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: a.ServerName}
	if a.Roots != nil {
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(a.Roots) {
			return nil, errors.New("the authority's certificate is not in PEM")
		}
	}
	if a.Cert != nil {
		pair, err := tls.X509KeyPair(a.Cert, a.Key)
		if err != nil {
			return nil, fmt.Errorf("the client's certificate: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// sum tells what connections depend on from other such.
func (a *Access) sum() (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, part := range [][]byte{[]byte(a.URL.String()), a.Roots, a.Cert, a.Key, []byte(a.ServerName)} {
		fmt.Fprintf(h, "%d ", len(part))
		h.Write(part)
	}
	h.Sum(sum[:0])
	return sum
}

// ParseURL reads the URL of a service: http:// or https://, a host, and perhaps
// a port and a path.
func ParseURL(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, errors.New("this is not a URL, such as https://service.example.com:8500") // s may have a password in it
	case u.User != nil:
		return nil, errors.New("a user in the URL would be shown in logs: give a token in a file instead")
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, fmt.Errorf("%q begins with neither http:// nor https://", s)
	case u.Hostname() == "":
		return nil, fmt.Errorf("%q names no host", s)
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, fmt.Errorf("%q has more than a host, a port and a path", s)
	}
	return u, nil
}

// Loopback reports whether a URL is one of this host.
func Loopback(u *url.URL) bool { return hostport.Loopback(u.Hostname()) }

// maxFile bounds the files that are read.
const maxFile = 1 << 20

// File reads a file that holds a secret or a certificate.
func File(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe without a writer is no reason to wait
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxFile {
		return nil, fmt.Errorf("%s has more than 1 MiB", path)
	}
	return b, nil
}

// TokenFile reads a token.
func TokenFile(path string) (string, error) {
	b, err := File(path)
	if err != nil {
		return "", err
	}
	return Token(path, b)
}

// Token is the token in b, which comes from where.
func Token(where string, b []byte) (string, error) {
	b = bytes.TrimSpace(b)
	if len(b) == 0 {
		return "", fmt.Errorf("%s is empty", where)
	}
	if !httpguts.ValidHeaderFieldValue(string(b)) {
		return "", fmt.Errorf("%s holds more than a token: it cannot stand in a header field", where)
	}
	return string(b), nil
}

// CAFile reads certificates of authorities.
func CAFile(path string) ([]byte, error) {
	b, err := File(path)
	if err == nil && !x509.NewCertPool().AppendCertsFromPEM(b) {
		err = fmt.Errorf("%s has no certificate in PEM", path)
	}
	return b, err
}
