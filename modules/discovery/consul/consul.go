// Package consul finds the backends of pools among the instances of a service
// that Consul knows of, by its HTTP API.
package consul

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	"github.com/wayhouse-proxy/wayhouse/internal/placeholder"
	"github.com/wayhouse-proxy/wayhouse/modules/discovery"
)

func init() { caddy.RegisterModule(new(Source)) }

// Source finds the instances of a service that pass their checks. Placeholders
// are replaced at load.
type Source struct {
	discovery.Settings

	// The name of the service. Needed.
	Service string `json:"service,omitempty"`

	// The URL of an agent: http:// or https://. Default: http://127.0.0.1:8500.
	Addr string `json:"addr,omitempty"`

	// A tag that instances must have. Default: none.
	Tag string `json:"tag,omitempty"`

	// The namespace of the service, where Consul has namespaces. Default: that of
	// the token.
	Namespace string `json:"namespace,omitempty"`

	// The datacenter of the service. Default: that of the agent.
	Datacenter string `json:"datacenter,omitempty"`

	// A file with an ACL token, which goes to https:// or to loopback only. It
	// needs service:read on the service and node:read on the nodes that it runs
	// on. It is read again each minute, and when it is refused. Default: none.
	TokenFile string `json:"token_file,omitempty"`

	// A file with the certificates, in PEM, of the authorities that may vouch for
	// the agent. It is read again each minute. Default: the system's.
	CAFile string `json:"ca_file,omitempty"`

	url    *url.URL
	client *fetch.Client
	rhythm rhythm

	mu     sync.Mutex
	index  uint64        // of the last list; 0: it had none
	lists  uint64        // that have told an index, or none
	listed chan struct{} // closed by the next list
}

// rhythm is how long things take; tests have others.
type rhythm struct {
	wait     time.Duration // that the agent may wait for a change
	patience time.Duration // that it may take longer
	pause    time.Duration // between questions that have brought nothing
}

// Consul adds up to a sixteenth to the wait, so that not everybody asks anew at
// once.
var usual = rhythm{wait: 300 * time.Second, patience: 50 * time.Second, pause: time.Second}

const (
	defaultAddr  = "http://127.0.0.1:8500"
	maxInstance  = 1 << 20  // bytes, with its checks
	maxList      = 32 << 20 // bytes of all instances
	maxInstances = 1 << 16
	maxDrained   = 256 << 10 // bytes that are read so that a connection can be kept
)

// CaddyModule returns the Caddy module information.
func (*Source) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "wayhouse.sources.consul",
		New: func() caddy.Module { return new(Source) },
	}
}

// Provision sets the defaults and reads the token and the certificates. It asks
// nothing.
func (s *Source) Provision(ctx caddy.Context) (err error) {
	if err := s.Settings.Provision(ctx); err != nil {
		return err
	}
	if err := placeholder.Replace(
		placeholder.Option{Name: "service", Value: &s.Service},
		placeholder.Option{Name: "addr", Value: &s.Addr},
		placeholder.Option{Name: "tag", Value: &s.Tag},
		placeholder.Option{Name: "namespace", Value: &s.Namespace},
		placeholder.Option{Name: "datacenter", Value: &s.Datacenter},
		placeholder.Option{Name: "token_file", Value: &s.TokenFile},
		placeholder.Option{Name: "ca_file", Value: &s.CAFile},
	); err != nil {
		return err
	}
	if s.Service == "" {
		return errors.New("service: none; give the name of a service, as in consul match-server")
	}
	if s.Service == "." || s.Service == ".." {
		return fmt.Errorf("service: %q is a part of paths and not a name", s.Service)
	}
	if s.Addr == "" {
		s.Addr = defaultAddr
	}
	if s.url, err = fetch.ParseURL(s.Addr); err != nil {
		return fmt.Errorf("addr: %w", err)
	}
	if s.TokenFile != "" && s.url.Scheme == "http" && !fetch.Loopback(s.url) {
		return fmt.Errorf("addr: %q is http:// to another host, where the token would go over the network in the clear: use https://", s.Addr)
	}
	if s.CAFile != "" && s.url.Scheme != "https" {
		return errors.New("ca_file: the addr is http://, where nothing is verified")
	}
	s.rhythm, s.listed = usual, make(chan struct{})
	s.client, err = fetch.New(fetch.Options{Header: "X-Consul-Token"}, s.access)
	return err
}

// access is what the files say now.
func (s *Source) access() (a fetch.Access, err error) {
	a.URL = s.url
	if s.TokenFile != "" {
		if a.Token, err = fetch.TokenFile(s.TokenFile); err != nil {
			return a, fmt.Errorf("token_file: %w", err)
		}
	}
	if s.CAFile != "" {
		if a.Roots, err = fetch.CAFile(s.CAFile); err != nil {
			return a, fmt.Errorf("ca_file: %w", err)
		}
	}
	return a, nil
}

