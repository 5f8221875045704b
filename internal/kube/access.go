// Package kube lists and watches objects of a Kubernetes cluster, for the
// sources that find backends there. It speaks the API's HTTP and JSON itself:
// of what client-go can do, listing and watching is a small part.
package kube

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"regexp"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/wayhouse-proxy/wayhouse/internal/caddyopt"
	"github.com/wayhouse-proxy/wayhouse/internal/fetch"
	"github.com/wayhouse-proxy/wayhouse/internal/placeholder"
)

// Where a pod finds its service account.
const (
	podToken = "/var/run/secrets/kubernetes.io/serviceaccount/token"
	podCA    = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
)

const (
	defaultAPI       = "https://kubernetes.default.svc"
	defaultNamespace = "default"
)

// headerTimeout is how long the API may take to begin an answer.
const headerTimeout = 15 * time.Second

// Access says where the API of a cluster is, and who asks. In a pod nothing of
// it is needed. Placeholders are replaced at load.
type Access struct {
	// The namespace. Default: the one of the kubeconfig's context, else default.
	Namespace string `json:"namespace,omitempty"`

	// The URL of the API: https://, or http:// on loopback, as of kubectl proxy.
	// Default: the one that Kubernetes tells its pods in KUBERNETES_SERVICE_HOST
	// and KUBERNETES_SERVICE_PORT, else https://kubernetes.default.svc.
	API string `json:"api,omitempty"`

	// A file with the token of a service account. It is read again each minute,
	// and when it is refused. Default: that of the pod, where there is one.
	TokenFile string `json:"token_file,omitempty"`

	// A file with the certificates, in PEM, of the authorities that may vouch for
	// the API. It is read again each minute. Default: that of the pod, where there
	// is one, else the system's.
	CAFile string `json:"ca_file,omitempty"`

	// A kubeconfig to take all this from, instead of api, token_file and ca_file.
	// It is read again each minute. Plugins that fetch credentials are refused.
	Kubeconfig string `json:"kubeconfig,omitempty"`

	// The context of the kubeconfig. Default: its current context.
	Context string `json:"context,omitempty"`

	pod           pod
	headerTimeout time.Duration // 0: the constant
}

// pod is what a pod has been given; tests have others.
type pod struct{ token, ca string }

// Client asks the API of a cluster.
type Client struct {
	fetch     *fetch.Client
	namespace string
}

// Namespace is the one that is asked about.
func (c *Client) Namespace() string { return c.namespace }

// Close gives up connections.
func (c *Client) Close() { c.fetch.Close() }

// Connect reads the files and makes a client, which sends nothing before it is
// used. Errors begin with the option that is wrong.
func (a *Access) Connect() (*Client, error) {
	if err := a.replace(); err != nil {
		return nil, err
	}
	if a.pod == (pod{}) {
		a.pod = pod{podToken, podCA}
	}
	namespace := a.Namespace
	load := a.inPod
	if a.Kubeconfig == "" {
		if a.Context != "" {
			return nil, errors.New("context: is of a kubeconfig, and none is given")
		}
	} else {
		for _, o := range []struct{ name, v string }{{"api", a.API}, {"token_file", a.TokenFile}, {"ca_file", a.CAFile}} {
			if o.v != "" {
				return nil, fmt.Errorf("%s: the kubeconfig says that; give one of the two", o.name)
			}
		}
		if namespace == "" {
			k, err := readKubeconfig(a.Kubeconfig, a.Context)
			if err != nil {
				return nil, fmt.Errorf("kubeconfig: %w", err)
			}
			namespace = k.namespace
		}
		load = a.byKubeconfig
	}
	if namespace == "" {
		namespace = defaultNamespace
	}
	if !IsName(namespace) {
		return nil, fmt.Errorf("namespace: %q is not made of up to 63 small letters, digits and hyphens", namespace)
	}
	o := fetch.Options{Header: "Authorization", Prefix: "Bearer ", HeaderTimeout: headerTimeout}
	if a.headerTimeout != 0 {
		o.HeaderTimeout = a.headerTimeout
	}
	client, err := fetch.New(o, load)
	if err != nil {
		return nil, err
	}
	return &Client{fetch: client, namespace: namespace}, nil
}

