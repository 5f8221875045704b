package resolver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
)

func init() { caddy.RegisterModule(new(HTTP)) }

// HTTP asks by an HTTP/1.1 POST of a JSON object, over connections that are
// kept, and follows no redirect.
type HTTP struct {
	Settings
	Remote

	transport *transport
}

// CaddyModule returns the Caddy module information.
func (*HTTP) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.resolvers.http",
		New: func() caddy.Module { return new(HTTP) },
	}
}

// maxBody bounds an answer, and its header.
const maxBody = 64 << 10

// transport has the connections to a service. It outlives configs, so that a
// reload costs no flow a handshake.
type transport struct {
	http.Transport
	client http.Client
}

// transportKey is what makes connections the same.
type transportKey struct {
	scheme, host string
	roots        [32]byte
}

var transports = caddy.NewUsagePool()

// Destruct implements caddy.Destructor.
func (t *transport) Destruct() error {
	t.CloseIdleConnections()
	return nil
}

func (h *HTTP) transportKey() transportKey { return transportKey{h.url.Scheme, h.url.Host, h.rootSum} }

// Provision sets the defaults and takes the connections.
func (h *HTTP) Provision(ctx caddy.Context) error {
	if err := h.Settings.Provision(ctx); err != nil {
		return err
	}
	if err := h.Remote.provision(); err != nil {
		return err
	}
	if err := h.Settings.Validate(); err != nil {
		return err
	}
	v, _, err := transports.LoadOrNew(h.transportKey(), func() (caddy.Destructor, error) {
		t := &transport{Transport: http.Transport{
			DialContext: fetch.Dial, TLSClientConfig: h.tls(),
			MaxConnsPerHost: maxCalls, MaxIdleConnsPerHost: maxCalls, IdleConnTimeout: 90 * time.Second,
			DisableCompression: true, MaxResponseHeaderBytes: maxBody,
		}}
		t.client = http.Client{
			Transport:     &t.Transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
		return t, nil
	})
	if err != nil {
		return err
	}
	h.transport = v.(*transport)
	return nil
}

// Close gives the connections back.
func (h *HTTP) Close() error {
	if h.transport == nil {
		return nil
	}
	_, err := transports.Delete(h.transportKey())
	return err
}

// Resolve implements Resolver.
func (h *HTTP) Resolve(ctx context.Context, r *Request) (Answer, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url.String(), bytes.NewReader(encodeRequest(r)))
	if err != nil {
		return Answer{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "wayhouse")
	if r.TraceParent != "" {
		req.Header.Set("Traceparent", r.TraceParent)
	}
	for name, v := range h.headers {
		if http.CanonicalHeaderKey(name) == "Host" {
			req.Host = v
			continue
		}
		req.Header.Set(name, v)
	}
	resp, err := h.transport.client.Do(req)
	if err != nil {
		return Answer{}, err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusNoContent:
		return Answer{}, nil
	default:
		return Answer{}, fmt.Errorf("status %d", resp.StatusCode)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil {
		return Answer{}, err
	}
	if len(body) > maxBody {
		return Answer{}, errors.New("the answer is larger than 64 KiB")
	}
	return decodeAnswer(body)
}

// Interface guards
var (
	_ caddy.Provisioner = (*HTTP)(nil)
	_ Resolver          = (*HTTP)(nil)
	_ io.Closer         = (*HTTP)(nil)
)