// Close gives up connections.
func (s *Source) Close() error {
	if s.client != nil {
		s.client.Close()
	}
	return nil
}

// get asks for the instances. index is the one of the answer, 0 when it has
// none.
func (s *Source) get(ctx context.Context, query url.Values) (resp *http.Response, index uint64, err error) {
	query.Set("passing", "true")
	for name, v := range map[string]string{"tag": s.Tag, "ns": s.Namespace, "dc": s.Datacenter} {
		if v != "" {
			query.Set(name, v)
		}
	}
	if resp, err = s.client.Get(ctx, "v1/health/service/"+url.PathEscape(s.Service), query); err != nil {
		return nil, 0, err
	}
	index, _ = strconv.ParseUint(strings.TrimSpace(resp.Header.Get("X-Consul-Index")), 10, 64)
	return resp, index, nil
}

// List implements discovery.Source.
func (s *Source) List(ctx context.Context) (discovery.Set, error) {
	found, index, err := s.list(ctx)
	if err != nil {
		return discovery.Set{}, fmt.Errorf("listing service %s: %w", s.Service, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.index = index
	s.lists++
	close(s.listed)
	s.listed = make(chan struct{})
	return discovery.Set{Endpoints: found}, nil
}

func (s *Source) list(ctx context.Context) ([]discovery.Endpoint, uint64, error) {
	resp, index, err := s.get(ctx, url.Values{})
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	found, err := decode(fetch.NewDecoder(resp.Body, maxInstance, maxList))
	return found, index, err
}

// Watch implements discovery.Source. It asks with the index of the last list,
// which the agent answers when there is a later one.
func (s *Source) Watch(ctx context.Context, changed func()) error {
	for after := uint64(0); ; {
		index, lists := s.wait(ctx, after)
		if ctx.Err() != nil {
			return nil
		}
		if index == 0 {
			return fmt.Errorf("watching service %s: the answer has no X-Consul-Index", s.Service)
		}
		began := time.Now()
		newer, err := s.await(ctx, index)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("watching service %s: %w", s.Service, err)
		case newer == index: // the time was up
			fetch.Pause(ctx, s.rhythm.pause-time.Since(began))
			continue
		}
		// Later, or else Consul counts anew: only a list can tell from where.
		after = lists
		changed()
	}
}

// wait is the index of the last list, as soon as there have been more than so
// many, and how many there are.
func (s *Source) wait(ctx context.Context, after uint64) (index, lists uint64) {
	for {
		s.mu.Lock()
		index, lists = s.index, s.lists
		listed := s.listed
		s.mu.Unlock()
		if lists > after {
			return index, lists
		}
		select {
		case <-listed:
		case <-ctx.Done():
			return 0, lists
		}
	}
}

// await returns the index that the agent tells when it has another than this
// one, or when it has waited long enough.
func (s *Source) await(ctx context.Context, index uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.rhythm.wait+s.rhythm.patience)
	defer cancel()
	resp, newer, err := s.get(ctx, url.Values{
		"index": {strconv.FormatUint(index, 10)}, "wait": {strconv.Itoa(int(s.rhythm.wait.Seconds())) + "s"},
	})
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, maxDrained) // a list will tell what is in there
	return newer, nil
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens. Syntax:
//
//	consul <service> {
//		addr             <url>
//		tag              <tag>
//		namespace        <name>
//		datacenter       <name>
//		token_file       <path>
//		ca_file          <path>
//		refresh_interval <duration>
//	}
func (s *Source) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // consume the name of the kind
	if !d.Args(&s.Service) {
		return d.Errf("source consul: the service is missing, as in consul match-server")
	}
	options := s.CaddyfileOptions()
	maps.Copy(options, caddyopt.Options{
		"addr":       caddyopt.String(&s.Addr),
		"tag":        caddyopt.String(&s.Tag),
		"namespace":  caddyopt.String(&s.Namespace),
		"datacenter": caddyopt.String(&s.Datacenter),
		"token_file": caddyopt.String(&s.TokenFile),
		"ca_file":    caddyopt.String(&s.CAFile),
	})
	return caddyopt.BlockOf(d, "the source consul", options)
}

// Interface guards
var (
	_ discovery.Source      = (*Source)(nil)
	_ caddy.Provisioner     = (*Source)(nil)
	_ caddy.Validator       = (*Source)(nil)
	_ caddyfile.Unmarshaler = (*Source)(nil)
	_ io.Closer             = (*Source)(nil)
)