func (a *Access) replace() error {
	return placeholder.Replace(
		placeholder.Option{Name: "namespace", Value: &a.Namespace},
		placeholder.Option{Name: "api", Value: &a.API},
		placeholder.Option{Name: "token_file", Value: &a.TokenFile},
		placeholder.Option{Name: "ca_file", Value: &a.CAFile},
		placeholder.Option{Name: "kubeconfig", Value: &a.Kubeconfig},
		placeholder.Option{Name: "context", Value: &a.Context},
	)
}

// inPod is the access by api, token_file and ca_file, and what a pod has.
func (a *Access) inPod() (to fetch.Access, err error) {
	if to.URL, err = a.url(); err != nil {
		return to, fmt.Errorf("api: %w", err)
	}
	switch {
	case a.TokenFile != "":
		if to.Token, err = fetch.TokenFile(a.TokenFile); err != nil {
			return to, fmt.Errorf("token_file: %w", err)
		}
	default:
		to.Token, err = fetch.TokenFile(a.pod.token)
		switch {
		case errors.Is(err, fs.ErrNotExist) && a.API != "": // perhaps kubectl proxy, which asks for none
		case errors.Is(err, fs.ErrNotExist):
			return to, fmt.Errorf("token_file: there is no %s, as in a pod with a service account: give api and token_file, or a kubeconfig", a.pod.token)
		case err != nil:
			return to, fmt.Errorf("token_file: %w", err)
		}
	}
	switch {
	case a.CAFile != "":
		if to.URL.Scheme != "https" {
			return to, errors.New("ca_file: the API is http://, where nothing is verified")
		}
		if to.Roots, err = fetch.CAFile(a.CAFile); err != nil {
			return to, fmt.Errorf("ca_file: %w", err)
		}
	case to.URL.Scheme == "https":
		if to.Roots, err = fetch.CAFile(a.pod.ca); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return to, fmt.Errorf("ca_file: %w", err)
		}
	}
	return to, nil
}

func (a *Access) url() (*url.URL, error) {
	api := a.API
	if api == "" {
		api = defaultAPI
		if host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"); host != "" && port != "" {
			api = "https://" + net.JoinHostPort(host, port)
		}
	}
	return parseAPI(api)
}

// parseAPI refuses what no token must be sent to, whether there is one or not.
func parseAPI(s string) (*url.URL, error) {
	u, err := fetch.ParseURL(s)
	if err != nil {
		return nil, err
	}
	if u.Scheme == "http" && !fetch.Loopback(u) {
		return nil, fmt.Errorf("%q is http:// to another host, where a token would go over the network in the clear: use https://", s)
	}
	return u, nil
}

func (a *Access) byKubeconfig() (fetch.Access, error) {
	k, err := readKubeconfig(a.Kubeconfig, a.Context)
	if err != nil {
		return fetch.Access{}, fmt.Errorf("kubeconfig: %w", err)
	}
	if err := k.access.Check(); err != nil {
		return fetch.Access{}, fmt.Errorf("kubeconfig: %s: %w", a.Kubeconfig, err)
	}
	return k.access, nil
}

var name = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// IsName reports whether s can be the name of a namespace or a service.
func IsName(s string) bool { return name.MatchString(s) }

// CaddyfileOptions are the options of every kind of source that asks the API.
// Syntax:
//
//	namespace  <name>
//	api        <url>
//	token_file <path>
//	ca_file    <path>
//	kubeconfig <path> [<context>]
func (a *Access) CaddyfileOptions() caddyopt.Options {
	return caddyopt.Options{
		"namespace":  caddyopt.String(&a.Namespace),
		"api":        caddyopt.String(&a.API),
		"token_file": caddyopt.String(&a.TokenFile),
		"ca_file":    caddyopt.String(&a.CAFile),
		"kubeconfig": caddyopt.Func(func(d *caddyfile.Dispenser) error {
			if !d.Args(&a.Kubeconfig) {
				return d.Errf("kubeconfig: the path is missing")
			}
			if d.NextArg() {
				a.Context = d.Val()
			}
			return nil
		}),
	}
}
