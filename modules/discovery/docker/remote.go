package docker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	"github.com/wayhouse-proxy/wayhouse/internal/placeholder"
)

// Remote is where a daemon is.
type Remote struct {
	// Where the daemon is, or a proxy that lets only reads through to it:
	// unix:///PATH, tcp://HOST:PORT, http://HOST:PORT or https://HOST:PORT.
	// Placeholders such as {env.DOCKER_HOST} are replaced at load.
	// Default: unix:///var/run/docker.sock.
	Endpoint string `json:"endpoint,omitempty"`

	// A file with the certificates, in PEM, of the authorities that may vouch for
	// the daemon. With it, or with a certificate, tcp:// means TLS. It is read
	// again every minute. Default: the system's.
	CAFile string `json:"ca_file,omitempty"`

	// A file with the certificate that the daemon asks for, in PEM. It is read again
	// every minute. Needs key_file. Default: none.
	CertFile string `json:"cert_file,omitempty"`

	// A file with the key of that certificate, in PEM. It is read again every
	// minute. Default: none.
	KeyFile string `json:"key_file,omitempty"`

	url    *url.URL
	socket string     // its path; "": TCP
	host   netip.Addr // of the host, where that is known
}

const defaultEndpoint = "unix:///var/run/docker.sock"

// The ports that daemons have for the API, in the clear and with TLS.
const (
	plainPort = "2375"
	tlsPort   = "2376"
)

// headerTimeout is how long a daemon may take to begin an answer. It begins the
// stream of events before there is one.
const headerTimeout = 30 * time.Second

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// provision makes what speaks to the daemon.
func (r *Remote) provision() (*daemon, error) {
	if r.Endpoint == "" {
		r.Endpoint = defaultEndpoint
	}
	s := r.Endpoint
	if err := placeholder.Replace(placeholder.Option{Name: "endpoint", Value: &s}); err != nil {
		return nil, err
	}
	if err := r.parse(s); err != nil {
		return nil, fmt.Errorf("endpoint: %w", err)
	}
	if r.url.Scheme == "http" {
		for _, f := range [][2]string{{"ca_file", r.CAFile}, {"cert_file", r.CertFile}, {"key_file", r.KeyFile}} {
			if f[1] != "" {
				return nil, fmt.Errorf("%s: the endpoint %q has no TLS; begin it with tcp:// or https://, or leave the file out", f[0], s)
			}
		}
	}
	if (r.CertFile == "") != (r.KeyFile == "") {
		return nil, errors.New("cert_file: a certificate and its key belong together; give cert_file and key_file, or neither")
	}
	o := fetch.Options{HeaderTimeout: headerTimeout}
	if r.socket != "" {
		o.Dial = func(ctx context.Context, _, _ string) (net.Conn, error) { return fetch.Dial(ctx, "unix", r.socket) }
	}
	client, err := fetch.New(o, r.access)
	if err != nil {
		return nil, err
	}
	return &daemon{client: client}, nil
}

// access reads the certificates.
func (r *Remote) access() (a fetch.Access, err error) {
	a.URL = r.url
	if r.CAFile != "" {
		if a.Roots, err = fetch.CAFile(r.CAFile); err != nil {
			return a, fmt.Errorf("ca_file: %w", err)
		}
	}
	if r.CertFile == "" {
		return a, nil
	}
	if a.Cert, err = fetch.File(r.CertFile); err != nil {
		return a, fmt.Errorf("cert_file: %w", err)
	}
	if a.Key, err = fetch.File(r.KeyFile); err != nil {
		return a, fmt.Errorf("key_file: %w", err)
	}
	return a, nil
}

// parse reads an endpoint.
func (r *Remote) parse(s string) error {
	if path, ok := strings.CutPrefix(s, "unix://"); ok {
		if !strings.HasPrefix(path, "/") {
			return fmt.Errorf("%q has no absolute path behind unix://, as %s has", s, defaultEndpoint)
		}
		// Whose name is in the requests, a socket does not care.
		r.socket, r.url, r.host = path, &url.URL{Scheme: "http", Host: "localhost"}, loopback
		return nil
	}
	kind, rest, ok := strings.Cut(s, "://")
	if kind == "tcp" {
		if kind = "http"; r.CAFile != "" || r.CertFile != "" {
			kind = "https"
		}
	}
	if !ok || kind != "http" && kind != "https" {
		return errors.New("it begins with none of unix://, tcp://, http:// and https://") // it may have a password in it
	}
	u, err := fetch.ParseURL(kind + "://" + rest)
	if err != nil {
		return err
	}
	if u.Path != "" && u.Path != "/" {
		return fmt.Errorf("%q has more than a host and a port", s)
	}
	if u.Port() == "" {
		port := plainPort
		if kind == "https" {
			port = tlsPort
		}
		u.Host = net.JoinHostPort(u.Hostname(), port)
	}
	r.url = u
	if a, err := netip.ParseAddr(u.Hostname()); err == nil && a.Zone() == "" {
		r.host = a.Unmap()
	} else if u.Hostname() == "localhost" {
		r.host = loopback
	}
	return nil
}
